"""The engine's report of its plan: every byte's place, a step's use of the drive, and errors if it does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from zstore.errors import BudgetError
from zstore.sizes import format_bytes

if TYPE_CHECKING:
    from .plan import Held, PlacementSettings, Plan

DRIVE_LIFE_TBW = 600
"""Terabytes that a common 1 TB consumer drive is warranted for."""

_DAY_S = 86400
_COLUMNS = ("device", "host", "pinned", "disk")


def describe(plan: Plan, *, world_size: int = 1, local_ranks: int = 1, notes: bool = True, trains: bool = True) -> str:
    """Return the text that is printed once at the start: a table of kinds by places, the host budget, the bytes of a step.

    With `notes` also memory that is not in the table, the room that files take, and the effect on the drive's life. `plan`
    is one rank's; `local_ranks` ranks share the machine's drive. Without `trains` a step is a forward.
    """
    whose = "" if world_size == 1 else f" (rank 0 of {world_size}; the others hold as much or less)"
    what = "training state is kept" if trains else "parameters are kept"
    lines = [f"where the {what}{whose}:", *_table(plan), *_budget(plan), *_traffic(plan, local_ranks, trains)]
    lines += [*_sent(plan, world_size), *_split(plan)]
    if notes:
        lines += [*_order(plan), *_beside(plan), *_drive(plan, local_ranks)]
    return "\n".join(lines)


def check_device(plan: Plan, device_bytes: int | None) -> None:
    """Raise BudgetError if the plan needs more than the device's memory; `device_bytes` None: not known."""
    # At least one unit has to be gathered beside the arrays that are kept there.
    transient_bytes = max(plan.gathered_bytes, plan.update_bytes)
    needed = plan.held_total.device + transient_bytes
    if device_bytes is not None and needed > device_bytes:
        raise BudgetError(
            f"the device has {format_bytes(device_bytes)}, but this plan keeps {format_bytes(plan.held_total.device)} on "
            f"it and gathers {format_bytes(transient_bytes)} of parameters at a time, activations not counted: use "
            "more ranks, a higher stage, or offload_optimizer and offload_param (`zstore plan` shows what fits)"
        )


def check_host(plan: Plan, needed_bytes: int, host_bytes: int) -> None:
    """Raise BudgetError if `needed_bytes`, of this rank and those that share its `host_bytes` of memory, are more than
    that."""
    if needed_bytes <= host_bytes:
        return
    if plan.settings.budget_bytes is None:
        advice = 'set host_budget_bytes with offload_optimizer and offload_param on "nvme"'
    else:
        advice = "give a smaller host_budget_bytes"
    raise BudgetError(
        f"the host has {format_bytes(host_bytes)} of memory for this (swap space included), but the plan keeps "
        f"{format_bytes(plan.host_bytes)} of this rank there, {format_bytes(needed_bytes)} with the ranks beside it, "
        f"activations not counted: {advice}, or use more machines (`zstore plan` shows what fits)"
    )


def over_budget(required: Mapping[str, int], budget_bytes: int, settings: PlacementSettings) -> BudgetError:
    """Return the error of a host budget that is too small for the state that has to be in host memory: `required`, by
    purpose."""
    parts = ", ".join(f"{nbytes} of {kind}" for kind, nbytes in required.items() if nbytes)
    advice = [
        f"raise `host_budget_bytes` (to at least {_enough_bytes(required, settings)} for each rank of the machine)"
    ]
    if "cpu" in (settings.optimizer, settings.parameters):
        offloaded = [
            f"`{key}.device`"
            for key, tier in (("offload_optimizer", settings.optimizer), ("offload_param", settings.parameters))
            if tier == "cpu"
        ]
        advice.append(f'set {" and ".join(offloaded)} to "nvme", which keeps on disk what does not fit')
    return BudgetError(
        f"the host budget gives this rank {budget_bytes} bytes, but {sum(required.values())} have to be in host memory "
        f"({parts}): {', or '.join(advice)}"
    )


def _enough_bytes(required: Mapping[str, int], settings: PlacementSettings) -> int:
    """Return a budget that has room for the required bytes. Buffers are a share of the budget, and grow with it."""
    enough = sum(required.values())
    if settings.buffers_of is not None:
        others = enough - settings.buffer_bytes
        while (needed := others + settings.buffers_of(enough)) > enough:
            enough = needed
    return enough


def _table(plan: Plan) -> list[str]:
    rows: list[tuple[str, ...]] = [("", *_COLUMNS)]
    for kind, held in [*plan.held.items(), ("total", plan.held_total)]:
        if held.total or kind == "total":
            rows.append((kind, *(_cell(held, column) for column in _COLUMNS)))
    used = [i for i in range(len(rows[0])) if i < 2 or any(row[i] != "-" for row in rows[1:])]
    widths = [max(len(row[i]) for row in rows) for i in used]
    return [
        "  "
        + "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(w) for i, w in zip(used[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _cell(held: Held, column: str) -> str:
    nbytes: int = getattr(held, column)
    return format_bytes(nbytes) if nbytes else "-"


def _budget(plan: Plan) -> list[str]:
    if plan.settings.budget_bytes is None:
        return []
    more = f"; with {format_bytes(plan.budget_full_bytes)} nothing would be on disk" if plan.file_bytes else ""
    return [
        f"  host budget: {format_bytes(plan.budget_used_bytes)} of {format_bytes(plan.settings.budget_bytes)} used{more}"
    ]


def _order(plan: Plan) -> list[str]:
    """Say how the arrays in memory were chosen."""
    if plan.settings.budget_bytes is None or not plan.file_bytes:
        return []
    rates = plan.settings.drive_rates
    if rates is None:
        return ["  in memory is what saves most disk traffic a byte (disk_read_rate and disk_write_rate are not given)"]
    measured = f"reading {format_bytes(rates.read)}/s, writing {format_bytes(rates.write)}/s"
    return [f"  in memory is what saves most of the drive's time a byte ({measured})"]


def _traffic(plan: Plan, local_ranks: int, trains: bool) -> list[str]:
    if not plan.file_bytes:
        return []
    moved = plan.traffic_total
    sharers = f" ({local_ranks} ranks together)" if local_ranks > 1 else ""
    read, written = (format_bytes(nbytes * local_ranks) for nbytes in (moved.read, moved.written))
    if not trains:
        return [f"  each forward reads {read} from disk{sharers}"]
    return [f"  each step reads {read} from disk and writes {written}{sharers}"]


def _sent(plan: Plan, world_size: int) -> list[str]:
    """Say how much a step sends, if that depends on groups of ranks or on quantization."""
    if not plan.tells_sent:
        return []
    if plan.group_size is None:
        parts = ", ".join(f"{kind} {format_bytes(sent.within)}" for kind, sent in plan.sent.items())
        return [f"  each step sends {format_bytes(plan.sent_total.within)} from each rank to the others: {parts}"]
    sent, groups = plan.sent_total, world_size // plan.group_size
    within = f"each step sends {format_bytes(sent.within)} from each rank within its group of {plan.group_size}"
    return [f"  {within} and {format_bytes(sent.between)} to other groups ({groups} groups)"]


def _split(plan: Plan) -> list[str]:
    """Say how much of the optimizer state is updated on a device that rounds in its own way."""
    settings = plan.settings
    if settings.device_is_host or settings.optimizer == "none" or settings.ratio == 1:
        return []
    share = f"{1 - settings.ratio:.1%} of the optimizer state is updated on the device, the rest on the CPU"
    return [f'  {share}: they round differently, so that bits depend on this share ("ratio": {settings.ratio:g})']


def _beside(plan: Plan) -> list[str]:
    where = "the host's memory, on top of the budget" if plan.settings.device_is_host else "the device's memory"
    gathered = f"up to {format_bytes(plan.gathered_bytes)} of gathered parameters, " if plan.gathered_bytes else ""
    gathered += f"{format_bytes(plan.update_bytes)} for updates of whole tensors, " if plan.update_bytes else ""
    return [f"  not in this table: {gathered}gradients in transit and activations, in {where}"]


def _drive(plan: Plan, local_ranks: int) -> list[str]:
    if not plan.file_bytes:
        return []
    written = plan.traffic_total.written * local_ranks
    size = format_bytes(plan.file_bytes * local_ranks)
    lines = [f"  the files take {size} with padding, and as much again while a checkpoint keeps the version before"]
    if written:
        steps = DRIVE_LIFE_TBW * 10**12 / written
        lines.append(
            f"  a drive with a warranty for {DRIVE_LIFE_TBW} TB written (an assumption: check yours) lasts for "
            f"{_count(steps)} such steps: {_duration(steps)} at one step a second, without checkpoints"
        )
    return lines


def _duration(seconds: float) -> str:
    for unit_s, unit in ((365 * _DAY_S, "years"), (_DAY_S, "days"), (3600, "hours")):
        if seconds >= 2 * unit_s:
            return f"{_count(seconds / unit_s)} {unit}"
    return f"{_count(seconds / 60)} minutes"


def _count(number: float) -> str:
    """Return a number to two digits, without more of them than are known."""
    if number < 10:
        return f"{number:.1f}"
    digits = len(str(int(number))) - 2
    return f"{round(number / 10**digits) * 10**digits:,}"
