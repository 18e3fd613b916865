"""The place of every byte of training state: decided once, from sizes and settings alone. Pure: no tensors, no I/O.

[Note: placement]
The device keeps arrays that are not offloaded, and `1 - ratio` of the optimizer state's elements. The others:
- "cpu" is in host memory and "nvme" on disk, but a shard under 64 KiB always in host memory, since a request to the
  disk would cost more; gradients that wait for the update are in host memory.
- Under a host budget "nvme" means: in memory as far as the budget goes, else on disk. Buffers come first, then arrays that
  have no other place. The remaining memory goes to the arrays that save most of the drive's time per byte, in whole
  parameters: a byte of 16-bit parameters saves two reads (in forward and in backward) and a write (by the update), of
  gradients and optimizer state a read and a write, of a frozen parameter two reads. Rates of the drive that are not known
  count as equal, and time as bytes. Padding on disk decides among equals; equal arrays are spread over the model. A step
  visits all of them in a circle, so an LRU cache would never hit; a fixed part in memory always does.
- Taking the densest first, and skipping items that do not fit, makes the drive's time monotone in the budget: if a larger
  budget takes an item that a smaller one has to skip, all items that the smaller one may still take are worth less than
  that one, for they are smaller and save no more per byte.

A split master (bf16 alone) is the parameter, wherever that is, and its low 16 bits and ties beside the slots. A trained
fp32 parameter is its own master, in the parameter's place. Only if the parameter stays on the device and its optimizer
state does not, the state has a master of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from zstore.checkpoint import StoredSlot, stored_slots
from zstore.errors import ConfigError
from zstore.format import ArraySpec, Grid, ShardLayout, make_grid, numpy_dtype, round_up
from zstore.store import MANY_SMALL, SMALL_SHARD_BYTES, is_packed, run_file_bytes

from .plan import (
    ALIKE,
    FP32,
    Field,
    Held,
    Need,
    Placement,
    PlacementSettings,
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


def make_plan(needs: Sequence[Need], settings: PlacementSettings, units: Sequence[Sequence[str]] = ()) -> Plan:
    """Return the places of all state. See [Note: placement].

    `needs` are all parameters in order; `units` are the names of the parameters that each unit gathers, in the order in
    which units run. Raises BudgetError if the budget cannot hold everything that has to be in host memory, ConfigError if a
    setting is out of its range.
    """
    _check_settings(settings)
    on_device = _share_on_device(needs, settings)
    places = {need.name: _least_memory(need, settings, need.name in on_device) for need in needs}
    used_bytes = sum(_required_bytes(needs, places, settings).values())
    choices = _choices(needs, places, settings)
    full_bytes = used_bytes + sum(choice.memory_bytes for choice in choices)
    for choice in choices:
        if settings.budget_bytes is None:
            taken = choice.field != "state"
        else:
            taken = used_bytes + choice.memory_bytes <= settings.budget_bytes
        if taken:
            name = choice.need.name
            places[name] = _in_memory(choice.need, choice.field, places[name])
            used_bytes += choice.memory_bytes
    stored = [one for need in needs for one in _stored(need, places[need.name], settings)]
    packs_small = sum(one.is_small for one in stored) >= MANY_SMALL
    return Plan(
        settings=settings,
        placements=places,
        stay_gathered=frozenset(need.name for need in needs if need.stays_gathered),
        held=_held(stored, settings),
        traffic=_traffic(stored),
        files=tuple((one.field, one.file_bytes(packs_small=packs_small)) for one in stored if one.rest == "disk"),
        packs_small=packs_small,
        budget_used_bytes=used_bytes,
        budget_full_bytes=full_bytes,
        gathered_bytes=_gathered_bytes(needs, units),
        update_bytes=max((need.update_bytes for need in needs), default=0),
    )


# -- stored arrays ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """One array, or several that are stored as one."""

    kind: str
    field: Field
    """Decides its drives: a parameter beside its master has its own."""
    rest: Rest
    nbytes: int
    layout: ShardLayout
    reads: int
    """Times that a step reads it."""
    writes: int

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


def _stored(need: Need, place: Placement, settings: PlacementSettings) -> Iterator[_Stored]:
    """Yield everything that is kept of a parameter placed so, as `OptimizerState.add` makes it."""

    def one(
        kind: str,
        rest: Rest,
        dtype: str,
        *,
        field: Field = "state",
        whole: bool = False,
        reads: int = 1,
        writes: int = 1,
    ) -> _Stored:
        nbytes = (need.numel if whole else need.rows_numel) * numpy_dtype(dtype).itemsize
        layout = need.layout(dtype)
        return _Stored(kind=kind, field=field, rest=rest, nbytes=nbytes, layout=layout, reads=reads, writes=writes)

    forwards = settings.accumulation_steps
    split = need.splits_master and need.slots is not None and need.dtype == "bfloat16"
    own_master = split or _is_own_master(need, place)
    fetches = need.fetches * forwards
    if need.secondary_numel:
        # The first gather of a step brings the rows, of a frozen parameter the first of all.
        fetches = 0 if need.slots is None else 1
        nbytes = need.secondary_numel * numpy_dtype(need.dtype).itemsize
        yield replace(one("secondary parameters", "device", need.dtype, field="parameter"), nbytes=nbytes)
    if need.slots is not None and not own_master:
        yield one("master", place.state, FP32)
    # Every micro-batch gathers it; the update reads it only if it is (in) the master.
    yield one(
        "parameters",
        place.parameter,
        need.dtype,
        field="state" if need.slots is None or own_master else "parameter",
        whole=need.stays_gathered,
        reads=fetches + own_master,
        writes=0 if need.slots is None else 1,
    )
    if need.slots is None:
        return
    if split:
        yield from _split_rest(need, place)
    yield from _slots(need, place)
    if need.error_numel:
        nbytes = need.error_numel * numpy_dtype(need.dtype).itemsize
        yield replace(one("gradient errors", "device", need.dtype, field="gradient"), nbytes=nbytes)
    if settings.holds_gradients:
        # Each micro-batch but the first adds to the sum of those before; the update reads it.
        whole = need.whole_gradient
        yield one(
            "gradients",
            place.gradient,
            need.gradient_dtype,
            field="gradient",
            whole=whole,
            reads=forwards,
            writes=forwards,
        )


def _slots(need: Need, place: Placement) -> Iterator[_Stored]:
    """Yield the stored arrays of the optimizer's slots."""
    slots = [slot if isinstance(slot, TensorSlot) else TensorSlot(slot) for slot in need.slots or ()]
    plain = [slot.name for slot in slots if slot.shape is None]
    kept = stored_slots(plain, need.moments, (need.grid.rows, need.grid.row_numel))
    for slot in slots:
        if slot.shape is not None:
            yield _of_own_shape(need, slot.name, slot.shape, place)
            continue
        for array in kept.get(slot.name, (StoredSlot(slot.name, FP32),)):
            grid = need.grid if array.block == 1 else need.grid.packed(array.block)
            yield _apart(need, slot.name, grid, array.dtype, place)


def _split_rest(need: Need, place: Placement) -> Iterator[_Stored]:
    """Yield the arrays of a split master beside the parameter."""
    ties = need.grid.packed()
    for grid, dtype in ((need.grid, "uint16"), (ties, "uint8")):
        yield _apart(need, "master", grid, dtype, place)


def _of_own_shape(need: Need, name: str, shape: tuple[int, ...], place: Placement) -> _Stored:
    """Return a slot of another shape than the parameter's, cut over the same ranks."""
    stored_shape = ArraySpec(name=f"optimizer/{name}", shape=shape, dtype=FP32).stored_shape
    return _apart(need, name, make_grid(stored_shape, need.state_ranks), FP32, place)


def _apart(need: Need, kind: str, grid: Grid, dtype: str, place: Placement) -> _Stored:
    """Return an array of the state that is cut in another way than the parameter, or has another type."""
    nbytes = grid.shard_valid_numel(need.shard) * numpy_dtype(dtype).itemsize
    # As in the store: each of these may be small although the others are not.
    rest = "host" if place.state == "disk" and nbytes < SMALL_SHARD_BYTES else place.state
    layout = cached_layout(grid, need.shard, dtype)
    return _Stored(kind=kind, field="state", rest=rest, nbytes=nbytes, layout=layout, reads=1, writes=1)


def _is_own_master(need: Need, place: Placement) -> bool:
    trained = need.slots is not None
    return trained and need.dtype == FP32 and (place.parameter != "device" or place.state == "device")


def _held(stored: Iterable[_Stored], settings: PlacementSettings) -> dict[str, Held]:
    held = {"parameters": Held(), "gradients": Held(), "master": Held()}
    for one in stored:
        where = "pinned" if one.rest == "host" and settings.pins_state else one.rest
        held[one.kind] = held.get(one.kind, Held()) + Held(**{where: one.nbytes})
    held["buffers"] = Held(**{"pinned" if settings.pins_buffers else "host": settings.buffer_bytes})
    return held


def _traffic(stored: Iterable[_Stored]) -> dict[str, Traffic]:
    traffic = {"parameters": Traffic(), "gradients": Traffic(), "optimizer state": Traffic()}
    for one in stored:
        kind = one.kind if one.kind in traffic else "optimizer state"
        traffic[kind] += one.traffic
    return traffic


def _gathered_bytes(needs: Sequence[Need], units: Sequence[Sequence[str]]) -> int:
    sizes = {n.name: n.numel * numpy_dtype(n.dtype).itemsize for n in needs if not n.stays_gathered}
    following: list[Sequence[str]] = [*units[1:], ()]
    pairs = ({*unit, *following[i]} for i, unit in enumerate(units))
    return max((sum(sizes.get(name, 0) for name in pair) for pair in pairs), default=0)


# -- fixed places, and choices ------------------------------------------------------------------------------------------


def _least_memory(need: Need, settings: PlacementSettings, state_on_device: bool) -> Placement:
    """Return the placement that keeps as little as possible in host memory."""
    if need.stays_gathered or settings.parameters == "none":
        parameter: Rest = "device"
    else:
        parameter = "host" if settings.parameters == "cpu" or need.is_small(need.dtype) else "disk"
    if need.slots is None:
        return Placement(state=parameter, parameter=parameter, gradient="device")
    if settings.optimizer == "none" or state_on_device:
        return Placement(state="device", parameter=parameter, gradient="device")
    state: Rest = "host" if settings.optimizer == "cpu" or need.is_small(FP32) else "disk"
    if need.whole_gradient or not settings.holds_gradients:
        return Placement(state=state, parameter=parameter, gradient="device")
    has_disk = "nvme" in (settings.optimizer, settings.parameters)
    gradient: Rest = "disk" if has_disk and not need.is_small(need.gradient_dtype) else "host"
    return Placement(state=state, parameter=parameter, gradient=gradient)


def _share_on_device(needs: Sequence[Need], settings: PlacementSettings) -> set[str]:
    """Return the parameters whose state stays on the device though the optimizer is offloaded.

    At most `1 - ratio` of the elements, and so many that no other parameter would fit. The first ones: their gradients
    come last in a backward, when nothing is left that could hide a transfer.
    """
    if settings.optimizer == "none":
        return set()
    trained = [need for need in needs if need.slots is not None]
    room = sum(need.rows_numel for need in trained)
    room -= round(settings.ratio * room)
    chosen: set[str] = set()
    for need in trained:
        if 0 < need.rows_numel <= room:
            chosen.add(need.name)
            room -= need.rows_numel
    return chosen


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """An array on disk that could be in host memory."""

    need: Need
    field: Field
    memory_bytes: int
    saved_s: Fraction
    """Time of the drive in a step that this saves, or bytes if its rates are not known."""
    turn: int
    """Order among equals: see `spread_turns`."""

    @property
    def rank(self) -> tuple[Fraction, int, int]:
        """Sorts the densest first; among equals parameters, gradients, state."""
        field = ("parameter", "gradient", "state").index(self.field)
        return -self.saved_s / self.memory_bytes, field, self.turn


def _choices(needs: Sequence[Need], least: Mapping[str, Placement], settings: PlacementSettings) -> list[_Choice]:
    """Return the arrays that may be in host memory or on disk, by priority for memory; see [Note: placement]."""
    choices: list[_Choice] = []
    names: tuple[Field, ...] = ("parameter", "gradient", "state")
    rates = settings.drive_rates or ALIKE
    turns = dict(zip((need.name for need in needs), spread_turns([need.rows_numel for need in needs]), strict=True))
    for need in needs:
        place = least[need.name]
        frozen = need.slots is None
        for field in names:
            if getattr(place, field) != "disk" or (field == "state" and frozen):
                continue
            memory, moved = _cost(need, place, settings)
            new_memory, new_moved = _cost(need, _in_memory(need, field, place), settings)
            if new_memory > memory:
                saved, turn = rates.seconds(moved) - rates.seconds(new_moved), turns[need.name]
                choices.append(
                    _Choice(need=need, field=field, memory_bytes=new_memory - memory, saved_s=saved, turn=turn)
                )
    choices.sort(key=lambda choice: choice.rank)
    return _within_max_in_cpu(choices, settings)


def spread_turns(sizes: Sequence[int]) -> list[int]:
    """Return the turn of each thing: the part that holds its middle, of at most as many parts as there are things, with
    binary digits in reverse. A second one in a part comes after the first ones of all.

    Were the first parameters in memory and the last ones on disk, the drive would be idle in one half of a pass and hold it
    up in the other. Source: the van der Corput sequence.
    """
    total = max(sum(sizes), 1)
    bits = max(len(sizes).bit_length() - 1, 1)
    turns: list[int] = []
    seen: Counter[int] = Counter()
    before = 0
    for size in sizes:
        place = min(((2 * before + size) << bits) // (2 * total), (1 << bits) - 1)
        turns.append((seen[place] << bits) + int(f"{place:0{bits}b}"[::-1], 2))
        seen[place] += 1
        before += size
    return turns


def _within_max_in_cpu(choices: list[_Choice], settings: PlacementSettings) -> list[_Choice]:
    """Return the choices without the parameters that `max_in_cpu_numel` leaves on disk whatever the budget."""
    room = settings.max_in_cpu_numel
    if room is None:
        unlimited = settings.budget_bytes is not None
        return [choice for choice in choices if unlimited or choice.field != "parameter"]
    kept: list[_Choice] = []
    for choice in choices:
        if choice.field == "parameter":
            if choice.need.rows_numel > room:
                continue
            room -= choice.need.rows_numel
        kept.append(choice)
    return kept


def _in_memory(need: Need, field: Field, place: Placement) -> Placement:
    """Return `place` with a part of it in host memory."""
    match field:
        case "parameter":
            return replace(place, parameter="host", state="host" if need.slots is None else place.state)
        case "gradient":
            return replace(place, gradient="host")
        case "state":
            return replace(place, state="host")


def _cost(need: Need, place: Placement, settings: PlacementSettings) -> tuple[int, Traffic]:
    """Return the bytes of a placement that count against the host budget, and those that a step moves to and from disk."""
    stored = list(_stored(need, place, settings))
    return sum(one.budget_bytes for one in stored), sum((one.traffic for one in stored), Traffic())


# -- the budget ---------------------------------------------------------------------------------------------------------


def _required_bytes(
    needs: Sequence[Need], least: Mapping[str, Placement], settings: PlacementSettings
) -> dict[str, int]:
    """Return the bytes of host memory that nothing can spare, by purpose.

    Raises BudgetError if they are over the budget.
    """
    required = {"transfer buffers": settings.buffer_bytes, "one piece larger than the buffers": 0}
    pool_bytes = settings.buffer_bytes if settings.update_buffer_bytes is None else settings.update_buffer_bytes
    required |= dict.fromkeys(("parameters", "gradients", "optimizer state"), 0)
    for need in needs:
        stored = list(_stored(need, least[need.name], settings))
        for one in stored:
            kind = one.kind if one.kind in ("parameters", "gradients") else "optimizer state"
            required[kind] += one.budget_bytes
        # A buffer holds a chunk of all arrays of an update; the pool may have to make an extra one.
        piece = round_up(sum(one.layout.slot_bytes for one in stored if one.rest == "disk"), _PAGE_BYTES)
        if settings.budget_bytes is not None and piece > pool_bytes:
            largest = max(piece, required["one piece larger than the buffers"])
            required["one piece larger than the buffers"] = largest
    total = sum(required.values())
    if settings.budget_bytes is not None and total > settings.budget_bytes:
        raise over_budget(required, settings.budget_bytes, settings)
    return required


def _check_settings(settings: PlacementSettings) -> None:
    if not 0 <= settings.ratio <= 1:
        raise ConfigError(f"offload_optimizer.ratio: expected a share from 0 to 1, got {settings.ratio}")
    for name in ("max_in_cpu_numel", "budget_bytes", "buffer_bytes"):
        value = getattr(settings, name)
        if value is not None and value < 0:
            raise ConfigError(f"{name}: expected 0 or more, got {value}")
    if settings.accumulation_steps < 1:
        raise ConfigError(f"accumulation_steps: expected 1 or more, got {settings.accumulation_steps}")
