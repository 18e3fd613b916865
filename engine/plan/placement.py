"""The place of every byte of training state: decided once, from sizes and settings alone. Pure: no tensors, no I/O.

[Note: placement]
The device keeps arrays that are not offloaded, and `1 - ratio` of the optimizer state's elements. The others:
- "cpu" is in host memory and "nvme" on disk, but a shard under 64 KiB always in host memory, since a request to the
  disk would cost more; gradients that wait for the update are in host memory.
- Under a host budget "nvme" means: in memory as far as the budget goes, else on disk. Buffers come first, then arrays that
  have no other place. The remaining memory goes to the arrays that save most traffic per byte, in whole parameters: a byte
  of 16-bit parameters saves two reads (in forward and in backward) and a write (by the update), of gradients and optimizer
  state a read and a write, of a frozen parameter two reads. Padding on disk decides among equals; equal arrays are spread
  over the model. A step visits all of them in a circle, so an LRU cache would never hit; a fixed part in memory always does.
- Taking the densest first, and skipping items that do not fit, makes traffic monotone in the budget: if a larger budget
  takes an item that a smaller one has to skip, all items that the smaller one may still take are worth less than that one,
  for they are smaller and save no more per byte.

A split master (bf16 alone) is the parameter, wherever that is, and its low 16 bits and ties beside the slots. A trained
fp32 parameter is its own master, in the parameter's place. Only if the parameter stays on the device and its optimizer
state does not, the state has a master of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import itemgetter
from typing import Any

from zstore.format import ShardLayout, make_grid, numpy_dtype, round_up, stored_shape
from zstore.store import MANY_SMALL, SMALL_SHARD_BYTES, is_packed, run_file_bytes, shared_bytes

from ..config.optimizers import reduced_slots
from .plan import (
    FP32,
    Field,
    Held,
    Need,
    PlacementSettings,
    Places,
    Plan,
    Rest,
    TensorSlot,
    Traffic,
    cached_layout,
)
from .report import over_budget

_HOST_ALIGN_BYTES = 64
"""The host tier gives shards memory in multiples of this."""
_PAGE_BYTES = 4096
HEADROOM_PERCENT = 10
"""Of a memory that is to be filled: left for the process itself, the allocator's gaps, and errors of the estimates."""


def make_plan(needs: Mapping[str, Need], settings: PlacementSettings, units: Sequence[Sequence[str]] = ()) -> Plan:
    """Return the places of all state. See [Note: placement].

    `needs` are all parameters by name, in order; `units` are the names of the parameters that each unit gathers, in the order
    in which units run. Raises BudgetError if the budget cannot hold everything that has to be in host memory.
    """
    on_device = _share_on_device(needs, settings)
    least = cache(partial(_least_memory, settings))
    places = {name: least(need, name in on_device) for name, need in needs.items()}
    groups = list(zip(needs.values(), places.values(), strict=True))
    used_bytes = sum(_required_bytes(groups, settings).values())
    choices = _choices(needs, groups, settings)
    full_bytes = used_bytes + sum(saving.memory_bytes for _, saving in choices)
    for name, saving in choices:
        if settings.budget_bytes is None:
            taken = saving.field != "state"
        else:
            taken = used_bytes + saving.memory_bytes <= settings.budget_bytes
        if taken:
            places[name] = _in_memory(saving.field, places[name], needs[name].slots is not None)
            used_bytes += saving.memory_bytes
    groups = list(zip(needs.values(), places.values(), strict=True))
    of_group = {group: list(_stored(*group, settings)) for group in set(groups)}
    stored = [(one, count) for group, count in Counter(groups).items() for one in of_group[group]]
    packs_small = sum(one.is_small * count for one, count in stored) >= MANY_SMALL
    files = {
        group: [(one.field, one.file_bytes(packs_small=packs_small)) for one in kept if one.rest == "disk"]
        for group, kept in of_group.items()
    }
    return Plan(
        settings=settings,
        placements=places,
        stay_gathered=frozenset(name for name, need in needs.items() if need.stays_gathered),
        held=_held(stored, settings.buffer_bytes),
        traffic=_traffic(stored),
        files=tuple(file for group in groups for file in files[group]),
        packs_small=packs_small,
        shared_bytes=sum(
            count * shared_bytes(one.nbytes)
            for one, count in stored
            if one.rest == "host"
            and (one.kind == "parameters" or (one.kind != "gradients" and settings.optimizer == "nvme"))
        ),
        budget_used_bytes=used_bytes,
        budget_full_bytes=full_bytes,
        gathered_bytes=_gathered_bytes(needs, units),
        update_bytes=max((need.update_bytes for need in set(needs.values())), default=0),
    )


def without_headroom(nbytes: int) -> int:
    """Return the bytes of a memory that may be filled."""
    return nbytes * (100 - HEADROOM_PERCENT) // 100


def fill_device(
    plan: Plan, needs: Mapping[str, Need], units: Sequence[Sequence[str]], usable_bytes: int
) -> PlacementSettings:
    """Return the settings of `plan`, which has no optimizer state on the device, with the smallest ratio, in thousandths, that
    `usable_bytes` of the device allow beside the plan's arrays, two units that are gathered and a unit's gradients."""
    full = make_plan(needs, replace(plan.settings, ratio=0.0), units)
    more_bytes = full.held_total.device - plan.held_total.device
    sizes = {name: need.numel * numpy_dtype(need.gradient_dtype).itemsize for name, need in needs.items()}
    in_backward = plan.gathered_bytes + max((sum(sizes.get(name, 0) for name in unit) for unit in units), default=0)
    room_bytes = usable_bytes - plan.held_total.device - max(in_backward, full.update_bytes)
    missing_bytes = max(0, more_bytes - max(0, room_bytes))
    return replace(plan.settings, ratio=math.ceil(1000 * missing_bytes / max(more_bytes, 1)) / 1000)


_Group = tuple[Need, Places]
"""Parameters that share a need and are at like places."""


# -- stored arrays ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """One array, or several that are stored as one."""

    kind: str
    rest: Rest
    nbytes: int
    layout: ShardLayout
    field: Field = "state"
    """Decides its drives: a parameter beside its master has its own."""
    reads: int = 1
    """Times that a step reads it."""
    writes: int = 1

    @property
    def traffic(self) -> Traffic:
        """Bytes of a step; none but on disk."""
        nbytes = self.layout.num_present * self.layout.slot_bytes if self.rest == "disk" else 0
        return Traffic(read=self.reads * nbytes, written=self.writes * nbytes)

    @property
    def budget_bytes(self) -> int:
        """Bytes that count against the host budget."""
        return round_up(self.nbytes, _HOST_ALIGN_BYTES) if self.rest == "host" else 0

    @property
    def is_small(self) -> bool:
        """Whether it is on disk, and may share a file there."""
        return self.rest == "disk" and is_packed(self.nbytes)

    def file_bytes(self, *, packs_small: bool) -> int:
        """Return the bytes of its file, or of its part of one; none but on disk."""
        return run_file_bytes(self.layout, packed=packs_small and self.is_small) if self.rest == "disk" else 0


def _stored(need: Need, place: Places, settings: PlacementSettings) -> Iterator[_Stored]:
    """Yield everything that is kept of a parameter placed so, as `OptimizerState.add` makes it."""

    def one(kind: str, rest: Rest, dtype: str, numel: int = need.rows_numel, **keys: Any) -> _Stored:
        nbytes = numel * numpy_dtype(dtype).itemsize
        return _Stored(kind=kind, rest=rest, nbytes=nbytes, layout=need.layout(dtype), **keys)

    forwards, trained = settings.accumulation_steps, need.slots is not None
    own_master = _is_own_master(need, place)
    gathers = settings.gathers * forwards
    if need.secondary_numel:
        # The first gather of a step brings the rows, of a frozen parameter the first of all.
        gathers = int(trained)
        yield one("secondary parameters", "device", need.dtype, need.secondary_numel, field="parameter")
    if trained and not own_master:
        yield one("master", place.state, FP32)
    # Every micro-batch gathers it; the update reads it only if it is the master.
    numel = need.numel if need.stays_gathered else need.rows_numel
    field: Field = "parameter" if trained and not own_master else "state"
    reads = gathers + own_master
    yield one("parameters", place.parameter, need.dtype, numel, field=field, reads=reads, writes=int(trained))
    if not trained:
        return
    yield from _slots(need, place)
    if settings.holds_gradients:
        # Each micro-batch but the first adds to the sum of those before; the update reads it.
        numel = need.numel if need.whole_gradient else need.rows_numel
        keys: dict[str, Any] = {"field": "gradient", "reads": forwards, "writes": forwards}
        yield one("gradients", place.gradient, need.gradient_dtype, numel, **keys)


def _slots(need: Need, place: Places) -> Iterator[_Stored]:
    """Yield the stored arrays of the optimizer's slots: they may be cut in another way than the parameter, or have another
    type."""
    slots = [slot if isinstance(slot, TensorSlot) else TensorSlot(slot) for slot in need.slots or ()]
    reduced = reduced_slots([slot.name for slot in slots if slot.shape is None]) if need.moments == "bf16" else ()
    for slot in slots:
        # A shape of its own is cut over the same ranks by its own rows.
        grid = need.grid if slot.shape is None else make_grid(stored_shape(slot.shape), need.state_ranks)
        dtype = "bfloat16" if slot.shape is None and slot.name in reduced else FP32
        nbytes = grid.shard_valid_numel(need.shard) * numpy_dtype(dtype).itemsize
        # As in the store: each of these may be small although the others are not.
        rest = "host" if place.state == "disk" and nbytes < SMALL_SHARD_BYTES else place.state
        yield _Stored(kind=slot.name, rest=rest, nbytes=nbytes, layout=cached_layout(grid, need.shard, dtype))


def _is_own_master(need: Need, place: Places) -> bool:
    trained = need.slots is not None
    return trained and need.dtype == FP32 and (place.parameter != "device" or place.state == "device")


def _held(stored: Iterable[tuple[_Stored, int]], buffer_bytes: int) -> dict[str, Held]:
    held = {"parameters": Held(), "gradients": Held(), "master": Held()}
    for one, count in stored:
        held[one.kind] = held.get(one.kind, Held()) + Held(**{one.rest: count * one.nbytes})
    return held | {"buffers": Held(host=buffer_bytes)}


def _traffic(stored: Iterable[tuple[_Stored, int]]) -> dict[str, Traffic]:
    traffic = {"parameters": Traffic(), "gradients": Traffic(), "optimizer state": Traffic()}
    for one, count in stored:
        kind = one.kind if one.kind in traffic else "optimizer state"
        traffic[kind] += Traffic(read=count * one.traffic.read, written=count * one.traffic.written)
    return traffic


def _gathered_bytes(needs: Mapping[str, Need], units: Sequence[Sequence[str]]) -> int:
    sizes = {name: n.numel * numpy_dtype(n.dtype).itemsize for name, n in needs.items() if not n.stays_gathered}
    following: list[Sequence[str]] = [*units[1:], ()]
    pairs = ({*unit, *following[i]} for i, unit in enumerate(units))
    return max((sum(sizes.get(name, 0) for name in pair) for pair in pairs), default=0)


# -- fixed places, and choices ------------------------------------------------------------------------------------------


def _least_memory(settings: PlacementSettings, need: Need, state_on_device: bool) -> Places:
    """Return the placement that keeps as little as possible in host memory."""
    if need.stays_gathered or settings.parameters == "none":
        parameter: Rest = "device"
    else:
        parameter = "host" if settings.parameters == "cpu" or need.is_small(need.dtype) else "disk"
    if need.slots is None:
        return Places(state=parameter, parameter=parameter, gradient="device")
    if settings.optimizer == "none" or state_on_device:
        return Places(state="device", parameter=parameter, gradient="device")
    state: Rest = "host" if settings.optimizer == "cpu" or need.is_small(FP32) else "disk"
    if need.whole_gradient or not settings.holds_gradients:
        return Places(state=state, parameter=parameter, gradient="device")
    has_disk = "nvme" in (settings.optimizer, settings.parameters)
    gradient: Rest = "disk" if has_disk and not need.is_small(need.gradient_dtype) else "host"
    return Places(state=state, parameter=parameter, gradient=gradient)


def _share_on_device(needs: Mapping[str, Need], settings: PlacementSettings) -> set[str]:
    """Return the parameters whose state stays on the device though the optimizer is offloaded.

    At most `1 - ratio` of the elements, and so many that no other parameter would fit. The first ones: their gradients
    come last in a backward, when nothing is left that could hide a transfer.
    """
    if settings.optimizer == "none" or settings.ratio == 1:
        return set()
    trained = {name: need.rows_numel for name, need in needs.items() if need.slots is not None}
    room = sum(trained.values())
    room -= round(settings.ratio * room)
    chosen: set[str] = set()
    for name, numel in trained.items():
        if 0 < numel <= room:
            chosen.add(name)
            room -= numel
    return chosen


@dataclass(frozen=True, kw_only=True)
class _Saving:
    """What it saves that an array of a parameter is in host memory and not on disk."""

    field: Field
    memory_bytes: int
    density: float
    """Bytes that a step moves to and from disk less, for each byte of memory."""


def _choices(
    needs: Mapping[str, Need], groups: Sequence[_Group], settings: PlacementSettings
) -> list[tuple[str, _Saving]]:
    """Return the arrays that may be in host memory or on disk, with the parameter's name, by priority for memory; see
    [Note: placement]."""
    savings = {group: list(_savings(*group, settings)) for group in set(groups)}
    fields = ("parameter", "gradient", "state")
    choices = [
        ((-one.density, fields.index(one.field), spread_turn(number)), (name, one))
        for number, (name, group) in enumerate(zip(needs, groups, strict=True))
        for one in savings[group]
    ]
    choices.sort(key=itemgetter(0))
    return _within_max_in_cpu([choice for _, choice in choices], needs, settings)


def _savings(need: Need, place: Places, settings: PlacementSettings) -> Iterator[_Saving]:
    names: tuple[Field, ...] = ("parameter", "gradient", "state")
    frozen = need.slots is None
    for field in names:
        if getattr(place, field) != "disk" or (field == "state" and frozen):
            continue
        memory, moved = _cost(need, place, settings)
        new_memory, new_moved = _cost(need, _in_memory(field, place, not frozen), settings)
        if more := max(0, new_memory - memory):
            yield _Saving(field=field, memory_bytes=more, density=(moved - new_moved) / more)


def spread_turn(number: int) -> int:
    """Return the turn of a model's parameter of this number, so that those whose turn comes first are spread over the model.

    Were the first parameters in memory and the last ones on disk, the drive would be idle in one half of a pass and hold it
    up in the other. Source: multiples of the golden ratio, modulo 1 (Knuth, The Art of Computer Programming 3, 6.4).
    """
    return number * 2654435769 % 2**32


def _within_max_in_cpu(
    choices: list[tuple[str, _Saving]], needs: Mapping[str, Need], settings: PlacementSettings
) -> list[tuple[str, _Saving]]:
    """Return the choices without the parameters that `max_in_cpu_numel` leaves on disk whatever the budget."""
    room = settings.max_in_cpu_numel
    if room is None:
        unlimited = settings.budget_bytes is not None
        return [(name, one) for name, one in choices if unlimited or one.field != "parameter"]
    kept: list[tuple[str, _Saving]] = []
    for name, one in choices:
        if one.field == "parameter":
            if needs[name].rows_numel > room:
                continue
            room -= needs[name].rows_numel
        kept.append((name, one))
    return kept


@cache
def _in_memory(field: Field, place: Places, trained: bool) -> Places:
    """Return `place` with a part of it in host memory."""
    match field:
        case "parameter":
            return replace(place, parameter="host", state=place.state if trained else "host")
        case "gradient":
            return replace(place, gradient="host")
        case "state":
            return replace(place, state="host")


def _cost(need: Need, place: Places, settings: PlacementSettings) -> tuple[int, int]:
    """Return the bytes of a placement that count against the host budget, and those that a step moves to and from disk."""
    stored = list(_stored(need, place, settings))
    return sum(one.budget_bytes for one in stored), sum(one.traffic.total for one in stored)


# -- the budget ---------------------------------------------------------------------------------------------------------


def _required_bytes(groups: Sequence[_Group], settings: PlacementSettings) -> dict[str, int]:
    """Return the bytes of host memory that nothing can spare, by purpose.

    Raises BudgetError if they are over the budget.
    """
    required = {"transfer buffers": settings.buffer_bytes, "one piece larger than the buffers": 0}
    pool_bytes = settings.buffer_bytes if settings.update_buffer_bytes is None else settings.update_buffer_bytes
    required |= dict.fromkeys(("parameters", "gradients", "optimizer state"), 0)
    for group, count in Counter(groups).items():
        stored = list(_stored(*group, settings))
        for one in stored:
            kind = one.kind if one.kind in ("parameters", "gradients") else "optimizer state"
            required[kind] += count * one.budget_bytes
        # A buffer holds a chunk of all arrays of an update; the pool may have to make an extra one.
        piece = round_up(sum(one.layout.slot_bytes for one in stored if one.rest == "disk"), _PAGE_BYTES)
        if settings.budget_bytes is not None and piece > pool_bytes:
            largest = max(piece, required["one piece larger than the buffers"])
            required["one piece larger than the buffers"] = largest
    total = sum(required.values())
    if settings.budget_bytes is not None and total > settings.budget_bytes:
        raise over_budget(required, settings.budget_bytes, settings)
    return required
