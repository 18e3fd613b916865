"""`zstore plan`: whether training a model fits on a machine, what each rung of the ladder needs, and the config to use."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from zstore.errors import ConfigError, UsageError
from zstore.sizes import format_bytes

from .options import Json, parse_file, parse_number, size_option
from .printing import make_console, make_table, print_json

if TYPE_CHECKING:
    from torch import nn

    from zstore.engine.config.config import OptimizerConfig
    from zstore.engine.plan.activations import Width
    from zstore.engine.plan.costs import Costs, Machine, PlannedRun
    from zstore.engine.plan.plan import Slots

_FOLDER = "/local_nvme"
_BUCKET_NUMEL = 50_000_000
"""Elements of one collective in a config that is proposed: 100 MB in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options on the command line; None: not given."""

    config: Annotated[
        Path | None,
        typer.Option(
            help="Say whether this configuration fits, and what to change in it if it does not.",
            parser=parse_file,
            metavar="FILE",
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(help="gpt-tiny, gpt-small or gpt-base; or a transformers config.json or model folder (extra hf)."),
    ] = None
    params: Annotated[
        int | None, typer.Option(help="Number of parameters, like 7e9 or 7B.", metavar="N", parser=parse_number)
    ] = None
    hidden: Annotated[int | None, typer.Option(help="Hidden size, with --params.", min=1, metavar="N")] = None
    layers: Annotated[int | None, typer.Option(help="Layers, with --params.", min=1, metavar="N")] = None
    vocab: Annotated[int, typer.Option(help="Vocabulary size, with --params.", min=1)] = 32_000
    gpus: Annotated[
        int | None, typer.Option(help="GPUs; 0: train on the CPU (default: this machine's).", min=0, metavar="N")
    ] = None
    machines: Annotated[
        int, typer.Option(help="Machines like this that train together; sizes are of one.", min=1, metavar="N")
    ] = 1
    gpu_memory: Annotated[int | None, size_option("Memory of one GPU, like 24GB.")] = None
    memory: Annotated[int | None, size_option("Host memory (default: this machine's).")] = None
    disk: Annotated[int | None, size_option("Free space on the drive.")] = None
    micro_batch: Annotated[
        int | None,
        typer.Option(help="Samples per rank and step (default: the configuration's, or 1).", min=1, metavar="N"),
    ] = None
    seq_length: Annotated[int, typer.Option(help="Tokens in a sample.", min=2, metavar="N")] = 1024
    precision: Annotated[
        Literal["auto", "fp16", "bf16", "fp32"],
        typer.Option(help="Type of parameters and gradients; auto: what this machine computes natively."),
    ] = "auto"

    def __post_init__(self) -> None:
        """Refuse options that name no model, or two."""
        numbers = (self.params, self.hidden, self.layers)
        if self.model is not None and any(value is not None for value in numbers):
            raise UsageError("--model already gives the shape: leave out --params, --hidden and --layers")
        if self.model is None and None in numbers:
            raise UsageError("name a model: --model M, or --params, --hidden and --layers together")
        if self.config is not None and self.precision != "auto":
            raise UsageError("--config says which type the model is trained in: leave out --precision")


def plan_command(options: PlanOptions, json: Json = False) -> int:
    """Print the plan on stdout, as JSON or for people; return 1 if nothing fits, or the given config does not, else 0."""
    run, config = make_run(options)
    first = run.weigh(config, "this config" if options.config else "as asked, stage 0")
    weighed, changes = [first], dict[str, Any]()
    if not (options.config and first.fits):
        for more, costs in run.climb(config, _folder_of(run, config)):
            if not any(one.fits for one in weighed):
                changes |= more
            weighed.append(costs)
    chosen = next((one for one in weighed if one.fits), None)
    notes = list(_notes(run, config, chosen or first))
    if json:
        print_json(document(run, weighed, chosen, changes if chosen else {}, notes))
    else:
        _print(run, weighed, chosen, changes if options.config else None)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    if chosen is None:
        print(
            "zstore: nothing that was tried fits: add memory, disk or ranks, or choose a smaller model", file=sys.stderr
        )
    return 0 if chosen is not None and (options.config is None or chosen is first) else 1


# -- the run to plan ----------------------------------------------------------------------------------------------------


def make_run(options: PlanOptions) -> tuple[PlannedRun, dict[str, Any]]:
    """Return the run to plan and its config, as JSON. Raises ConfigError for a model or a config that cannot be, and UsageError
    for a device of unknown size or a batch that is given twice."""
    from zstore.engine.config.config import load_config, read_config
    from zstore.engine.config.resolve import stand_ins
    from zstore.engine.plan.costs import PlannedRun

    machine, native = _machine(options)
    config = _proposed(options, machine) if options.config is None else read_config(options.config)
    loaded = load_config(config, name=str(options.config or "the proposed config"))
    answers = stand_ins(loaded.settings)
    if options.config is not None and options.micro_batch is not None:
        if "train_micro_batch_size_per_gpu" not in answers:
            raise UsageError(f"--micro-batch: {options.config} gives the batch size; leave the option out")
        answers["train_micro_batch_size_per_gpu"] = options.micro_batch
    name, model, width = _model(options)
    run = PlannedRun(
        name=name,
        model=model,
        width=width,
        seq_length=options.seq_length,
        machine=machine,
        native=native,
        slots_of=lambda optimizer: slots_of_module(model, optimizer),
        answers=answers,
    )
    return run, config


def _machine(options: PlanOptions) -> tuple[Machine, frozenset[str]]:
    """Return the machine to plan for, and the 16-bit types that its devices compute natively."""
    import torch

    from zstore.engine.plan.costs import Machine
    from zstore.engine.plan.precision import native_types
    from zstore.io import read_host_memory

    here = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    gpus = len(here) if options.gpus is None else options.gpus
    if gpus and not here and options.gpu_memory is None:
        raise UsageError(
            "--gpus: this machine has no GPU to read the memory size from; give --gpu-memory too, like 24GB"
        )
    memory = options.memory or read_host_memory().usable_bytes
    machine = Machine(
        gpus=gpus,
        gpu_bytes=options.gpu_memory or min(here, default=0),
        memory_bytes=memory or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        disk_bytes=options.disk,
        machines=options.machines,
    )
    if gpus and (not here or options.gpu_memory is not None):
        return machine, frozenset({"bf16", "fp16"})  # devices that are not here
    return machine, native_types(torch.device("cuda", 0) if gpus else torch.device("cpu"))


def _proposed(options: PlanOptions, machine: Machine) -> dict[str, Any]:
    """Return the config to propose if none is given, before any rung."""
    precision: dict[str, Any] = {} if options.precision == "fp32" else {options.precision: {"enabled": True}}
    if options.precision == "auto":
        precision = {"bf16": {"enabled": "auto"}}
    zero: dict[str, Any] = {"stage": 0}
    if machine.world_size > 1:
        zero |= {"reduce_bucket_size": _BUCKET_NUMEL, "allgather_bucket_size": _BUCKET_NUMEL}
    return {
        "train_micro_batch_size_per_gpu": options.micro_batch or 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        **precision,
        "zero_optimization": zero,
    }


def _folder_of(run: PlannedRun, config: Mapping[str, Any]) -> str:
    """Return the first drive that a config names, else a stand-in."""
    resolved = run.resolved(config)
    return str(next(iter((*resolved.offload_optimizer.nvme_paths, *resolved.offload_param.nvme_paths)), _FOLDER))


def _model(options: PlanOptions) -> tuple[str, nn.Module, Width]:
    """Return the model on the meta device, with its name and width."""
    from zstore.engine.plan.activations import Width

    from .sample.models import build_model, on_meta

    if options.model is None:
        numbers = (options.params or 0, options.hidden or 0, options.layers or 0)  # given if no model is
        return model_of_numbers(*numbers, options.vocab)
    with on_meta():
        model = build_model(options.model, options.seq_length)
    width = Width.of(model)
    if width is None:
        raise ConfigError(
            f"{options.model}: expected a config with hidden_size, num_hidden_layers and vocab_size, got one without; plan "
            "by --params, --hidden and --layers"
        )
    return options.model, model, width


def model_of_numbers(
    num_parameters: int, hidden: int, num_layers: int, vocab_size: int
) -> tuple[str, nn.Module, Width]:
    """Return a model of about that many parameters on the meta device, with its name and width: an embedding, layers of one
    matrix each, and a head. Raises ConfigError if no such model is near that size."""
    from torch import nn

    from zstore.engine.plan.activations import Width

    ends = 2 * vocab_size * hidden
    rows = round((num_parameters - ends) / (num_layers * hidden))
    if rows < 1:
        raise ConfigError(
            f"{num_layers} layers of width {hidden} with a vocabulary of {vocab_size} have more than {ends:,} parameters, "
            f"got --params {num_parameters:,}: check the numbers"
        )
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(vocab_size, hidden, device="meta"),
            "layers": nn.ModuleList(nn.Linear(hidden, rows, bias=False, device="meta") for _ in range(num_layers)),
            "head": nn.Linear(hidden, vocab_size, bias=False, device="meta"),
        }
    )
    width = Width(hidden=hidden, num_layers=num_layers, vocab_size=vocab_size)
    return f"{num_layers} layers of width {hidden}", model, width


def slots_of_module(module: nn.Module, optimizer: OptimizerConfig | None) -> Mapping[str, Slots]:
    """Return what an optimizer keeps of each parameter of a model on the meta device, by its name; None is AdamW. Raises
    ConfigError for arguments that it does not take."""
    from zstore.engine.config.config import OptimizerConfig
    from zstore.engine.extras import register_parts
    from zstore.engine.optim.optimizer import optimizer_from_config
    from zstore.engine.optim.rules import kernels_for, rule_of
    from zstore.engine.params.record import named_parameters

    register_parts()
    made = optimizer_from_config(optimizer or OptimizerConfig(kind="AdamW", arguments={}), None, module)
    rule = rule_of(type(made))
    kernels = kernels_for(rule, type(made), made.param_groups)
    of = {
        parameter: kernel
        for group, kernel in zip(made.param_groups, kernels, strict=True)
        for parameter in group["params"]
    }
    return {name: rule.slots(of[parameter], parameter.shape) for name, _, parameter in named_parameters(module)}


# -- output -------------------------------------------------------------------------------------------------------------


def _notes(run: PlannedRun, config: Mapping[str, Any], shown: Costs) -> Iterator[str]:
    """Yield notes about the numbers, of the config that is `shown`."""
    from zstore.engine.config.config import load_config
    from zstore.engine.plan.placement import HEADROOM_PERCENT
    from zstore.engine.plan.precision import precision_note

    loaded, device = load_config(dict(config)), "GPU" if run.machine.gpus else "CPU"
    yield (
        "sizes of state are computed as the engine does; activations and buffers in transit are estimates; "
        f"{HEADROOM_PERCENT} % of each memory is left free"
    )
    note = precision_note(loaded, run.resolved(config).precision, run.native, device)
    if note is not None:
        yield note[1]
    if run.machine.disk_bytes is None:
        yield "no --disk was given: the disk is assumed to be large enough"
    yield (
        "without zstore.Init() the model is built whole before it is sharded, which temporarily takes "
        f"{format_bytes(4 * run.num_parameters)} of host memory in each rank"
    )
    if shown.disk_bytes:
        yield "a checkpoint on the same drive keeps the previous version of the state: leave the same space again"


def headline(run: PlannedRun, config: Mapping[str, Any]) -> str:
    """Return the line that describes the run."""
    machine, resolved = run.machine, run.resolved(config)
    devices = f"{machine.gpus} GPU(s) of {format_bytes(machine.gpu_bytes)}" if machine.gpus else "the CPU"
    if machine.machines > 1:
        devices = f"{machine.machines} machines, each with {devices}"
    disk = "" if machine.disk_bytes is None else f", {format_bytes(machine.disk_bytes)} of disk"
    optimizer = "AdamW" if resolved.optimizer is None else resolved.optimizer.kind
    samples = resolved.batch.micro_batch_size * resolved.batch.accumulation_steps
    return (
        f"{run.name}: {run.num_parameters:,} parameters in {resolved.precision}, {optimizer}, {samples} x "
        f"{run.seq_length} tokens per rank and step, on {devices} with {format_bytes(machine.memory_bytes)} of memory{disk}"
    )


def _print(run: PlannedRun, weighed: Sequence[Costs], chosen: Costs | None, changes: Mapping[str, Any] | None) -> None:
    """Print what to do, and a table of all that was weighed. `changes` are those of the given config; None: there is none."""
    console = make_console()
    console.print(headline(run, weighed[0].config), soft_wrap=True)
    if chosen is None:
        console.print(f"nothing fits; with all of it, {'; '.join(weighed[-1].lacking)}", soft_wrap=True)
    elif changes is None:
        console.print(f"use {chosen.title}, with this config:")
        console.print(json_module.dumps(chosen.config, indent=2), soft_wrap=True)
    elif chosen is weighed[0]:
        console.print("it fits")
    else:
        console.print(f"it does not fit: {'; '.join(weighed[0].lacking)}; change this:", soft_wrap=True)
        for key, value in changes.items():
            console.print(f"  {key}: {json_module.dumps(value)}", soft_wrap=True)
    device = ("each device",) if run.machine.gpus else ()
    table = make_table(("the ladder",), (*device, "host", "disk", "moved a step"))
    table.add_column("fits")
    for one in weighed:
        sizes = (one.host_bytes, one.disk_bytes, run.machine.num_ranks * one.plan.traffic_total.total)
        cells = [format_bytes(size) if size else "-" for size in ((one.device_bytes,) if device else ()) + sizes]
        lacks = ", ".join(text.partition(":")[0] for text in one.lacking)
        table.add_row(one.title, *cells, ("yes <-" if one is chosen else "yes") if one.fits else f"no: {lacks}")
    console.print(table)


def document(
    run: PlannedRun, weighed: Sequence[Costs], chosen: Costs | None, changes: Mapping[str, Any], notes: Sequence[str]
) -> dict[str, Any]:
    """Return the document of `--json`."""
    return {
        "model": {"name": run.name, "num_parameters": run.num_parameters, **asdict(run.width)},
        "machine": asdict(run.machine),
        "ladder": [_costs_document(one) for one in weighed],
        "fits": None if chosen is None else chosen.title,
        "config": None if chosen is None else chosen.config,
        "changes": changes,
        "notes": list(notes),
    }


def _costs_document(one: Costs) -> dict[str, Any]:
    names = ("title", "fits", "lacking", "config", "device_bytes", "host_bytes", "disk_bytes", "activations_bytes")
    plan = one.plan
    return {name: getattr(one, name) for name in names} | {
        "transit_bytes": one.transit_bytes,
        "rank_0": {
            "held": {kind: asdict(held) for kind, held in plan.held.items()},
            "disk_traffic_of_a_step": {kind: asdict(moved) for kind, moved in plan.traffic.items()},
            "file_bytes": plan.file_bytes,
        },
    }
