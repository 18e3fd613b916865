"""`zstore plan`: whether training a model fits on a machine, what each rung of the ladder needs, and the config to use."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zstore.engine.config.config import OptimizerConfig, load_config, read_config
from zstore.engine.config.resolve import stand_ins
from zstore.engine.plan.costs import Costs, Machine, PlannedRun
from zstore.engine.plan.needs import ParameterShape, Width
from zstore.engine.plan.placement import HEADROOM_PERCENT
from zstore.engine.plan.plan import ADAM_SLOTS, Slots
from zstore.engine.plan.precision import native_types, precision_note
from zstore.errors import ConfigError, UsageError
from zstore.io import read_host_memory
from zstore.sizes import format_bytes

from .options import Json, parse_file, parse_number, size_option
from .printing import make_console, make_table, print_json

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options on the command line; None: not given."""

    config: Annotated[
        Path | None,
        typer.Option(help="Check whether this configuration fits.", parser=parse_file, metavar="FILE"),
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

    def __post_init__(self) -> None:
        """Refuse options that name no model, or two."""
        numbers = (self.params, self.hidden, self.layers)
        if self.model is not None and any(value is not None for value in numbers):
            raise UsageError("--model already gives the shape: leave out --params, --hidden and --layers")
        if self.model is None and None in numbers:
            raise UsageError("name a model: --model M, or --params, --hidden and --layers together")


def plan_command(options: PlanOptions, json: Json = False) -> int:
    """Print the plan on stdout, as JSON or for people; return 1 if nothing fits, or the given config does not, else 0."""
    run, config = make_run(options)
    first = run.weigh(config, "this config" if options.config else "as asked, stage 0")
    weighed = [first]
    if not (options.config and first.fits):
        weighed += run.climb(config)
    chosen = next((one for one in weighed if one.fits), None)
    notes = list(_notes(run, config, chosen or first))
    if json:
        print_json(document(run, weighed, chosen, notes))
    else:
        _print(run, weighed, chosen, proposes=options.config is None)
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
    machine = _machine(options)
    config = _proposed(options) if options.config is None else read_config(options.config)
    loaded = load_config(config, name=str(options.config or "the proposed config"))
    answers = stand_ins(loaded.settings)
    if options.config is not None and options.micro_batch is not None:
        if "train_micro_batch_size_per_gpu" not in answers:
            raise UsageError(f"--micro-batch: {options.config} gives the batch size; leave the option out")
        answers["train_micro_batch_size_per_gpu"] = options.micro_batch
    # Devices that are not here compute both types; of those that are here torch knows.
    elsewhere = machine.gpus and options.gpu_memory is not None
    native = frozenset({"bf16", "fp16"}) if elsewhere else native_types()
    run = partial(PlannedRun, machine=machine, native=native, answers=answers, seq_length=options.seq_length)
    return (_run_of_numbers if options.model is None else _run_of_model)(options, run), config


def _machine(options: PlanOptions) -> Machine:
    """Return the machine to plan for; torch is asked only for devices that are not described."""
    gpus, gpu_bytes = options.gpus, options.gpu_memory or 0
    if gpus is None or (gpus and not gpu_bytes):
        import torch

        here = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
        gpus = len(here) if gpus is None else gpus
        if gpus and not here and not gpu_bytes:
            raise UsageError(
                "--gpus: this machine has no GPU to read the memory size from; give --gpu-memory too, like 24GB"
            )
        gpu_bytes = gpu_bytes or min(here, default=0)
    memory = options.memory or read_host_memory().usable_bytes
    return Machine(
        gpus=gpus,
        gpu_bytes=gpu_bytes,
        memory_bytes=memory or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        disk_bytes=options.disk,
        machines=options.machines,
    )


def _proposed(options: PlanOptions) -> dict[str, Any]:
    """Return the config to propose if none is given, before any rung."""
    return {
        "train_micro_batch_size_per_gpu": options.micro_batch or 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 0, "reduce_bucket_size": "auto", "allgather_bucket_size": "auto"},
    }


def _run_of_model(options: PlanOptions, run: Callable[..., PlannedRun]) -> PlannedRun:
    """Return the run of a model that is built without memory."""
    from zstore.engine.plan.run import shapes_of_model, units_of_model

    from .sample.models import build_model, on_meta

    with on_meta():
        model = build_model(str(options.model), options.seq_length)
    return run(
        name=options.model,
        shapes=shapes_of_model(model),
        units_of=partial(units_of_model, model),
        slots_of=partial(slots_of_module, model),
        width=Width.of(model),
    )


def _run_of_numbers(options: PlanOptions, run: Callable[..., PlannedRun]) -> PlannedRun:
    """Return the run of a model of about so many parameters, for which no torch is needed: an embedding, layers of one matrix
    each, and a head. Raises ConfigError if no such model is near that size."""
    hidden, num_layers, vocab_size = options.hidden or 0, options.layers or 0, options.vocab  # given if no model is
    ends = 2 * vocab_size * hidden
    rows = round(((options.params or 0) - ends) / (num_layers * hidden))
    if rows < 1:
        raise ConfigError(
            f"{num_layers} layers of width {hidden} with a vocabulary of {vocab_size} have more than {ends:,} parameters, "
            f"got --params {options.params:,}: check the numbers"
        )
    ends_shape, layer_shape = (vocab_size, hidden), (rows, hidden)
    layers = {f"layers.{number}": layer_shape for number in range(num_layers)}
    sizes = {"embedding": ends_shape, **layers, "head": ends_shape}

    def slots_of(optimizer: OptimizerConfig | None, _world_size: int) -> Mapping[str, Slots]:
        if optimizer is not None and (optimizer.kind not in ("Adam", "AdamW") or optimizer.arguments["amsgrad"]):
            raise UsageError(
                f"--params: expected an optimizer of type Adam or AdamW, got {optimizer.kind}: name a --model"
            )
        return dict.fromkeys(sizes, ADAM_SLOTS)

    return run(
        name=f"{num_layers} layers of width {hidden}",
        shapes=[ParameterShape(name=name, shape=shape) for name, shape in sizes.items()],
        units_of=lambda _: [[name] for name in sizes],
        slots_of=slots_of,
        width=Width(hidden=hidden, num_layers=num_layers, vocab_size=vocab_size),
    )


def slots_of_module(module: nn.Module, optimizer: OptimizerConfig | None, world_size: int) -> Mapping[str, Slots]:
    """Return what an optimizer keeps of each parameter of a model on the meta device, by its name; None is AdamW. Raises
    ConfigError for arguments that it does not take."""
    from zstore.engine.extras import register_parts
    from zstore.engine.optim.optimizer import optimizer_from_config
    from zstore.engine.optim.rules import rule_of
    from zstore.engine.params.record import named_parameters

    register_parts()
    made = optimizer_from_config(optimizer or OptimizerConfig(kind="AdamW", arguments={}), None, module)
    rule, slots = rule_of(type(made)), dict[Any, Slots]()
    for group in made.param_groups:
        kernel = rule.kernel(type(made), group)
        slots |= {parameter: rule.slots(kernel, parameter.shape, world_size) for parameter in group["params"]}
    return {name: slots[parameter] for name, _, parameter in named_parameters(module)}


# -- output -------------------------------------------------------------------------------------------------------------


def _notes(run: PlannedRun, config: Mapping[str, Any], shown: Costs) -> Iterator[str]:
    """Yield notes about the numbers, of the config that is `shown`."""
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


def _print(run: PlannedRun, weighed: Sequence[Costs], chosen: Costs | None, *, proposes: bool) -> None:
    """Print what to do, and a table of all that was weighed. Unless it `proposes` a config one was given."""
    console = make_console()
    console.print(headline(run, weighed[0].config), soft_wrap=True)
    if chosen is None:
        console.print(f"nothing fits; with all of it, {'; '.join(weighed[-1].lacking)}", soft_wrap=True)
    elif proposes:
        console.print(f"use {chosen.title}, with this config:")
        console.print(json_module.dumps(chosen.config, indent=2), soft_wrap=True)
    elif chosen is weighed[0]:
        console.print("it fits")
    else:
        console.print(f"it does not fit: {'; '.join(weighed[0].lacking)}; change this:", soft_wrap=True)
        for key, value in chosen.changes.items():
            console.print(f"  {key}: {json_module.dumps(value)}", soft_wrap=True)
    device = ("each device",) if run.machine.gpus else ()
    table = make_table(("the ladder",), (*device, "host", "disk", "moved a step"))
    table.add_column("fits")
    for one in weighed:
        sizes = [one.device_bytes, one.host_bytes, one.disk_bytes, one.moved_bytes][0 if device else 1 :]
        cells = [format_bytes(size) if size else "-" for size in sizes]
        lacks = ", ".join(text.partition(":")[0] for text in one.lacking)
        table.add_row(one.title, *cells, ("yes <-" if one is chosen else "yes") if one.fits else f"no: {lacks}")
    console.print(table)


def document(run: PlannedRun, weighed: Sequence[Costs], chosen: Costs | None, notes: Sequence[str]) -> dict[str, Any]:
    """Return the document of `--json`."""
    ladder = [{**vars(one), "fits": one.fits} for one in weighed]
    for one in ladder:
        del one["plan"]
    return {
        "model": {"name": run.name, "num_parameters": run.num_parameters, **asdict(run.width)},
        "machine": asdict(run.machine),
        "ladder": ladder,
        "fits": None if chosen is None else chosen.title,
        "config": None if chosen is None else chosen.config,
        "changes": {} if chosen is None else chosen.changes,
        "notes": notes,
    }
