"""The engine's report of its plan: every byte's place, a step's use of the drive, and errors if it does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from zstore.errors import BudgetError
from zstore.sizes import format_bytes

if TYPE_CHECKING:
    from .plan import PlacementSettings, Plan

_COLUMNS = ("device", "host", "disk")


def describe(plan: Plan, *, world_size: int = 1, local_ranks: int = 1, trains: bool = True) -> str:
    """Return the text that is printed once at the start: a table of kinds by places, the host budget, the bytes of a step.

    `plan` is one rank's; `local_ranks` ranks share the machine's drive. Without `trains` a step is a forward.
    """
    settings, moved = plan.settings, plan.traffic_total
    whose = "" if world_size == 1 else f" (rank 0 of {world_size}; the others hold as much or less)"
    what = "training state is kept" if trains else "parameters are kept"
    lines = [f"where the {what}{whose}:", *_table(plan)]
    if settings.budget_bytes is not None:
        more = f"; with {format_bytes(plan.budget_full_bytes)} nothing would be on disk" if plan.file_bytes else ""
        used, budget = format_bytes(plan.budget_used_bytes), format_bytes(settings.budget_bytes)
        lines.append(f"  host budget: {used} of {budget} used{more}")
    if plan.file_bytes:
        sharers = f" ({local_ranks} ranks together)" if local_ranks > 1 else ""
        read, written = (format_bytes(nbytes * local_ranks) for nbytes in (moved.read, moved.written))
        step = (
            f"each step reads about {read} from disk and writes {written}"
            if trains
            else f"each forward reads {read} from disk"
        )
        files = f"the files take {format_bytes(plan.file_bytes * local_ranks)}, and a checkpoint that links them as much again"
        lines += [f"  {step}{sharers}", f"  {files}"]
    if not settings.device_is_host and settings.optimizer != "none" and settings.ratio != 1:
        share = f"{1 - settings.ratio:.1%} of the optimizer state is updated on the device, the rest on the CPU"
        lines.append(
            f'  {share}: they round differently, so that bits depend on this share ("ratio": {settings.ratio:g})'
        )
    where = "the host's memory, on top of the budget" if settings.device_is_host else "the device's memory"
    gathered = f"up to {format_bytes(plan.gathered_bytes)} of gathered parameters, " if plan.gathered_bytes else ""
    gathered += f"{format_bytes(plan.update_bytes)} for updates of whole tensors, " if plan.update_bytes else ""
    return "\n".join([*lines, f"  not in this table: {gathered}gradients in transit and activations, in {where}"])


def _table(plan: Plan) -> list[str]:
    rows: list[tuple[str, ...]] = [("", *_COLUMNS)]
    for kind, held in [*plan.held.items(), ("total", plan.held_total)]:
        if held.total or kind == "total":
            sizes = (getattr(held, column) for column in _COLUMNS)
            rows.append((kind, *(format_bytes(nbytes) if nbytes else "-" for nbytes in sizes)))
    used = [i for i in range(1, len(rows[0])) if i == 1 or any(row[i] != "-" for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in (0, *used)}
    return ["  ".join(["", row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in used)]) for row in rows]


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
    tiers = {"offload_optimizer": settings.optimizer, "offload_param": settings.parameters}
    if offloaded := [f"`{key}.device`" for key, tier in tiers.items() if tier == "cpu"]:
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
