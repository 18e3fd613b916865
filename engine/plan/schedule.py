"""The order in which units are used, and the schedule from it: units to prefetch, and units to keep. Pure.

[Note: the order]
A use is a unit that a forward or a backward needs while it is not in use. The uses of one iteration (a forward and its
backward; without gradients one forward of the model) are recorded with the point at which each ended, and give a schedule
for the next iterations, which repeat them:

keep   a unit that is used again soon keeps its memory in between, nearest first;
start  slot 0 is the start of the iteration, slot i + 1 the start of use i. A slot starts to gather later uses, in their
       order: at least the next one, and more within the bucket.

Both stay within the limit of live elements in the recorded uses. Nothing depends on time or on when a rank releases a unit, so
ranks with the same order start the same collectives in the same order. An iteration that leaves the order is recorded,
without prefetch, and gives the new one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

_MAX_USES = 100_000
"""An iteration with more is not planned: it is a series of forwards without a backward."""


@dataclass(frozen=True, kw_only=True)
class PrefetchLimits:
    """Limits of the memory spent to avoid waits, in elements of gathered parameters."""

    prefetch_numel: int = 50_000_000
    """Gathered ahead of use: at least one unit; 0: none."""
    live_numel: int = 1_000_000_000
    """Gathered at one time, with prefetched and kept units. A unit in use may exceed it."""
    reuse_numel: int = 0
    """A unit is kept if at most this many elements of other units are used before its next use."""


@dataclass(frozen=True)
class Use:
    """A unit in use."""

    unit: int
    last: int
    """Number of the last use that had begun when this one ended, at least its own."""


@dataclass(frozen=True)
class Schedule:
    """The schedule of an iteration that repeats the recorded one. See [Note: the order]."""

    units: tuple[int, ...] = ()
    """The unit of each use."""
    start: tuple[tuple[int, ...], ...] = ((),)
    """Uses whose gather starts at each slot; one slot more than uses."""
    keep: tuple[bool, ...] = ()
    """Whether the unit of each use stays gathered until its next use."""


def make_schedule(uses: Sequence[Use], numel: Sequence[int], limits: PrefetchLimits) -> Schedule:
    """Return the schedule of iterations that repeat `uses`; `numel` are the elements of each unit."""
    live = [0] * len(uses)
    for number, use in enumerate(uses):
        _add(live, number, use.last + 1, numel[use.unit])
    kept = _plan_keeping(uses, numel, limits, live)
    return Schedule(
        units=tuple(use.unit for use in uses),
        start=_plan_starts(uses, numel, limits, live, kept),
        keep=tuple(number in kept for number in range(len(uses))),
    )


def _add(live: list[int], first: int, stop: int, numel: int) -> None:
    for number in range(first, min(stop, len(live))):
        live[number] += numel


def _plan_keeping(uses: Sequence[Use], numel: Sequence[int], limits: PrefetchLimits, live: list[int]) -> dict[int, int]:
    """Return use -> next use of the same unit, if it is kept between them; its elements are added to `live`."""
    before = list(accumulate((numel[use.unit] for use in uses), initial=0))
    seen: dict[int, int] = {}
    candidates: list[tuple[int, int, int]] = []
    for again, use in enumerate(uses):
        number = seen.get(use.unit)
        seen[use.unit] = again
        if number is not None:
            distance = before[again] - before[min(uses[number].last + 1, again)]
            if distance <= limits.reuse_numel:
                candidates.append((distance, number, again))
    # Prefetched units have priority: they hide the wait for every unit.
    room = limits.live_numel - min(limits.prefetch_numel, max(numel, default=0))
    kept: dict[int, int] = {}
    for _, number, again in sorted(candidates):
        first, size = uses[number].last + 1, numel[uses[number].unit]
        if first >= again or max(live[first:again]) + size <= room:
            kept[number] = again
            _add(live, first, again, size)
    return kept


def _plan_starts(
    uses: Sequence[Use], numel: Sequence[int], limits: PrefetchLimits, live: list[int], kept: dict[int, int]
) -> tuple[tuple[int, ...], ...]:
    """Return the uses whose gather starts at each slot; their elements are added to `live`."""
    gathered = set(kept.values())
    to_gather = deque(number for number in range(len(uses)) if number not in gathered)
    ended: dict[int, int] = {}
    free: list[int] = []  # the first slot at which the previous use of the same unit has ended
    for use in uses:
        free.append(ended.get(use.unit, 0))
        ended[use.unit] = use.last + 2
    ahead: deque[int] = deque()
    start: list[tuple[int, ...]] = []
    for slot in range(len(uses) + 1):
        for waiting in (ahead, to_gather):  # a use that begins before its gather is gathered on demand
            while waiting and waiting[0] < slot:
                waiting.popleft()
        begun: list[int] = []
        first = max(slot - 1, 0)
        ahead_numel = sum(numel[uses[number].unit] for number in ahead)
        while to_gather and limits.prefetch_numel > 0:
            number = to_gather[0]
            size = numel[uses[number].unit]
            too_many = ahead_numel > 0 and ahead_numel + size > limits.prefetch_numel
            if too_many or slot < free[number] or any(value + size > limits.live_numel for value in live[first:number]):
                break
            _add(live, first, number, size)
            begun.append(to_gather.popleft())
            ahead_numel += size
        ahead.extend(begun)
        start.append(tuple(begun))
    return tuple(start)


class Recorder:
    """Compares an iteration with its schedule, and records it."""

    def __init__(self) -> None:
        self._schedule = Schedule()
        self._units: list[int] = []
        self._last: list[int] = []
        self._open: dict[int, int] = {}
        self.follows = False
        """Whether the iteration has repeated the recorded one so far."""

    def begin(self, schedule: Schedule) -> None:
        """Start an iteration."""
        self._schedule = schedule
        self._units, self._last, self._open = [], [], {}
        self.follows = bool(schedule.units)

    def begin_use(self, unit: int) -> int:
        """Record the start of a use of `unit`; return its number. `follows` tells whether it was expected."""
        number = len(self._units)
        self._units.append(unit)
        self._last.append(number)
        self._open[unit] = number
        known = self._schedule.units
        self.follows = self.follows and number < len(known) and known[number] == unit
        return number

    def end_use(self, unit: int) -> bool:
        """Record the end of the use of `unit`; return whether to keep it for its next use."""
        number = self._open.pop(unit, None)
        if number is None:
            return False
        self._last[number] = len(self._units) - 1
        return self.follows and self._schedule.keep[number]

    def end(self) -> tuple[Use, ...] | None:
        """End the iteration; return its uses if they differ from the schedule, and are not too many to plan."""
        for number in self._open.values():
            self._last[number] = len(self._units) - 1
        if tuple(self._units) == self._schedule.units or len(self._units) > _MAX_USES:
            return None
        return tuple(map(Use, self._units, self._last))
