"""The placement of every byte of training state, decided once from sizes and settings. Pure functions: no tensors, no I/O.

[Note: placement]
The device stores arrays that are not offloaded, and `1 - ratio` of the optimizer state's elements. The rest:
- "cpu" is host memory and "nvme" the disk, but shards under 64 KiB are always in host memory, since a disk request would
  cost more; gradients are in host memory until the update.
- Under a host budget "nvme" means: in memory as far as the budget allows, else on disk. First come buffers and arrays that
  can be nowhere else, then those that save the most traffic per byte, one whole parameter at a time: a byte of 16-bit
  parameters saves two reads (forward, backward) and a write (update), a byte of gradients or optimizer state a read and a
  write, and a byte of a frozen parameter two reads. Padding on disk breaks ties; the remaining ones are spread
  over the model. A step visits all of them cyclically, so an LRU cache would never hit; a fixed part in memory always does.
- In step mode `backward` gradients are stored in host memory if everything else fits in the budget too; otherwise each is
  used as it arrives.
- Taking the densest first, and skipping those that do not fit, makes traffic monotone in the budget: an array that fits
  only in the larger budget is worth more than all that the smaller one can still take, which is smaller and no denser.

A trained fp32 parameter is its own master copy, unless it stays on the device and its optimizer state does not.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import pairwise
from operator import itemgetter
from typing import Any

from zstore.errors import BudgetError
from zstore.format import ShardLayout, layout_of, make_grid, numpy_dtype, round_up, stored_shape
from zstore.io import PAGE_BYTES
from zstore.store import MANY_SMALL, SMALL_SHARD_BYTES, is_packed, run_file_bytes, shared_bytes

from ..config.optimizers import reduced_slots
from .plan import FP32, Bytes, Field, Need, OffloadTier, PlacementSettings, Places, Plan, TensorSlot, TierName

_layout_of = lru_cache(maxsize=4096)(layout_of)
_HOST_ALIGN_BYTES = 64
"""Granularity of the host tier's allocations."""
_FIELDS: tuple[Field, ...] = ("parameter", "gradient", "state")
HEADROOM_PERCENT = 10
"""Percentage of a memory tier that is left free for the process, fragmentation, and estimation errors."""


def make_plan(needs: Mapping[str, Need], settings: PlacementSettings, units: Sequence[Sequence[str]] = ()) -> Plan:
    """Return the placement of all state. See [Note: placement].

    `needs` has all parameters by name, in order; `units` has the names of each unit's parameters, in execution order.
    Raises BudgetError if the budget is too small for the arrays that must be in host memory.
    """
    if settings.stores_gradients is None and settings.budget_bytes is not None:
        with suppress(BudgetError):
            plan = _plan(needs, settings, units)
            if plan.budget_full_bytes <= settings.budget_bytes:
                return plan
        settings = replace(settings, stores_gradients=False)
    return _plan(needs, settings, units)


def _plan(needs: Mapping[str, Need], settings: PlacementSettings, units: Sequence[Sequence[str]]) -> Plan:
    on_device = _device_resident(needs, settings)
    min_placement, arrays_of = cache(partial(_min_host_placement, settings)), cache(partial(_arrays_of, settings))
    places = {name: min_placement(need, name in on_device) for name, need in needs.items()}
    used_bytes = _required_bytes([arrays_of(need, places[name]) for name, need in needs.items()], settings)
    choices = _choices(needs, places, settings, arrays_of)
    full_bytes = used_bytes + sum(saving.memory_bytes for _, saving in choices)
    for name, saving in choices:
        if settings.budget_bytes is None:
            fits = saving.field != "state"
        else:
            fits = used_bytes + saving.memory_bytes <= settings.budget_bytes
        if fits:
            places[name] = _in_memory(saving.field, needs[name], places[name])
            used_bytes += saving.memory_bytes
    arrays = [a for name, need in needs.items() for a in arrays_of(need, places[name])]
    on_disk = [a for a in arrays if a.tier == "disk"]
    packs_small = sum(is_packed(a.nbytes) for a in on_disk) >= MANY_SMALL
    files = ((a.field, run_file_bytes(a.layout, packed=packs_small and is_packed(a.nbytes))) for a in on_disk)
    in_store = {a.kind for a in arrays} - {"gradients"} if settings.optimizer == "nvme" else {"parameters"}
    small = (shared_bytes(a.nbytes) for a in arrays if a.tier == "host" and a.kind in in_store)
    sizes = {name: n.numel * numpy_dtype(n.dtype).itemsize for name, n in needs.items() if not n.stays_gathered}
    pairs = pairwise([*units, ()])
    return Plan(
        settings=settings,
        placements=places,
        stay_gathered=frozenset(name for name, need in needs.items() if need.stays_gathered),
        held=_bytes_by_kind(arrays, settings.buffer_bytes),
        read_bytes=sum(a.reads * a.disk_bytes for a in arrays),
        written_bytes=sum(a.writes * a.disk_bytes for a in arrays),
        files=tuple(files),
        packs_small=packs_small,
        shared_bytes=sum(small),
        budget_used_bytes=used_bytes,
        budget_full_bytes=full_bytes,
        # Two consecutive units.
        gathered_bytes=max((sum(sizes.get(name, 0) for name in {*unit, *after}) for unit, after in pairs), default=0),
        update_bytes=max((need.update_bytes for need in set(needs.values())), default=0),
    )


def without_headroom(nbytes: int) -> int:
    """Return how many of a memory tier's `nbytes` a plan may use."""
    return nbytes * (100 - HEADROOM_PERCENT) // 100


def fill_device(
    needs: Mapping[str, Need], settings: PlacementSettings, units: Sequence[Sequence[str]], usable_bytes: int
) -> PlacementSettings:
    """Return `settings`, which have no optimizer state on the device, with the smallest ratio (to three decimals) for which
    `usable_bytes` of the device suffice, including the other arrays, two gathered units and a unit's gradients."""
    lean, full = (make_plan(needs, replace(settings, ratio=ratio), units) for ratio in (1.0, 0.0))
    state_bytes = full.held_total.device - lean.held_total.device
    sizes = {name: need.numel * numpy_dtype(need.gradient_dtype).itemsize for name, need in needs.items()}
    in_backward = lean.gathered_bytes + max((sum(sizes.get(name, 0) for name in unit) for unit in units), default=0)
    room_bytes = usable_bytes - lean.held_total.device - max(in_backward, full.update_bytes)
    missing_bytes = max(0, state_bytes - max(0, room_bytes))
    return replace(settings, ratio=math.ceil(1000 * missing_bytes / max(state_bytes, 1)) / 1000)


@dataclass(frozen=True, kw_only=True)
class _Array:
    """An array, or several that are stored as one."""

    kind: str
    tier: TierName
    nbytes: int
    layout: ShardLayout
    field: Field = "state"
    """Selects its drives: a parameter with a separate master has its own drives."""
    reads: int = 1
    """Number of reads per step."""
    writes: int = 1

    @cached_property
    def disk_bytes(self) -> int:
        """Bytes per read or write, with checksums and padding; 0 unless on disk."""
        return self.layout.num_present * self.layout.slot_bytes if self.tier == "disk" else 0

    @property
    def budget_bytes(self) -> int:
        """Bytes that count against the host budget."""
        return round_up(self.nbytes, _HOST_ALIGN_BYTES) if self.tier == "host" else 0


def _arrays_of(settings: PlacementSettings, need: Need, place: Places) -> list[_Array]:
    """Return the arrays of a parameter with this placement, as `OptimizerState.add` creates them."""

    def add(kind: str, tier: TierName, dtype: str, numel: int = need.rows_numel, **fields: Any) -> None:
        nbytes = numel * numpy_dtype(dtype).itemsize
        arrays.append(
            _Array(kind=kind, tier=tier, nbytes=nbytes, layout=_layout_of(need.grid, need.shard, dtype), **fields)
        )

    arrays: list[_Array] = []
    forwards, trained = settings.accumulation_steps, need.slots is not None
    own_master = trained and need.dtype == FP32 and (place.parameter != "device" or place.state == "device")
    gathers = settings.gathers * forwards
    if need.secondary_numel:
        # The first gather of a step reads the rows; for a frozen parameter, only the very first gather does.
        gathers = int(trained)
        add("secondary parameters", "device", need.dtype, need.secondary_numel, field="parameter")
    if trained and not own_master:
        add("master", place.state, FP32)
    # Every micro-batch gathers the parameter; the update reads it only if it is its own master.
    numel = need.numel if need.stays_gathered else need.rows_numel
    field: Field = "parameter" if trained and not own_master else "state"
    reads = gathers + own_master
    add("parameters", place.parameter, need.dtype, numel, field=field, reads=reads, writes=int(trained))
    if need.slots is None:
        return arrays
    arrays += _slots(need, place)
    if settings.stores_gradients or (settings.stores_gradients is None and place.gradient != "device"):
        # Each micro-batch except the first adds to the sum of the previous ones, which the update reads.
        numel = need.numel if need.whole_gradient else need.rows_numel
        accesses = {"reads": forwards, "writes": forwards}
        add("gradients", place.gradient, need.gradient_dtype, numel, field="gradient", **accesses)
    return arrays


def _slots(need: Need, place: Places) -> Iterator[_Array]:
    """Yield the arrays of the optimizer's slots, whose partitioning and dtype may differ from the parameter's."""
    slots = [slot if isinstance(slot, TensorSlot) else TensorSlot(slot) for slot in need.slots or ()]
    reduced_names = reduced_slots([slot.name for slot in slots if slot.shape is None]) if need.moments == "bf16" else ()
    for slot in slots:
        # State of a different shape is split by rows across the same ranks.
        grid = need.grid if slot.shape is None else make_grid(stored_shape(slot.shape), need.state_ranks)
        dtype = "bfloat16" if slot.shape is None and slot.name in reduced_names else FP32
        nbytes = grid.shard_valid_numel(need.shard) * numpy_dtype(dtype).itemsize
        # As in the store, individual arrays may be below the small-shard threshold.
        tier = "host" if place.state == "disk" and nbytes < SMALL_SHARD_BYTES else place.state
        yield _Array(kind=slot.name, tier=tier, nbytes=nbytes, layout=_layout_of(grid, need.shard, dtype))


def _bytes_by_kind(arrays: Sequence[_Array], buffer_bytes: int) -> dict[str, Bytes]:
    """Return the bytes by kind and tier."""
    sums: Counter[tuple[str, str]] = Counter()
    for array in arrays:
        sums[array.kind, array.tier] += array.nbytes
    kinds = dict.fromkeys(["parameters", "gradients", "master", *(kind for kind, _ in sums)])
    held = {kind: Bytes(**{tier: sums[kind, tier] for tier in ("device", "host", "disk")}) for kind in kinds}
    return held | {"buffers": Bytes(host=buffer_bytes)}


def _min_host_placement(settings: PlacementSettings, need: Need, state_on_device: bool) -> Places:
    """Return the placement that takes the least host memory."""

    def off_device(tier: OffloadTier, dtype: str) -> TierName:
        is_small = need.rows_numel * numpy_dtype(dtype).itemsize < SMALL_SHARD_BYTES
        return "host" if tier == "cpu" or is_small else "disk"

    stays = need.stays_gathered or settings.parameters == "none"
    parameter = "device" if stays else off_device(settings.parameters, need.dtype)
    if need.slots is None:
        return Places(state=parameter, parameter=parameter, gradient="device")
    if settings.optimizer == "none" or state_on_device:
        return Places(state="device", parameter=parameter, gradient="device")
    gradient: TierName = "device"
    if settings.stores_gradients is not False and not need.whole_gradient:
        has_disk = "nvme" in (settings.optimizer, settings.parameters)
        gradient = off_device("nvme" if has_disk else "cpu", need.gradient_dtype)
    return Places(state=off_device(settings.optimizer, FP32), parameter=parameter, gradient=gradient)


def _device_resident(needs: Mapping[str, Need], settings: PlacementSettings) -> set[str]:
    """Return the parameters whose state stays on the device although the optimizer is offloaded.

    These are at most `1 - ratio` of the elements, and enough that no other parameter would fit. The first parameters are
    chosen, since their gradients come last in the backward pass, with no computation left to hide a transfer.
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
    """The benefit of storing an array of a parameter in host memory instead of on disk."""

    field: Field
    memory_bytes: int
    density: float
    """Bytes of disk traffic saved per step and per byte of memory."""


def _choices(
    needs: Mapping[str, Need],
    places: Mapping[str, Places],
    settings: PlacementSettings,
    arrays_of: Callable[[Need, Places], list[_Array]],
) -> list[tuple[str, _Saving]]:
    """Return (parameter, saving) for the arrays that may be in host memory or on disk, in order of priority (see [Note:
    placement]), without the parameters that `max_in_cpu_numel` leaves on disk."""
    savings = cache(partial(_savings, arrays_of))
    choices = [
        ((-saving.density, _FIELDS.index(saving.field), spread_key(index)), name, saving)
        for index, (name, need) in enumerate(needs.items())
        for saving in savings(need, places[name])
    ]
    room_numel = settings.max_in_cpu_numel
    if room_numel is None:
        room_numel = 0 if settings.budget_bytes is None else sys.maxsize
    allowed: list[tuple[str, _Saving]] = []
    for _, name, saving in sorted(choices, key=itemgetter(0)):
        if saving.field == "parameter":
            if needs[name].rows_numel > room_numel:
                continue
            room_numel -= needs[name].rows_numel
        allowed.append((name, saving))
    return allowed


def _savings(arrays_of: Callable[[Need, Places], list[_Array]], need: Need, place: Places) -> list[_Saving]:
    """Return the savings of moving each array of a parameter from disk to host memory."""
    savings: list[_Saving] = []
    for field in _FIELDS if need.slots is not None else _FIELDS[:1]:
        if getattr(place, field) == "disk":
            (memory, traffic), (memory_after, traffic_after) = map(
                _cost, (arrays_of(need, place), arrays_of(need, _in_memory(field, need, place)))
            )
            if memory_after > memory:
                density = (traffic - traffic_after) / (memory_after - memory)
                savings.append(_Saving(field=field, memory_bytes=memory_after - memory, density=density))
    return savings


def _cost(arrays: Sequence[_Array]) -> tuple[int, int]:
    """Return the bytes that count against the host budget, and the bytes of disk traffic per step."""
    return sum(a.budget_bytes for a in arrays), sum((a.reads + a.writes) * a.disk_bytes for a in arrays)


def _in_memory(field: Field, need: Need, place: Places) -> Places:
    """Return `place` with this array in host memory, or all arrays if the parameter is frozen."""
    fields = (field,) if need.slots is not None else ("parameter", "state")
    host: dict[str, Any] = dict.fromkeys(fields, "host")
    return replace(place, **host)


def spread_key(index: int) -> int:
    """Return a sort key for the parameter with this index that spreads parameters in memory over the model: with the first
    half in memory, the drive would be idle in one half of a pass and delay the other.

    Source: multiples of the golden ratio, modulo 1 (Knuth, The Art of Computer Programming 3, 6.4).
    """
    return index * 2654435769 % 2**32


def _required_bytes(arrays_by_parameter: Sequence[Sequence[_Array]], settings: PlacementSettings) -> int:
    """Return the bytes that must be in host memory, given the arrays of each parameter. Raises BudgetError if they
    exceed the budget."""
    piece_kind = "a piece larger than the buffers"
    required = Counter({"transfer buffers": settings.buffer_bytes, piece_kind: 0})
    pool_bytes = settings.buffer_bytes if settings.update_buffer_bytes is None else settings.update_buffer_bytes
    for arrays in arrays_by_parameter:
        for array in arrays:
            kind = array.kind if array.kind in ("parameters", "gradients") else "optimizer state"
            required[kind] += array.budget_bytes
        # A buffer holds one chunk of each array of an update; the pool may need an extra one.
        piece_bytes = round_up(sum(array.layout.slot_bytes for array in arrays if array.tier == "disk"), PAGE_BYTES)
        if settings.budget_bytes is not None and piece_bytes > pool_bytes:
            required[piece_kind] = max(required[piece_kind], piece_bytes)
    if settings.budget_bytes is None or required.total() <= settings.budget_bytes:
        return required.total()
    sufficient, buffer_bytes_for = required.total(), settings.buffer_bytes_for
    other_bytes = sufficient - settings.buffer_bytes
    while buffer_bytes_for is not None and (needed := other_bytes + buffer_bytes_for(sufficient)) > sufficient:
        sufficient = needed  # buffers are a share of the budget, and grow with it
    parts = ", ".join(f"{nbytes} bytes of {kind}" for kind, nbytes in required.items() if nbytes)
    advice = ', or change `device` from "cpu" to "nvme" in offload_optimizer or offload_param for what does not fit'
    raise BudgetError(
        f"the host budget gives this rank {settings.budget_bytes} bytes, but {required.total()} must be in host memory "
        f"({parts}): raise `host_budget_bytes` (to at least {sufficient} bytes per rank on this machine)"
        + (advice if "cpu" in (settings.optimizer, settings.parameters) else "")
    )
