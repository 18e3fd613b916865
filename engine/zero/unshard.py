"""Which units are gathered, kept and prefetched. The hooks say when a unit is needed; this decides how it gets there.

[Note: held by a caller]
`hold` gives parameters their values for a caller outside of the modules (`zstore.gather`), until `let_go`. They are in
memory of their own meanwhile: a view of them, in a graph or the caller's, keeps that memory. To units they
are there. The parameter's own memory is what earlier graphs saved; it is filled for a backward that runs meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from zstore.errors import UsageError
from zstore.ranks.world import World
from zstore.store import TensorStore

from ..config.config import Config
from ..device import Transfers, labelled
from ..params.record import ParameterRecord, Residency
from ..params.units import Unit
from ..plan.needs import parameter_pool_bytes, prefetch_limits
from ..plan.schedule import NO_SCHEDULE, PrefetchLimits, Recorder, Schedule, Use, make_schedule
from .exchanges import Exchanges
from .fetch import Fetch, Fetcher, Ready, RowReader

Fill = Callable[[Sequence[ParameterRecord]], None]
"""Sets `full` of the records, which has room, to the values of all ranks."""


@dataclass(frozen=True, kw_only=True)
class UnitStatistics:
    """Counters of gathers since the start."""

    taken: int = 0
    """Times that a unit was needed."""
    gathered_ahead: int = 0
    """Of these, with a gather that had begun before."""
    kept: int = 0
    """Of these, without a gather, since the unit was still there."""
    on_demand: int = 0
    """Of these, with a gather that began then."""
    dropped: int = 0
    """Units gathered ahead and not used: the order changed, or the iteration ended."""
    orders: int = 0
    """Orders recorded."""
    overlapped: int = 0
    """Gathers from other ranks that overlapped with the computation."""
    live_peak_numel: int = 0
    """Most elements of parameters gathered at one time."""
    read_bytes: int = 0
    """Bytes of this rank's rows read from host memory or disk."""


class ShardedUnits:
    """The gathered memory of all units. If `overlap` is false every gather is waited for at once.

    A unit is in use between `unshard` and `reshard`. A unit that is kept or prefetched has memory, but its parameters
    do not point there, so that a read of them is reported as if the unit were released.
    """

    def __init__(
        self, units: Sequence[Unit], world: World, fetcher: Fetcher, limits: PrefetchLimits, *, overlap: bool = True
    ) -> None:
        self.fetcher = fetcher
        self._world = world
        self._limits = limits
        self._overlap = overlap
        self._units = list(units)
        self._number = {unit: number for number, unit in enumerate(units)}
        self._sharded = {
            unit: [record for record in unit.parameters if record.residency is not Residency.RESIDENT] for unit in units
        }
        self._numel = [sum(record.numel for record in self._sharded[unit]) for unit in units]
        self._users: Counter[ParameterRecord] = Counter()
        """Units in use, by parameter."""
        self._holds: Counter[ParameterRecord] = Counter()
        """Units kept or prefetched, by parameter."""
        self._callers: Counter[ParameterRecord] = Counter()
        """Callers that hold a parameter, by parameter. See [Note: held by a caller]."""
        self._lent: dict[ParameterRecord, torch.Tensor] = {}
        """The own memory of parameters whose values are in a caller's."""
        self._there: set[ParameterRecord] = set()
        self._coming: dict[ParameterRecord, Fetch] = {}
        self._ahead: dict[Unit, Fetch] = {}
        self._kept: set[Unit] = set()
        self._stuck: list[Fetch] = []
        """Fetches that never end, with the memory that they write to."""
        self._recorder = Recorder()
        self._schedules: dict[str, Schedule] = {}
        self._kind: str | None = None
        self._live_numel = 0
        self._fetched = False
        """Whether rows were fetched since the last `_settle`."""
        self._statistics = UnitStatistics()

    # -- iterations -------------------------------------------------------------------------------------------------

    def begin(self, kind: str) -> bool:
        """Start an iteration, whose order is that of others of its `kind`; false if one is under way (all ranks)."""
        if self._kind is not None:
            return False
        self._kind = kind
        self._recorder.begin(self._schedules.get(kind, NO_SCHEDULE))
        if self._recorder.follows:
            self._read_slots(0)
            self._send_slot(0)
        return True

    def end(self) -> None:
        """End the iteration; if it had another order than the ones before, agree on the new one (all ranks)."""
        kind, self._kind = self._kind, None
        uses = self._recorder.end()
        self.forget()
        self._settle()
        self.fetcher.check_arrived()
        if kind is not None and uses:
            self._schedules[kind] = make_schedule(self._agreed(uses), self._numel, self._limits)
            self._count(orders=1)

    def abandon(self) -> None:
        """End an iteration that failed."""
        self._kind = None
        self._recorder.end()
        self.forget()
        self._settle()

    def _settle(self) -> None:
        """Return when memory of the store may be written: nothing reads it any more."""
        if self._fetched:
            self._fetched = False
            self.fetcher.settle()

    def _agreed(self, uses: Sequence[Use]) -> list[Use]:
        """Return rank 0's uses: when they ended may differ. Raises UsageError if the order differs."""
        everyone = self._world.all_gather_object([[use.unit, use.last] for use in uses])
        orders = [[unit for unit, _ in theirs] for theirs in everyone]
        odd = next((rank for rank, order in enumerate(orders) if order != orders[0]), None)
        if odd is not None:
            raise UsageError(
                f"rank {odd} ran different modules from rank 0, or in a different order: every rank must run the same modules "
                "in the same order where parameters are sharded"
            )
        return [Use(unit, last) for unit, last in everyone[0]]

    def values_change(self, *, by_step: bool = False) -> None:
        """Release the values that are about to change: by a step those of trained parameters, else all (all ranks)."""
        self.forget()
        self._settle()
        second = self.fetcher.second_copy
        if second is not None and by_step:
            second.expire()
        elif second is not None:
            second.free()

    def forget(self) -> None:
        """Release the units kept or prefetched: the iteration is over, or values are about to change."""
        for unit in list(self._ahead):
            self._drop(unit)
            self._count(dropped=1)
        for unit in list(self._kept):
            self._kept.discard(unit)
            self._let_go(self._sharded[unit], self._holds)

    # -- units ------------------------------------------------------------------------------------------------------

    def unshard(self, unit: Unit) -> None:
        """Gather the unit's parameters, which then are in use (all ranks, in one order)."""
        self._world.activity.unit = unit.name
        with labelled("unshard", unit.name):
            number = self._recorder.begin_use(self._number[unit])
            follows = self._recorder.follows
            ahead, kept = unit in self._ahead, unit in self._kept
            if not ahead and not kept:
                self._bring(unit, ahead=False)
                self._send(unit)
            if follows:
                self._read_slots(number + 1)
            self._complete(unit)
            self._ahead.pop(unit, None)
            self._kept.discard(unit)
            records = self._sharded[unit]
            self._users.update(records)
            self._holds.subtract(records)
            for record in records:
                if record.residency is Residency.RELEASED:
                    record.point_at_full()
            self._count(taken=1, gathered_ahead=int(ahead), kept=int(kept), on_demand=int(not ahead and not kept))
            if follows:
                self._send_slot(number + 1)
            else:
                self.forget()

    def reshard(self, unit: Unit) -> None:
        """End the use of the unit: release it, or keep it if it is used again soon."""
        with labelled("reshard", unit.name):
            records = self._sharded[unit]
            if self._recorder.end_use(self._number[unit]):
                self._kept.add(unit)
                self._holds.update(records)
            self._let_go(records, self._users)

    def _let_go(self, records: Sequence[ParameterRecord], owners: Counter[ParameterRecord]) -> None:
        for record in records:
            owners[record] -= 1
            if self._users[record] > 0:
                continue
            if self._holds[record] > 0:
                if record in self._there:
                    record.point_at_placeholder()
            else:
                self._release(record)

    def _release(self, record: ParameterRecord) -> None:
        record.release()
        self._there.discard(record)
        self._coming.pop(record, None)
        self._live_numel -= record.numel

    # -- callers ----------------------------------------------------------------------------------------------------

    def hold(self, records: Sequence[ParameterRecord], fill: Fill) -> None:
        """Let parameters have all their values until `let_go`; `fill` fetches those that are released (all ranks)."""
        self.forget()
        sharded = [record for record in records if record.residency is not Residency.RESIDENT]
        missing = [record for record in sharded if record.residency is Residency.RELEASED]
        own = {record: record.lend() for record in missing}
        try:
            fill(missing)
        except BaseException:
            for record in missing:
                record.take_back(own[record], keep=False)
            raise
        self._lent |= own
        for record in missing:
            record.point_at_full()
            self._there.add(record)
            self._live_numel += record.numel
        self._callers.update(sharded)
        self._users.update(sharded)

    def let_go(self, records: Sequence[ParameterRecord]) -> None:
        """End a `hold` of the same parameters."""
        sharded = [record for record in records if record.residency is not Residency.RESIDENT]
        self._callers.subtract(sharded)
        for record in sharded:
            if self._callers[record] == 0 and record in self._lent:
                needed = self._users[record] > 1 or self._holds[record] > 0
                record.take_back(self._lent.pop(record), keep=needed)
        self._let_go(sharded, self._users)

    def fill_lent(self) -> None:
        """Give the own memory of parameters that callers hold their values, for graphs that saved it."""
        for record, own in self._lent.items():
            if not record.is_in_place:
                own.untyped_storage().resize_(own.numel() * own.element_size())
                own.copy_(record.full)

    def empty_lent(self) -> None:
        """Free the memory that `fill_lent` filled."""
        for record, own in self._lent.items():
            if not record.is_in_place:
                own.untyped_storage().resize_(0)

    # -- fetches ----------------------------------------------------------------------------------------------------

    def _slot(self, slot: int) -> list[Unit]:
        schedule = self._schedules[self._kind or ""]
        if slot >= len(schedule.start):
            return []
        return [self._units[schedule.units[number]] for number in schedule.start[slot]]

    def _read_slots(self, slot: int) -> None:
        """Start to read the rows of this slot's gathers; with more ranks also those of the next, which it sends."""
        slots = [slot] if self._world.world_size == 1 else [slot, slot + 1]
        for unit in [unit for each in slots for unit in self._slot(each)]:
            if unit not in self._ahead and unit not in self._kept:
                self._bring(unit, ahead=True)

    def _send_slot(self, slot: int) -> None:
        for unit in self._slot(slot):
            if unit in self._ahead:
                self._send(unit)
                if self._overlap:
                    self._count(overlapped=int(self._world.world_size > 1))
                else:
                    self._complete(unit)

    def _bring(self, unit: Unit, *, ahead: bool) -> None:
        self._fetched = True
        records = self._sharded[unit]
        missing = [record for record in records if record not in self._there and record not in self._coming]
        # Before the memory is taken: a failed start leaves a unit that can be dropped.
        fetch = Fetch(unit.name, self._number[unit], [])
        self._ahead[unit] = fetch
        self._holds.update(records)
        self._live_numel += sum(record.numel for record in missing)
        peak = max(self._statistics.live_peak_numel, self._live_numel)
        self._statistics = replace(self._statistics, live_peak_numel=peak)
        for record in missing:
            self._coming[record] = fetch
        self._ahead[unit] = fetch = self.fetcher.read(unit.name, self._number[unit], missing, ahead=ahead)
        for record in missing:
            self._coming[record] = fetch

    def _send(self, unit: Unit) -> None:
        fetch = self._ahead[unit]
        if fetch.records:
            self.fetcher.send(fetch, expected=self._recorder.follows)

    def _complete(self, unit: Unit) -> None:
        """Wait until the unit's parameters have their values."""
        for record in self._sharded[unit]:
            fetch = self._coming.get(record)
            if fetch is None:
                continue
            self.fetcher.finish(fetch, expected=self._recorder.follows)
            for one in fetch.records:
                self._coming.pop(one, None)
                self._there.add(one)

    def _drop(self, unit: Unit) -> None:
        fetch = self._ahead.pop(unit)
        if not self.fetcher.drop(fetch):
            self._stuck.append(fetch)
            self._users.update(fetch.records)  # for good: nobody may have their memory
        self._let_go(self._sharded[unit], self._holds)

    def _count(self, **more: int) -> None:
        values = {name: getattr(self._statistics, name) + number for name, number in more.items()}
        self._statistics = replace(self._statistics, **values)

    def statistics(self) -> UnitStatistics:
        """Return counters since the start."""
        return replace(self._statistics, read_bytes=self.fetcher.read_bytes)

    def close(self) -> None:
        """Drop everything and end the thread."""
        self.forget()
        self.fetcher.close()

    def on_ready(self, ready: Ready) -> None:
        """Call `ready` before any rows are read."""
        self.fetcher.ready = ready


def make_sharded_units(
    units: Sequence[Unit],
    config: Config,
    store: TensorStore,
    transfers: Transfers,
    *,
    world: World,
    exchanges: Exchanges,
) -> ShardedUnits:
    """Return the sharded units of `units` as the config says; nothing is gathered."""
    reader = None
    if any(record.rest is not None for unit in units for record in unit.owned):
        reader = RowReader(store, store.make_pool(parameter_pool_bytes(config, store.options)), transfers)
    fetcher = Fetcher(reader, config.allgather_bucket_numel, exchanges)
    return ShardedUnits(units, world, fetcher, prefetch_limits(config), overlap=config.zero.overlap_comm)
