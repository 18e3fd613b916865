"""`zstore plan`: checks whether a model fits on a machine, what each rung of the ladder needs, and which config to use."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zstore.errors import ConfigError, UsageError, format_bytes
from zstore.io import read_host_memory

from .options import Json, parse_file, parse_number, size_option
from .printing import make_console, make_table, print_json

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from zstore.engine.config.optimizers import OptimizerSection
    from zstore.engine.plan.costs import Costs, PlannedRun
    from zstore.engine.plan.plan import Slots

_COLUMNS = 100


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Command-line options; None means not given."""

    config: Annotated[
        Path | None,
        typer.Option(help="Check whether this configuration fits.", parser=parse_file, metavar="FILE"),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(help="gpt-tiny, gpt-small or gpt-base; or a transformers config.json or model folder (extra hf)."),
    ] = None
    params: Annotated[
        int | None, typer.Option(help="Number of parameters, such as 7e9 or 7B.", metavar="N", parser=parse_number)
    ] = None
    hidden: Annotated[int | None, typer.Option(help="Hidden size, with --params.", min=1, metavar="N")] = None
    layers: Annotated[int | None, typer.Option(help="Layers, with --params.", min=1, metavar="N")] = None
    vocab: Annotated[int, typer.Option(help="Vocabulary size, with --params.", min=1)] = 32_000
    gpus: Annotated[
        int | None, typer.Option(help="GPUs; 0: train on the CPU (default: this machine's).", min=0, metavar="N")
    ] = None
    gpu_memory: Annotated[int | None, size_option("Memory per GPU, such as 24GB.")] = None
    memory: Annotated[int | None, size_option("Host memory (default: this machine's).")] = None
    disk: Annotated[int | None, size_option("Free space on the drive.")] = None
    micro_batch: Annotated[
        int | None,
        typer.Option(help="Samples per rank per forward (default: the configuration's, or 1).", min=1, metavar="N"),
    ] = None
    seq_length: Annotated[int, typer.Option(help="Tokens per sample.", min=2, metavar="N")] = 1024

    def __post_init__(self) -> None:
        """Reject options that name no model, or two."""
        num_given = 3 - (self.params, self.hidden, self.layers).count(None)
        if num_given != (3 if self.model is None else 0):
            raise UsageError("give --model gpt-base (or a transformers folder), or --params, --hidden and --layers")


def plan_command(options: PlanOptions, json: Json = False) -> int:
    """Print the plan to stdout, as JSON or text; return 1 if nothing fits or the given config does not, else 0."""
    from zstore.engine.plan.plan import describe

    run, config = make_run(options)
    first = run.estimate(config, "this config" if options.config else "stage 0, no offload")
    candidates = [first]
    if not options.config or first.lacking:
        candidates += run.ladder(config)
    chosen = next((costs for costs in candidates if not costs.lacking), None)
    notes = run.notes(config)
    if json:
        plan_text = partial(describe, world_size=run.world_size, local_ranks=run.world_size)
        ladder = [{**vars(costs), "needed": vars(costs.needed), "plan": plan_text(costs.plan)} for costs in candidates]
        fits = None if chosen is None else chosen.title
        print_json({"run": headline(run, config), "ladder": ladder, "fits": fits, "notes": notes})
    else:
        _print(run, candidates, chosen, proposes=options.config is None)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    if chosen is None:
        lacking = "; ".join(candidates[-1].lacking)
        print(f"zstore: none of these configs fits ({lacking}): add memory, disk or ranks", file=sys.stderr)
    return 0 if chosen is not None and (options.config is None or chosen is first) else 1


_PROPOSED_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "gradient_clipping": 1.0,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 0, "reduce_bucket_size": "auto", "allgather_bucket_size": "auto"},
}
"""The config proposed if none is given, before the first rung."""


def make_run(options: PlanOptions) -> tuple[PlannedRun, dict[str, Any]]:
    """Return the run to plan, and its config as JSON. Raises ConfigError for an invalid model or config, and UsageError for a
    device of unknown size."""
    from zstore.engine.config.config import load_config, read_config
    from zstore.engine.config.resolve import ResolveContext, placeholder_values
    from zstore.engine.plan.costs import PlannedRun

    gpus, gpu_bytes = _devices(options)
    config = _PROPOSED_CONFIG if options.config is None else read_config(options.config)
    if options.micro_batch is not None:
        config = {**config, "train_micro_batch_size_per_gpu": options.micro_batch}
    auto_values = placeholder_values(load_config(config, name=str(options.config or "the proposed config")).settings)
    # Other machines' devices are assumed to support both types; torch knows those of this machine.
    native = frozenset({"bf16", "fp16"})
    if not gpus or options.gpu_memory is None:
        import torch

        from zstore.engine.plan.run import native_types

        native = native_types(torch.device("cuda" if gpus else "cpu", 0))
    model = _model_from_sizes(options) if options.model is None else _model_from_name(options)
    hidden = model["dims"].hidden
    context = ResolveContext(world_size=gpus or 1, hidden_size=hidden, native=native, auto_values=auto_values)
    memory = options.memory or read_host_memory().usable_bytes
    run = PlannedRun(
        **model,
        seq_length=options.seq_length,
        gpus=gpus,
        gpu_bytes=gpu_bytes,
        memory_bytes=memory or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        disk_bytes=options.disk,
        context=context,
    )
    return run, config


def _devices(options: PlanOptions) -> tuple[int, int]:
    """Return the number of GPUs and the memory of each; torch is queried only for GPUs that are not described."""
    if options.gpus == 0 or (options.gpus and options.gpu_memory):
        return options.gpus, options.gpu_memory or 0
    import torch

    local = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    gpus = len(local) if options.gpus is None else options.gpus
    gpu_bytes = options.gpu_memory or min(local, default=0)
    if gpus and not gpu_bytes:
        raise UsageError("--gpus: this machine has no GPU whose memory could be read: add --gpu-memory, such as 24GB")
    return gpus, gpu_bytes


def _model_from_name(options: PlanOptions) -> dict[str, Any]:
    """Return the fields of `PlannedRun` about a model, which is built without memory."""
    from zstore.engine.plan.plan import Dims
    from zstore.engine.plan.run import shapes_of_model, units_of_model

    from .sample import build_model, on_meta

    with on_meta():
        model = build_model(str(options.model), options.seq_length)
    return {
        "name": options.model,
        "shapes": shapes_of_model(model),
        "units_of": partial(units_of_model, model),
        "slots_of": partial(slots_of_module, model),
        "dims": Dims.of(model),
    }


def _model_from_sizes(options: PlanOptions) -> dict[str, Any]:
    """Return the same fields for a model of about this many parameters, without torch: an embedding, layers of one matrix
    each, and a head. Raises ConfigError if there is no such model near that size."""
    from zstore.engine.plan.plan import ADAM_SLOTS, Dims, ParameterShape

    hidden, num_layers, vocab_size = options.hidden or 0, options.layers or 0, options.vocab  # given if no model is
    end_numel = 2 * vocab_size * hidden
    rows = round(((options.params or 0) - end_numel) / (num_layers * hidden))
    if rows < 1:
        raise ConfigError(
            f"{num_layers} layers of width {hidden} with a vocabulary of {vocab_size} have more than {end_numel:,} parameters, "
            f"but --params is {options.params:,}: check the numbers"
        )
    layers = {f"layers.{number}": (rows, hidden) for number in range(num_layers)}
    sizes = {"embedding": (vocab_size, hidden), **layers, "head": (vocab_size, hidden)}

    def slots_of(optimizer: OptimizerSection | None, _world_size: int) -> Mapping[str, Slots]:
        if optimizer is not None and (optimizer.kind not in ("Adam", "AdamW") or optimizer.arguments()["amsgrad"]):
            raise UsageError(
                f"--params: expected an optimizer of type Adam or AdamW, got {optimizer.kind}: use --model instead"
            )
        return dict.fromkeys(sizes, ADAM_SLOTS)

    return {
        "name": f"{num_layers} layers of width {hidden}",
        "shapes": [ParameterShape(name=name, shape=shape) for name, shape in sizes.items()],
        "units_of": lambda _: [[name] for name in sizes],
        "slots_of": slots_of,
        "dims": Dims(hidden=hidden, num_layers=num_layers, vocab_size=vocab_size),
    }


def slots_of_module(module: nn.Module, optimizer: OptimizerSection | None, world_size: int) -> Mapping[str, Slots]:
    """Return the slots of an optimizer (None: AdamW) by parameter name. Raises ConfigError for invalid arguments."""
    from zstore.engine.config.config import load_config
    from zstore.engine.extras import register_parts
    from zstore.engine.optim.optimizer import optimizer_from_config
    from zstore.engine.optim.rules import rule_of
    from zstore.engine.params.record import named_parameters

    register_parts()
    section: Any = optimizer or load_config({"optimizer": {"type": "AdamW"}}).settings.optimizer
    instance = optimizer_from_config(section, None, module)
    rule = rule_of(type(instance))
    slots: dict[Any, Slots] = {}
    for group in instance.param_groups:
        kernel = rule.kernel(type(instance), group)
        slots |= {parameter: rule.slots(kernel, parameter.shape, world_size) for parameter in group["params"]}
    return {name: slots[parameter] for name, _, parameter in named_parameters(module)}


def headline(run: PlannedRun, config: Mapping[str, Any]) -> str:
    """Return the line that describes the run."""
    resolved = run.resolved(config)
    devices = f"{run.gpus} GPU(s) of {format_bytes(run.gpu_bytes)}" if run.gpus else "the CPU"
    disk = "any amount of disk" if run.disk_bytes is None else f"{format_bytes(run.disk_bytes)} of disk"
    optimizer = "AdamW" if resolved.settings.optimizer is None else resolved.settings.optimizer.kind
    samples = resolved.batch.micro_batch_size * resolved.batch.accumulation_steps
    return (
        f"{run.name}: {run.num_parameters:,} parameters in {resolved.precision}, {optimizer}, {samples} x {run.seq_length} "
        f"tokens per rank per step, on {devices} with {format_bytes(run.memory_bytes)} of memory and {disk}"
    )


def _print(run: PlannedRun, candidates: Sequence[Costs], chosen: Costs | None, *, proposes: bool) -> None:
    """Print a table of all candidates, the recommended one first, and what to write in a config. `proposes`: no config was
    given."""
    console = make_console(_COLUMNS)
    console.print(headline(run, candidates[0].config))
    console.print(_table(run, candidates, chosen))
    if chosen is not None and proposes:
        console.print(f"use {chosen.title}, with this config:")
        console.print(json_module.dumps(chosen.config, indent=2), soft_wrap=True)
    elif chosen is candidates[0]:
        console.print("it fits")
    elif chosen is not None:
        console.print(f"it does not fit: {'; '.join(candidates[0].lacking)}; change this:")
        for key, value in chosen.changes.items():
            console.print(f"  {key}: {json_module.dumps(value)}", soft_wrap=True)


def _table(run: PlannedRun, candidates: Sequence[Costs], chosen: Costs | None) -> Table:
    places = ("device", "host", "disk") if run.gpus else ("host", "disk")
    table = make_table(("config",), (*places, "moved per step"))
    table.add_column("fits", overflow="fold")

    def add(costs: Costs, title: str) -> None:
        sizes = [*(getattr(costs.needed, place) for place in places), costs.moved_bytes]
        lacks = ", ".join(text.partition(":")[0] for text in costs.lacking)
        table.add_row(
            title, *(format_bytes(size) if size else "-" for size in sizes), f"no: {lacks}" if lacks else "yes"
        )

    if chosen is not None and len(candidates) > 1:
        add(chosen, f"use: {chosen.title}")
        table.add_section()
    for costs in candidates:
        add(costs, costs.title)
    return table
