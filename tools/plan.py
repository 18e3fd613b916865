"""`zstore plan`: what of a model's training fits where on a machine, how long a step takes, and the config to copy."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from rich.console import Console
from rich.table import Table

from zstore.engine.plan.report import describe
from zstore.errors import UsageError
from zstore.sizes import format_bytes

from .plan_choices import HEADROOM_PERCENT, Job, Outcome, all_choices, ladder
from .plan_machine import (
    Machine,
    Rates,
    device_flops,
    find_precision,
    host_memory_bytes,
    measured_rates,
    own_gpus,
    own_rates,
)
from .plan_model import DEFAULT_VOCAB, ModelShape, shape_of_model, shape_of_numbers

_PLAIN_COLUMNS = 200
_DEFAULT_NVME = PurePosixPath("/local_nvme")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the command line says; None: not given."""

    model: str | None = None
    params: int | None = None
    hidden: int | None = None
    layers: int | None = None
    vocab: int | None = None
    gpus: int | None = None
    gpu_memory: int | None = None
    memory: int | None = None
    disk: int | None = None
    micro_batch: int = 1
    seq_length: int = 1024
    precision: str = "auto"
    disk_read: int | None = None
    disk_write: int | None = None
    flops: int | None = None
    measure: Path | None = None

    def __post_init__(self) -> None:
        numbers = (self.params, self.hidden, self.layers)
        if self.model is not None and any(value is not None for value in (*numbers, self.vocab)):
            raise UsageError("--model says it all: leave --params, --hidden, --layers and --vocab out")
        if self.model is None and None in numbers:
            raise UsageError("name a model: --model M, or --params, --hidden and --layers together")


def plan_command(options: PlanOptions, json: bool) -> int:
    """Print the plan on stdout, as JSON or for people; 1 where nothing that was tried fits, else 0."""
    job = make_job(options)
    choices, rungs = all_choices(job), ladder(job)
    first = next((rung for rung in rungs if rung.fits), None)
    notes = _notes(job, first)
    if json:
        print(json_module.dumps(_document(job, choices, rungs, first, notes), indent=2))
    else:
        _print(job, choices, rungs, first)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    if first is None:
        print(
            "zstore: nothing on the ladder fits: take more memory, disk or ranks, or a smaller model", file=sys.stderr
        )
    return 0 if first is not None else 1


def make_job(options: PlanOptions) -> Job:
    """Return what is to be planned. Raises ConfigError for a model that cannot be, UsageError for a device of unknown
    size."""
    found, found_bytes = own_gpus()
    gpus = found if options.gpus is None else options.gpus
    own = own_rates(gpus, options.gpu_memory)
    precision = find_precision(options.precision, own)
    model = _model(options, precision.name)
    gpu_bytes = options.gpu_memory or found_bytes
    memory = options.memory or host_memory_bytes()
    if gpus and gpu_bytes is None:
        raise UsageError("--gpus: there is no GPU here whose memory could be looked up; say --gpu-memory too, as 24GB")
    rates = Rates(disk_read=options.disk_read, disk_write=options.disk_write, flops=options.flops)
    disk = options.disk
    if options.measure is not None:
        rates, free_bytes = measured_rates(options.measure, rates, precision.name, model.hidden)
        disk = disk or free_bytes
    if rates.flops is None and own is not None:
        rates = replace(rates, flops=device_flops(own, precision.name))
    machine = Machine(
        gpus=gpus,
        gpu_bytes=gpu_bytes if gpus and gpu_bytes else memory,
        memory_bytes=memory,
        disk_bytes=disk,
        rates=rates,
    )
    nvme = _DEFAULT_NVME if options.measure is None else PurePosixPath(options.measure.resolve())
    return Job(
        model=model,
        machine=machine,
        micro_batch=options.micro_batch,
        seq_length=options.seq_length,
        precision=precision.name,
        nvme_path=nvme,
        precision_is_auto=precision.is_auto,
        precision_note=precision.note,
    )


def _model(options: PlanOptions, precision: str) -> ModelShape:
    if options.model is not None:
        return shape_of_model(options.model, precision, options.seq_length)
    if options.params is None or options.hidden is None or options.layers is None:
        raise UsageError("name a model: --model M, or --params, --hidden and --layers together")
    vocab = options.vocab or DEFAULT_VOCAB
    return shape_of_numbers(options.params, options.hidden, options.layers, vocab, precision)


def _notes(job: Job, first: Outcome | None) -> list[str]:
    counted = "bytes of state are what the engine counts; activations and what is in transit are estimates"
    notes = [f"{counted}; {HEADROOM_PERCENT} % of every memory is left free"]
    if job.precision_note is not None:
        notes.append(job.precision_note)
    if job.machine.disk_bytes is None:
        notes.append("no --disk was given: what has to be on disk is taken to fit there")
    rates = job.machine.rates
    missing = [
        f"--{name.replace('_', '-')}" for name in ("flops", "disk_read", "disk_write") if getattr(rates, name) is None
    ]
    if missing:
        notes.append(
            f"seconds of steps that follow from {' and '.join(missing)} are missing: give them, or --measure FOLDER"
        )
    if rates.flops is not None:
        notes.append("seconds leave out collectives, copies to and from the device, and the update's own computation")
    notes.append(
        f"a model is built before it is sharded: without zstore.Init() that takes "
        f"{format_bytes(4 * job.model.num_parameters)} of host memory in each rank, for a while"
    )
    if first is not None and first.choice.checkpointing:
        notes.append(
            "activation checkpointing is the model's: torch.utils.checkpoint around each block, or transformers' "
            "gradient_checkpointing_enable()"
        )
    if first is not None and first.disk_bytes:
        notes.append("a checkpoint on the same drive keeps the version before, so leave as much room again")
    return notes


# -- for people ---------------------------------------------------------------------------------------------------------


def _print(job: Job, choices: Sequence[Outcome], rungs: Sequence[Outcome], first: Outcome | None) -> None:
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_COLUMNS, highlight=False, markup=False)
    console.print(_headline(job), soft_wrap=True)
    table = _table(job, "what fits where", ("stage", "optimizer", "parameters"))
    for one in choices:
        table.add_row(str(one.choice.stage), one.choice.optimizer, one.choice.parameters, *_cells(job, one))
    console.print(table)
    table = _table(job, "the ladder: each rung on top of those before", ("rung",))
    for one in rungs:
        table.add_row(one.title + (" <- the first that fits" if one is first else ""), *_cells(job, one))
    console.print(table)
    if first is None:
        return
    ranks = job.machine.num_ranks
    console.print(describe(first.plan, world_size=ranks, local_ranks=ranks), soft_wrap=True)
    console.print("the config of the first rung that fits:")
    console.print(json_module.dumps(first.config, indent=2), soft_wrap=True)


def _headline(job: Job) -> str:
    machine, model = job.machine, job.model
    devices = f"{machine.gpus} GPU(s) of {format_bytes(machine.gpu_bytes)}" if machine.gpus else "the CPU"
    disk = "" if machine.disk_bytes is None else f", {format_bytes(machine.disk_bytes)} of disk"
    return (
        f"{model.name}: {model.num_parameters:,} parameters in {job.precision}, Adam, {job.micro_batch} x "
        f"{job.seq_length} tokens a rank and step, on {devices} with {format_bytes(machine.memory_bytes)} of memory{disk}"
    )


def _table(job: Job, title: str, names: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name, overflow="fold")
    columns = ("host", "disk", "to disk a step", "s a step")
    for name in columns if job.machine.device_is_host else ("each device", *columns):
        table.add_column(name, justify="right")
    table.add_column("fits", overflow="fold")
    return table


def _cells(job: Job, one: Outcome) -> list[str]:
    written = one.plan.traffic_total.written * job.machine.num_ranks
    cells = [_size(one.host_bytes), _size(one.disk_bytes), _size(written), _seconds(one)]
    if not job.machine.device_is_host:
        cells.insert(0, _size(one.device_bytes))
    return [*cells, "yes" if one.fits else f"no: {'; '.join(one.lacking)}"]


def _size(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


def _seconds(one: Outcome) -> str:
    seconds = one.seconds
    if seconds.overlapped is None or seconds.in_turn is None:
        return "-"
    best, worst = f"{seconds.overlapped:.3g}", f"{seconds.in_turn:.3g}"
    return best if best == worst else f"{best} to {worst}"


# -- for programs -------------------------------------------------------------------------------------------------------


def _document(
    job: Job, choices: Sequence[Outcome], rungs: Sequence[Outcome], first: Outcome | None, notes: list[str]
) -> dict[str, Any]:
    model = {
        name: getattr(job.model, name) for name in ("name", "num_parameters", "hidden", "num_layers", "vocab_size")
    }
    return {
        "model": model,
        "machine": asdict(job.machine),
        "job": {"micro_batch": job.micro_batch, "seq_length": job.seq_length, "precision": job.precision},
        "choices": [_outcome(one) for one in choices],
        "ladder": [_outcome(one) for one in rungs],
        "first_that_fits": None if first is None else first.title,
        "config": None if first is None else first.config,
        "notes": notes,
    }


def _outcome(one: Outcome) -> dict[str, Any]:
    names = (
        "title",
        "lacking",
        "fits",
        "device_bytes",
        "host_bytes",
        "disk_bytes",
        "activations_bytes",
        "transit_bytes",
    )
    seconds = asdict(one.seconds) | {"overlapped": one.seconds.overlapped, "in_turn": one.seconds.in_turn}
    return {name: getattr(one, name) for name in names} | {
        "choice": asdict(one.choice),
        "config": one.config,
        "seconds": seconds,
        "rank_0": {
            "held": {kind: asdict(held) for kind, held in one.plan.held.items()},
            "disk_traffic_of_a_step": {kind: asdict(moved) for kind, moved in one.plan.traffic.items()},
            "file_bytes": one.plan.file_bytes,
        },
    }
