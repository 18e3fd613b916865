"""The order in which units are used, and the schedule derived from it: units to prefetch, and units to keep. Pure.

[Note: the order]
A use begins when a forward or backward needs a unit that is not in use. The uses of one iteration (a forward and its
backward; without gradients, one forward of the model) are recorded with the point at which each ended. They determine the
schedule of the following iterations, which repeat them:

keep   a unit that is used again soon stays gathered in between, nearest next use first;
start  slot 0 is the start of the iteration, slot i + 1 the start of use i. A slot starts gathering later uses, in order:
       at least the next one, and more within the bucket.

Both respect the limit on live elements in the recorded uses. Nothing depends on time or on when a rank releases a unit, so
ranks with the same order start the same collectives in the same order. An iteration that deviates from the order runs
without prefetch and is recorded as the new order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

_MAX_USES = 100_000
"""An iteration with more uses is not planned: it is a series of forwards without a backward."""


@dataclass(frozen=True, kw_only=True)
class PrefetchLimits:
    """Limits on the memory spent to avoid waits, in elements of gathered parameters."""

    prefetch_numel: int = 50_000_000
    """Gathered ahead of use; at least one unit is, unless this is 0."""
    live_numel: int = 1_000_000_000
    """Gathered at the same time, including prefetched and kept units. A unit in use may exceed it."""
    reuse_numel: int = 0
    """A unit is kept if at most this many elements of other units are used before its next use."""


@dataclass(frozen=True)
class Use:
    """A unit in use."""

    unit: int
    last_started: int
    """Index of the last use that had started when this one ended, at least its own."""


@dataclass(frozen=True)
class Schedule:
    """The schedule of an iteration that repeats the recorded one. See [Note: the order]."""

    units: tuple[int, ...] = ()
    """The unit of each use."""
    start: tuple[tuple[int, ...], ...] = ((),)
    """Uses whose gather starts at each slot; there is one more slot than uses."""
    keep: tuple[bool, ...] = ()
    """Whether the unit of each use stays gathered until its next use."""


def make_schedule(uses: Sequence[Use], numel: Sequence[int], limits: PrefetchLimits) -> Schedule:
    """Return the schedule of iterations that repeat `uses`; `numel` has the elements of each unit."""
    live = [0] * len(uses)
    for index, use in enumerate(uses):
        _add_numel(live, index, use.last_started + 1, numel[use.unit])
    retained_until = _plan_keeping(uses, numel, limits, live)
    return Schedule(
        units=tuple(use.unit for use in uses),
        start=_plan_starts(uses, numel, limits, live, retained_until),
        keep=tuple(index in retained_until for index in range(len(uses))),
    )


def _add_numel(live: list[int], first: int, stop: int, numel: int) -> None:
    for index in range(first, min(stop, len(live))):
        live[index] += numel


def _plan_keeping(uses: Sequence[Use], numel: Sequence[int], limits: PrefetchLimits, live: list[int]) -> dict[int, int]:
    """Return use -> next use for units that are kept between the two; adds their elements to `live`."""
    numel_before = list(accumulate((numel[use.unit] for use in uses), initial=0))
    last_use_of: dict[int, int] = {}
    candidates: list[tuple[int, int, int]] = []
    for next_use, use in enumerate(uses):
        previous = last_use_of.get(use.unit)
        last_use_of[use.unit] = next_use
        if previous is not None:
            distance = numel_before[next_use] - numel_before[min(uses[previous].last_started + 1, next_use)]
            if distance <= limits.reuse_numel:
                candidates.append((distance, previous, next_use))
    # Prefetched units take priority, since they hide the wait for every unit.
    room = limits.live_numel - min(limits.prefetch_numel, max(numel, default=0))
    retained_until: dict[int, int] = {}
    for _, previous, next_use in sorted(candidates):
        first, size = uses[previous].last_started + 1, numel[uses[previous].unit]
        if first >= next_use or max(live[first:next_use]) + size <= room:
            retained_until[previous] = next_use
            _add_numel(live, first, next_use, size)
    return retained_until


def _plan_starts(
    uses: Sequence[Use], numel: Sequence[int], limits: PrefetchLimits, live: list[int], retained_until: dict[int, int]
) -> tuple[tuple[int, ...], ...]:
    """Return the uses whose gather starts at each slot; adds their elements to `live`."""
    retained = set(retained_until.values())
    to_gather = deque(index for index in range(len(uses)) if index not in retained)
    end_slot_of: dict[int, int] = {}
    free_at: list[int] = []  # the first slot after the previous use of the same unit
    for use in uses:
        free_at.append(end_slot_of.get(use.unit, 0))
        end_slot_of[use.unit] = use.last_started + 2
    prefetched: deque[int] = deque()
    start: list[tuple[int, ...]] = []
    for slot in range(len(uses) + 1):
        for queue in (prefetched, to_gather):  # a use that starts before its gather is gathered on demand
            while queue and queue[0] < slot:
                queue.popleft()
        started: list[int] = []
        first = max(slot - 1, 0)
        prefetched_numel = sum(numel[uses[index].unit] for index in prefetched)
        while to_gather and limits.prefetch_numel > 0:
            use_index = to_gather[0]
            size = numel[uses[use_index].unit]
            too_many = prefetched_numel > 0 and prefetched_numel + size > limits.prefetch_numel
            too_large = any(n + size > limits.live_numel for n in live[first:use_index])
            if too_many or too_large or slot < free_at[use_index]:
                break
            _add_numel(live, first, use_index, size)
            started.append(to_gather.popleft())
            prefetched_numel += size
        prefetched.extend(started)
        start.append(tuple(started))
    return tuple(start)


class Recorder:
    """Compares an iteration with the schedule, and records it."""

    def __init__(self) -> None:
        self._schedule = Schedule()
        self._units: list[int] = []
        self._last_started: list[int] = []
        self._active: dict[int, int] = {}
        self.on_schedule = False
        """Whether the current iteration has matched the schedule until now."""

    def begin(self, schedule: Schedule) -> None:
        """Start an iteration."""
        self._schedule = schedule
        self._units, self._last_started, self._active = [], [], {}
        self.on_schedule = bool(schedule.units)

    def begin_use(self, unit: int) -> int:
        """Record the start of a use of `unit`; return its index. `on_schedule` says whether it was expected."""
        index = len(self._units)
        self._units.append(unit)
        self._last_started.append(index)
        self._active[unit] = index
        expected = self._schedule.units
        self.on_schedule = self.on_schedule and index < len(expected) and expected[index] == unit
        return index

    def end_use(self, unit: int) -> bool:
        """Record the end of the use of `unit`; return whether to keep the unit for its next use."""
        index = self._active.pop(unit, None)
        if index is None:
            return False
        self._last_started[index] = len(self._units) - 1
        return self.on_schedule and self._schedule.keep[index]

    def end(self) -> tuple[Use, ...] | None:
        """End the iteration; return its uses if they differ from the schedule and are not too many to plan."""
        for index in self._active.values():
            self._last_started[index] = len(self._units) - 1
        if tuple(self._units) == self._schedule.units or len(self._units) > _MAX_USES:
            return None
        return tuple(map(Use, self._units, self._last_started))
