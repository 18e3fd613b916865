"""Gathering, keeping and prefetching of units, as directed by the hooks.

[Note: values for a caller]
`gather` materializes parameters for code outside the modules (`zstore.gather`), until `ungather`. The values are in
a separate buffer, kept alive by any view of them; units treat them as already gathered. Earlier graphs saved the
parameter's own buffer, which is filled for a backward that runs in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn

from zstore.errors import UsageError
from zstore.ranks.world import World
from zstore.store import Store

from ..config.config import Config
from ..params.record import ParameterRecord, Residency
from ..params.sharding import Unit
from ..plan.plan import parameter_pool_bytes
from ..plan.schedule import PrefetchLimits, Recorder, Schedule, Use, make_schedule
from ..runtime.device import Transfers, labelled
from .collectives import Exchanges
from .fetch import Fetch, Fetcher

Fill = Callable[[Sequence[ParameterRecord]], None]
"""Fills the allocated `full` of the records with the values of all ranks."""


@dataclass(frozen=True, kw_only=True)
class UnitStatistics:
    """Counters of gathers since the start."""

    uses: int = 0
    """How many times a unit was needed."""
    gathered_ahead: int = 0
    """How many of these found their gather already started."""
    kept: int = 0
    """How many needed no gather, since the unit was still gathered."""
    on_demand: int = 0
    """How many started their gather on demand."""
    dropped: int = 0
    """Prefetched units that were not used: the order changed, or the iteration ended."""
    orders: int = 0
    """Execution orders recorded."""
    overlapped: int = 0
    """Gathers from other ranks that overlapped with the computation."""
    live_peak_numel: int = 0
    """Peak number of gathered parameter elements."""
    read_bytes: int = 0
    """Bytes of this rank's rows read from host memory or disk."""


class UnitState(Enum):
    """State of a unit's gathered values. Parameters are materialized only during use; other reads are reported."""

    RELEASED = "released"
    """Not gathered, except for parameters shared with another unit."""
    PREFETCHED = "prefetched"
    """A gather for its next use has been started, and may be complete."""
    IN_USE = "in use"
    """Between `unshard` and `reshard`."""
    IN_USE_AND_PREFETCHED = "in use and prefetched"
    """In use, and prefetched for its next use, so it is not released in between."""
    KEPT = "kept"
    """Not in use, and gathered until its next use."""


_COUNTED = {UnitState.PREFETCHED: "gathered_ahead", UnitState.KEPT: "kept", UnitState.RELEASED: "on_demand"}
"""Counter to increment for a use, by the unit's previous state."""


class StrayRead(Enum):
    """Whether a parameter of a unit was read while the unit was released. See [Note: stray reads]."""

    NONE = "none"
    IN_FORWARD = "in forward"
    """In the current forward, at whose end the unit is released."""
    FOR_BACKWARD = "for backward"
    """In a forward whose backward is pending, or in a backward: the whole backward needs the unit."""
    AFTER_BACKWARD = "after backward"
    """As FOR_BACKWARD, but the backward is over: a second one needs the unit, the next training forward does not."""


@dataclass(eq=False)
class ShardedUnit:
    """A unit, the state of its gathered values, and what the hooks know about its use."""

    unit: Unit
    number: int
    state: UnitState = UnitState.RELEASED
    fetch: Fetch | None = None
    """The pending gather for its next use."""
    holder: nn.Module | None = None
    """Module whose forward hook releases it; None: a different hook does."""
    called_within: set[ShardedUnit] = field(default_factory=set)
    """Units in whose forwards its module was called."""
    due: set[ParameterRecord] | None = None
    """In a backward: its parameters whose gradients have not arrived."""
    stray_read: StrayRead = StrayRead.NONE

    def __post_init__(self) -> None:
        self.records = tuple(record for record in self.unit.parameters if record.residency is not Residency.RESIDENT)
        """Its sharded parameters."""
        self.inner = frozenset(inner for module in self.unit.modules for inner in module.modules())
        """The modules of its subtrees."""

    @property
    def numel(self) -> int:
        """Elements of its sharded parameters."""
        return sum(record.numel for record in self.records)

    @property
    def is_in_use(self) -> bool:
        """Whether its parameters are materialized."""
        return self.state in (UnitState.IN_USE, UnitState.IN_USE_AND_PREFETCHED)

    @property
    def is_stray(self) -> bool:
        """Whether it is needed for an entire backward."""
        return self.stray_read in (StrayRead.FOR_BACKWARD, StrayRead.AFTER_BACKWARD)


@dataclass(eq=False)
class GatheredValues:
    """The gathered values of a parameter, which its `units` and callers use."""

    units: list[ShardedUnit] = field(default_factory=list)
    callers: int = 0
    """Number of callers that use them. See [Note: values for a caller]."""
    own_memory: torch.Tensor | None = field(default=None, repr=False)
    """The parameter's own buffer, while a caller's buffer has the values."""
    is_gathered: bool = False
    fetch: Fetch | None = None
    """The pending gather that fills them."""
    stuck: Fetch | None = None
    """A gather that may never complete: the buffer that it writes to must not be freed."""


class ShardedUnits:
    """Manages the gathered values of all units; initially no unit is gathered."""

    def __init__(
        self,
        units: Sequence[Unit],
        config: Config,
        store: Store,
        transfers: Transfers,
        *,
        world: World,
        exchanges: Exchanges,
    ) -> None:
        pool = None
        if any(record.stored_array is not None for unit in units for record in unit.owned):
            pool = store.make_pool(parameter_pool_bytes(config, store.options))
        self.fetcher = Fetcher(world, store, pool, int(config.zero.allgather_bucket_size), exchanges, transfers)
        self._world = world
        self._limits = PrefetchLimits(
            prefetch_numel=int(config.zero.stage3_prefetch_bucket_size),
            live_numel=config.zero.stage3_max_live_parameters,
            reuse_numel=config.zero.stage3_max_reuse_distance or 0,
        )
        self._overlap = config.zero.overlap_comm
        """Whether gathers run in the background."""
        self.all = tuple(ShardedUnit(unit, index) for index, unit in enumerate(units))
        """All units, in the order of the model."""
        self.in_use: list[ShardedUnit] = []
        """Units in use, in the order of their gathers."""
        self.values: dict[ParameterRecord, GatheredValues] = {}
        for unit in self.all:
            for record in unit.records:
                self.values.setdefault(record, GatheredValues()).units.append(unit)
        self._recorder = Recorder()
        self._schedules: dict[str, Schedule] = {}
        self._kind: str | None = None
        self._live_numel = self._live_peak_numel = 0
        self._counts: Counter[str] = Counter()
        """Counters by the names of `UnitStatistics`."""

    def begin(self, kind: str) -> bool:
        """Start an iteration in the recorded order of its `kind`; False if one is already running (all ranks)."""
        if self._kind is not None:
            return False
        self._kind = kind
        self._recorder.begin(self._schedules.get(kind, Schedule()))
        if self._recorder.on_schedule:
            self._read_slots(0)
            self._send_slot(0)
        return True

    def end(self, *, failed: bool = False) -> None:
        """End the iteration; agree on its order if it is new (all ranks, unless it `failed`)."""
        kind, self._kind = self._kind, None
        uses = self._recorder.end()
        self.release_idle()
        self._wait_for_reads()
        if failed:
            return
        self.fetcher.check_all()
        if kind is not None and uses:
            self._schedules[kind] = make_schedule(self._agreed(uses), [unit.numel for unit in self.all], self._limits)
            self._counts["orders"] += 1

    def _agreed(self, uses: Sequence[Use]) -> list[Use]:
        """Return rank 0's uses: ranks may end a use at different points. Raises UsageError if the order differs."""
        all_uses = self._world.all_gather_object([[use.unit, use.last_started] for use in uses])
        orders = [[unit for unit, _ in rank_uses] for rank_uses in all_uses]
        differing = next((rank for rank, order in enumerate(orders) if order != orders[0]), None)
        if differing is not None:
            raise UsageError(
                f"rank {differing} ran different modules from rank 0, or in a different order: every rank must run the same "
                "modules in the same order where parameters are sharded"
            )
        return [Use(unit, last) for unit, last in all_uses[0]]

    def invalidate(self, *, by_step: bool = False) -> None:
        """Release values that are about to change: all of them or, with `by_step`, those of trained parameters (all ranks)."""
        self.release_idle()
        self._wait_for_reads()
        replica = self.fetcher.replica
        if replica is not None and by_step:
            replica.expire()
        elif replica is not None:
            replica.free()

    def _wait_for_reads(self) -> None:
        """Wait until no fetch reads the store's memory; every fetch has already been finished or dropped."""
        last, self.fetcher.last_copy = self.fetcher.last_copy, None
        if last is not None:
            last.wait()

    def release_idle(self) -> None:
        """Release units that are kept or prefetched."""
        for unit in self.all:
            if unit.fetch is not None:
                self._drop(unit)
                self._counts["dropped"] += 1
            elif unit.state is UnitState.KEPT:
                unit.state = UnitState.RELEASED
                self._release_unused(unit.records)

    def unshard(self, unit: ShardedUnit) -> None:
        """Gather the unit for a use (all ranks, in the same order)."""
        self._world.watch.activity.unit = unit.unit.name
        with labelled("unshard", unit.unit.name):
            use = self._recorder.begin_use(unit.number)
            on_schedule = self._recorder.on_schedule
            previous = unit.state
            if previous is UnitState.RELEASED:
                self._start(unit, ahead=False)
                self._send(unit)
            if on_schedule:
                self._read_slots(use + 1)
            self._complete(unit)
            unit.state, unit.fetch = UnitState.IN_USE, None
            self.in_use.append(unit)
            for record in unit.records:
                if record.residency is Residency.RELEASED:
                    record.use_full()
            self._counts["uses"] += 1
            self._counts[_COUNTED[previous]] += 1
            if on_schedule:
                self._send_slot(use + 1)
            else:
                self.release_idle()

    def reshard(self, unit: ShardedUnit) -> None:
        """End a use of the unit: release it, or keep it if it is used again soon."""
        with labelled("reshard", unit.unit.name):
            self.in_use.remove(unit)
            unit.holder = unit.due = None
            keeps = self._recorder.end_use(unit.number)
            if unit.state is UnitState.IN_USE_AND_PREFETCHED:
                unit.state = UnitState.PREFETCHED
            else:
                unit.state = UnitState.KEPT if keeps else UnitState.RELEASED
            self._release_unused(unit.records)

    def _release_unused(self, records: Iterable[ParameterRecord]) -> None:
        """Hide values that no unit in use and no caller needs, and free those that no unit keeps."""
        for record in records:
            values = self.values[record]
            states = [unit.state for unit in values.units]
            if (
                values.callers
                or values.stuck
                or UnitState.IN_USE in states
                or UnitState.IN_USE_AND_PREFETCHED in states
            ):
                continue
            if UnitState.PREFETCHED in states or UnitState.KEPT in states:
                if values.is_gathered:
                    record.use_placeholder()
            else:
                record.release()
                values.is_gathered, values.fetch = False, None
                self._live_numel -= record.numel

    def has_room_for_stray(self, unit: ShardedUnit) -> bool:
        """Return whether a unit may stay gathered until the backward ends, with room for any other unit."""
        strays = sum(u.numel for u in self.all if u.stray_read is not StrayRead.NONE and u is not unit)
        return strays + unit.numel + max(u.numel for u in self.all) <= self._limits.live_numel

    def gather(self, records: Sequence[ParameterRecord], fill: Fill) -> None:
        """Materialize parameters until `ungather`; `fill` gathers the released ones (all ranks)."""
        self.release_idle()
        sharded = [record for record in records if record.residency is not Residency.RESIDENT]
        missing = [record for record in sharded if record.residency is Residency.RELEASED]
        own_memory = {record: record.full for record in missing}
        try:
            for record in missing:
                record.full = record.new_full()
            fill(missing)
        except BaseException:
            for record in missing:
                record.full = own_memory[record]
                record.release()
            raise
        for record in missing:
            record.use_full()
            self.values[record].own_memory, self.values[record].is_gathered = own_memory[record], True
            self._live_numel += record.numel
        for record in sharded:
            self.values[record].callers += 1

    def ungather(self, records: Sequence[ParameterRecord]) -> None:
        """End a `gather` of the same parameters."""
        for record in records:
            if record.residency is Residency.RESIDENT:
                continue
            values = self.values[record]
            values.callers -= 1
            if values.callers == 0 and values.own_memory is not None:
                gathered, record.full, values.own_memory = record.full, values.own_memory, None
                if values.stuck is None and all(unit.state is UnitState.RELEASED for unit in values.units):
                    record.release()
                else:
                    if not record.is_in_place:
                        record.allocate_full()
                        record.full.copy_(gathered)
                    record.use_full()
            self._release_unused([record])

    def fill_own_memory(self, *, fill: bool = True) -> None:
        """Fill the original buffers of parameters that callers gathered, for graphs that saved them; `False` frees them."""
        for record, values in self.values.items():
            if values.own_memory is not None and not record.is_in_place:
                memory = values.own_memory
                memory.untyped_storage().resize_(memory.numel() * memory.element_size() if fill else 0)
                if fill:
                    memory.copy_(record.full)

    def _slot(self, slot: int) -> list[ShardedUnit]:
        schedule = self._schedules[self._kind or ""]
        if slot >= len(schedule.start):
            return []
        return [self.all[schedule.units[use]] for use in schedule.start[slot]]

    def _read_slots(self, slot: int) -> None:
        """Start reading the rows of this slot's gathers; on several ranks also the next slot's, for `_send_slot`."""
        slots = [slot] if self._world.world_size == 1 else [slot, slot + 1]
        for unit in [unit for index in slots for unit in self._slot(index)]:
            if unit.fetch is None and unit.state is not UnitState.KEPT:
                self._start(unit, ahead=True)

    def _send_slot(self, slot: int) -> None:
        for unit in self._slot(slot):
            if unit.fetch is not None:
                self._send(unit)
                if self._overlap:
                    self._counts["overlapped"] += self._world.world_size > 1
                else:
                    self._complete(unit)

    def _start(self, unit: ShardedUnit, *, ahead: bool) -> None:
        values = self.values
        missing = [r for r in unit.records if not values[r].is_gathered and values[r].fetch is None]
        # Before the buffers are allocated: a failed start leaves a unit that can be dropped.
        unit.state = UnitState.IN_USE_AND_PREFETCHED if unit.is_in_use else UnitState.PREFETCHED
        unit.fetch = Fetch(unit.unit.name, unit.number, missing)
        self._live_numel += sum(record.numel for record in missing)
        self._live_peak_numel = max(self._live_peak_numel, self._live_numel)
        for record in missing:
            values[record].fetch = unit.fetch
        self.fetcher.read(unit.fetch, ahead=ahead)

    def _send(self, unit: ShardedUnit) -> None:
        if unit.fetch is not None and unit.fetch.records:
            self.fetcher.send(unit.fetch, expected=self._recorder.on_schedule)

    def _complete(self, unit: ShardedUnit) -> None:
        """Wait until the unit's parameters are gathered."""
        for record in unit.records:
            fetch = self.values[record].fetch
            if fetch is None:
                continue
            self.fetcher.finish(fetch, expected=self._recorder.on_schedule)
            for filled in fetch.records:
                self.values[filled].fetch, self.values[filled].is_gathered = None, True

    def _drop(self, unit: ShardedUnit) -> None:
        fetch, unit.fetch = unit.fetch, None
        unit.state = UnitState.IN_USE if unit.is_in_use else UnitState.RELEASED
        if fetch is not None and not self.fetcher.drop(fetch):
            for record in fetch.records:
                self.values[record].stuck = fetch
        self._release_unused(unit.records)

    def statistics(self) -> UnitStatistics:
        """Return counters since the start."""
        peak = self._live_peak_numel
        return UnitStatistics(**self._counts, live_peak_numel=peak, read_bytes=self.fetcher.read_bytes)

    def close(self) -> None:
        """Drop all gathers and stop the thread."""
        self.release_idle()
        self._wait_for_reads()
        self.fetcher.close()
