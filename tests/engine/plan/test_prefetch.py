"""The planner of prefetch, held against a simulation of what an iteration does with its schedule."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from zstore.engine.plan.schedule import PrefetchLimits, Recorder, Schedule, Use, make_schedule


@dataclass(frozen=True)
class Trace:
    uses: list[Use]
    numel: list[int]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Uses in which no unit is needed while it is in use, each of which ends after none to three others began."""
    numel = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    uses: list[Use] = []
    for number in range(draw(st.integers(0, 14))):
        free = [u for u in range(len(numel)) if all(use.unit != u or use.last < number for use in uses)]
        if not free:
            break
        uses.append(Use(draw(st.sampled_from(free)), number + draw(st.integers(0, 3))))
    last = len(uses) - 1
    return Trace([Use(use.unit, min(use.last, last)) for use in uses], numel)


limits_of = st.builds(
    PrefetchLimits, prefetch_numel=st.integers(0, 20), live_numel=st.integers(0, 40), reuse_numel=st.integers(0, 20)
)


def simulate(trace: Trace, schedule: Schedule, limits: PrefetchLimits) -> list[int]:
    """Do what the schedule says; return the elements gathered while each use is in use."""
    uses, numel = trace.uses, trace.numel
    ahead: dict[int, int] = {}  # use -> unit
    in_use: dict[int, int] = {}
    kept: set[int] = set()
    live: list[int] = []

    def start(slot: int) -> None:
        for use in schedule.start[slot]:
            unit = uses[use].unit
            assert use >= slot
            assert unit not in kept
            assert unit not in in_use.values()
            assert unit not in ahead.values()
            waiting = sum(numel[other] for other in ahead.values())
            assert limits.prefetch_numel > 0
            assert not waiting or waiting + numel[unit] <= limits.prefetch_numel
            ahead[use] = unit

    start(0)
    for number, use in enumerate(uses):
        for done in [other for other in in_use if uses[other].last < number]:
            if schedule.keep[done]:
                kept.add(in_use[done])
            del in_use[done]
        ahead.pop(number, None)
        kept.discard(use.unit)
        in_use[number] = use.unit
        start(number + 1)
        live.append(sum(numel[u] for u in [*in_use.values(), *ahead.values(), *kept]))
    assert not ahead
    return live


def in_use_alone(trace: Trace) -> list[int]:
    return [
        sum(trace.numel[use.unit] for first, use in enumerate(trace.uses) if first <= number <= use.last)
        for number in range(len(trace.uses))
    ]


@given(traces(), limits_of)
def test_a_schedule_stays_within_its_limits(trace: Trace, limits: PrefetchLimits) -> None:
    schedule = make_schedule(trace.uses, trace.numel, limits)
    live = simulate(trace, schedule, limits)
    for found, least in zip(live, in_use_alone(trace), strict=True):
        assert found <= max(limits.live_numel, least)
    for number, use in enumerate(trace.uses):
        if schedule.keep[number]:
            again = next(n for n in range(number + 1, len(trace.uses)) if trace.uses[n].unit == use.unit)
            assert sum(trace.numel[u.unit] for u in trace.uses[use.last + 1 : again]) <= limits.reuse_numel


def layers(count: int) -> list[Use]:
    """A forward and its backward: the last layer is used twice in a row."""
    order = [*range(count), *reversed(range(count))]
    return [Use(unit, number) for number, unit in enumerate(order)]


def test_a_model_of_layers() -> None:
    one_ahead = make_schedule(layers(3), [10, 10, 10], PrefetchLimits(prefetch_numel=1, live_numel=100))
    assert one_ahead.units == (0, 1, 2, 2, 1, 0)
    # The unit in the middle is kept; each slot starts the next one.
    assert one_ahead.keep == (False, False, True, False, False, False)
    assert one_ahead.start == ((0,), (1,), (2,), (4,), (), (5,), ())
    # Nothing fits beside the unit in use.
    tight = make_schedule(layers(3), [10, 10, 10], PrefetchLimits(prefetch_numel=50, live_numel=10))
    assert tight.start == ((0,), (), (), (), (), (), ())
    off = make_schedule(layers(3), [10, 10, 10], PrefetchLimits(prefetch_numel=0))
    assert not any(off.start)
    # All are kept, if there is room for all and the one ahead.
    near = make_schedule(layers(3), [10, 10, 10], PrefetchLimits(prefetch_numel=0, live_numel=30, reuse_numel=40))
    assert near.keep == (True, True, True, False, False, False)
    nearer = make_schedule(layers(3), [10, 10, 10], PrefetchLimits(prefetch_numel=0, live_numel=30, reuse_numel=20))
    assert nearer.keep == (False, True, True, False, False, False)


@given(traces(), limits_of)
def test_a_recorder_tells_a_repetition_from_another_order(trace: Trace, limits: PrefetchLimits) -> None:
    recorder = Recorder()

    def iterate(schedule: Schedule, order: list[Use]) -> tuple[tuple[Use, ...] | None, list[bool]]:
        recorder.begin(schedule)
        followed = []
        open_: list[tuple[int, Use]] = []
        for number, use in enumerate(order):
            for _, done in [(n, u) for n, u in open_ if u.last < number]:
                recorder.end_use(done.unit)
            open_ = [(n, u) for n, u in open_ if u.last >= number]
            recorder.begin_use(use.unit)
            followed.append(recorder.follows)
            open_.append((number, use))
        return recorder.end(), followed

    found, followed = iterate(Schedule(), trace.uses)
    assert not any(followed)
    if not trace.uses:
        assert found is None
        return
    assert found == tuple(trace.uses)
    schedule = make_schedule(found, trace.numel, limits)
    again, followed = iterate(schedule, trace.uses)
    assert again is None
    assert all(followed)
    shorter, followed = iterate(schedule, trace.uses[:-1])
    assert shorter is not None
    assert all(followed)
