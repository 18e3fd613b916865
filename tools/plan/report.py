"""Output of `zstore plan`, for its proposals or for a given config: tables and notes for people, JSON for programs."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from zstore.engine.plan.placement import HEADROOM_PERCENT
from zstore.engine.plan.report import describe
from zstore.sizes import format_bytes

from ..printing import make_console, make_table, print_json
from .choices import ASSUMED, Costs, activations_of, memories
from .job import Choice, PlannedJob

if TYPE_CHECKING:
    from rich.table import Table


def notes_of(job: PlannedJob, first: Costs | None) -> list[str]:
    """Return notes about the numbers."""
    counted = "sizes of state are computed as the engine does; activations and buffers in transit are estimates"
    notes = [f"{counted}; {HEADROOM_PERCENT} % of each memory is left free"]
    if job.precision_note is not None:
        notes.append(job.precision_note)
    if job.machine.disk_bytes is None:
        notes.append("no --disk was given: the disk is assumed to be large enough")
    of_gpus = ("link", "device_update") if job.machine.device_is_host else ()
    assumed = [name for name, rate in asdict(job.machine.rates).items() if not rate and name not in of_gpus]
    if assumed:
        given = [f"--{name.replace('_', '-')}" for name in assumed]
        rates = ", ".join(f"{option} {ASSUMED[name]:.3g}" for name, option in zip(assumed, given, strict=True))
        notes.append(f"seconds per step assume {rates}: give this machine's, or --measure FOLDER")
    notes.append("step times leave out collectives")
    notes.append(
        "without zstore.Init() the model is built whole before it is sharded, which temporarily takes "
        f"{format_bytes(4 * job.model.num_parameters)} of host memory in each rank"
    )
    if first is not None and first.choice.checkpointing:
        notes.append(
            'activation checkpointing is "gradient_checkpointing": true in the config\'s "zstore" section, or '
            "`zstore train --gradient-checkpointing`"
        )
    notes.append(_activations(job, 1 if first is None else first.choice.micro_batch))
    if first is not None and first.disk_bytes:
        notes.append(
            "a checkpoint on the same drive keeps the previous version of the state: leave the same space again"
        )
    return notes


def _activations(job: PlannedJob, micro_batch: int) -> str:
    """Return how much of one rank's activations is saved by checkpointing and by offloading them."""
    plain = activations_of(job, Choice(stage=0, micro_batch=micro_batch))
    kept = replace(plain, checkpointing=True)
    sizes = [format_bytes(n) for n in (plain.total_bytes, kept.total_bytes, plain.kept_bytes, kept.kept_bytes)]
    return (
        f"activations of micro-batch {micro_batch} take {sizes[0]} on a device, {sizes[1]} with gradient_checkpointing; of "
        f'these {sizes[2]} and {sizes[3]} rest on disk with "activations": "disk"'
    )


def print_plan(job: PlannedJob, choices: Sequence[Costs], rungs: Sequence[Costs], first: Costs | None) -> None:
    """Print the tables, and the plan and the config of the first rung that fits."""
    console = make_console()
    console.print(headline(job), soft_wrap=True)
    table = make_outcome_table(job, "what fits where", ("stage", "optimizer", "parameters"))
    for one in choices:
        stage = str(one.choice.stage) if not one.choice.second_copy else f"{one.choice.stage}, zero_hpz_partition_size"
        table.add_row(stage, one.choice.optimizer, one.choice.parameters, *cells(job, one))
    console.print(table)
    table = make_outcome_table(job, "the ladder: each rung adds to the ones before", ("rung",))
    for one in rungs:
        table.add_row(one.title + (" <- the first that fits" if one is first else ""), *cells(job, one))
    console.print(table)
    if first is None:
        return
    machine = job.machine
    text = describe(first.plan, world_size=machine.world_size, local_ranks=machine.num_ranks)
    console.print(text, seconds_text(first), sep="\n", soft_wrap=True)
    console.print("config of the first rung that fits:")
    console.print(json_module.dumps(first.config, indent=2), soft_wrap=True)


def headline(job: PlannedJob) -> str:
    """Return the line that describes the job."""
    machine, model = job.machine, job.model
    devices = f"{machine.gpus} GPU(s) of {format_bytes(machine.gpu_bytes)}" if machine.gpus else "the CPU"
    if machine.machines > 1:
        devices = f"{machine.machines} machines, each with {devices}"
    disk = "" if machine.disk_bytes is None else f", {format_bytes(machine.disk_bytes)} of disk"
    return (
        f"{model.name}: {model.num_parameters:,} parameters in {job.precision}, {job.optimizer}, {job.micro_batch} x "
        f"{job.seq_length} tokens per rank and step, on {devices} with {format_bytes(machine.memory_bytes)} of memory{disk}"
    )


def make_outcome_table(job: PlannedJob, title: str, names: Sequence[str]) -> Table:
    """Return a table whose rows end with the needs of choices."""
    columns = ["host", "disk", "written per step", "s per step"]
    if not job.machine.device_is_host:
        columns.insert(0, "each device")
    if job.machine.machines > 1:
        columns.insert(-1, "sent to other machines")
    table = make_table(names, columns, title)
    table.add_column("fits", overflow="fold")
    return table


def cells(job: PlannedJob, one: Costs) -> list[str]:
    """Return the row of a choice in such a table, after its names."""
    written = one.plan.traffic_total.written * job.machine.num_ranks
    cells = [_size(one.host_bytes), _size(one.disk_bytes), _size(written), _seconds(one)]
    if not job.machine.device_is_host:
        cells.insert(0, _size(one.device_bytes))
    if job.machine.machines > 1:
        cells.insert(-1, _size(one.plan.sent_total.between * job.machine.num_ranks))
    return [*cells, "yes" if one.fits else f"no: {'; '.join(one.lacking)}"]


def _size(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


def _seconds(one: Costs) -> str:
    seconds = one.seconds
    best, worst = f"{seconds.overlapped:.3g}", f"{seconds.in_turn:.3g}"
    return best if best == worst else f"{best} to {worst}"


def seconds_text(one: Costs) -> str:
    """Return the line that says what a step's time is expected to be made of."""
    names = {"host_update": "the update on the CPU", "device_update": "the update on the device"}
    names |= {"copies": "copies to and from the device", "disk": "the drive", "compute": "computation"}
    parts = [f"{names[name]} {value:.3g} s" for name, value in asdict(one.seconds).items() if value]
    return f"  expected of a step: {', '.join(parts)}"


def document(
    job: PlannedJob, choices: Sequence[Costs], rungs: Sequence[Costs], first: Costs | None, notes: list[str]
) -> dict[str, Any]:
    """Return the document of `--json`."""
    return {
        **shape_document(job),
        "choices": [outcome_document(one) for one in choices],
        "ladder": [outcome_document(one) for one in rungs],
        "first_that_fits": None if first is None else first.title,
        "config": None if first is None else first.config,
        "notes": notes,
    }


def shape_document(job: PlannedJob) -> dict[str, Any]:
    """Return the part of `--json` about the model, the machine and the training."""
    model = job.model
    return {
        "model": {"name": model.name, "num_parameters": model.num_parameters, **asdict(model.width)},
        "machine": asdict(job.machine),
        "job": {name: getattr(job, name) for name in ("micro_batch", "seq_length", "precision", "optimizer")},
    }


def outcome_document(one: Costs) -> dict[str, Any]:
    """Return the part of `--json` about a choice."""
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
            "sent_in_a_step": {kind: asdict(sent) for kind, sent in one.plan.sent.items()},
        },
    }


def print_given(job: PlannedJob, mine: Costs, rungs: Sequence[Costs], *, json: bool) -> int:
    """Print the needs of the config beside the memory available, and if it does not fit, the first rung of the ladder that
    does; return 0 if it fits, else 1."""
    first = None if mine.fits else next((rung for rung in rungs if rung.fits), None)
    changes = [] if first is None else list(differences(job.base or {}, first.config))
    notes = notes_of(job, first or mine)
    if json:
        print_json(
            {
                **shape_document(job),
                "fits": mine.fits,
                "mine": outcome_document(mine),
                "instead": None if first is None else outcome_document(first),
                "changes": [{"key": key, "from": before, "to": after} for key, before, after in changes],
                "notes": notes,
            }
        )
    else:
        _print(job, mine, rungs, first, changes)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    if not mine.fits and first is None:
        print("zstore: nothing that was tried fits: add memory, disk or ranks", file=sys.stderr)
    return 0 if mine.fits else 1


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, value before, value after) of each key that differs; None: it is missing."""
    for name in dict.fromkeys((*before, *after)):
        one, other = before.get(name), after.get(name)
        if isinstance(one, Mapping) or isinstance(other, Mapping):
            one, other = (value if isinstance(value, Mapping) else {} for value in (one, other))
            yield from differences(one, other, f"{prefix}{name}.")
        elif one != other:
            yield f"{prefix}{name}", one, other


def _print(
    job: PlannedJob, mine: Costs, rungs: Sequence[Costs], first: Costs | None, changes: Sequence[tuple[str, Any, Any]]
) -> None:
    console = make_console()
    console.print(headline(job), soft_wrap=True)
    table = make_table(("memory",), ("needed", "usable", "used"), "this config")
    for name, needed, usable in memories(mine, job.machine):
        if usable is None:
            table.add_row(name, format_bytes(needed), "not known", "")
        elif needed or name != "device":
            table.add_row(name, format_bytes(needed), format_bytes(usable), f"{100 * needed / max(1, usable):.0f} %")
    console.print(table)
    table = make_outcome_table(
        job, "the plan" if mine.fits else "the plan, and the ladder: each rung adds to the ones before", ("rung",)
    )
    table.add_row(mine.title, *cells(job, mine))
    for one in () if mine.fits else rungs:
        table.add_row(one.title + (" <- the first that fits" if one is first else ""), *cells(job, one))
    console.print(table)
    console.print(seconds_text(mine), soft_wrap=True)
    console.print("it fits" if mine.fits else f"it does not fit: {'; '.join(mine.lacking)}", soft_wrap=True)
    if first is None:
        return
    console.print("change this:")
    for key, before, after in changes:
        told = "remove it" if after is None else json_module.dumps(after)
        console.print(
            f"  {key}: {told}" + ("" if before is None else f" (is {json_module.dumps(before)})"), soft_wrap=True
        )
