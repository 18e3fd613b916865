"""Counters of links: what is counted, from which thread, and over which time."""

import contextlib
import time
from collections.abc import Iterator

import pytest

from zstore.io.links import LinkCounters, LinkStatistics
from zstore.ranks.world import Work


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_moving_counts_the_whole_block_as_busy_and_as_a_stall(clock: Clock) -> None:
    links = LinkCounters()
    for seconds in (2.0, 3.0):
        with links.moving("host_to_device", 10):
            clock.now += seconds
    with links.moving("ahead", 1, None):
        clock.now += 4.0
    with contextlib.suppress(OSError), links.moving("host_to_device", 5, "retry"):
        clock.now += 1.0
        raise OSError("gone")
    assert links.statistics() == {
        "ahead": LinkStatistics(operations=1, bytes=1, busy_s=4.0),
        "host_to_device": LinkStatistics(
            operations=3, bytes=25, busy_s=6.0, stall_s={"blocking call": 5.0, "retry": 1.0}
        ),
    }


def test_what_is_begun_here_may_be_waited_for_elsewhere(clock: Clock) -> None:
    links = LinkCounters()
    links.begin("prefetch", 7)
    with links.waiting("prefetch", "late"):
        clock.now += 0.5
    links.busy("prefetch", 4.0)
    links.begin("other", 1)
    found = links.statistics()
    assert found["prefetch"] == LinkStatistics(operations=1, bytes=7, busy_s=4.0, stall_s={"late": 0.5})
    assert found["other"] == LinkStatistics(operations=1, bytes=1)


class SlowWork:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def wait(self) -> None:
        self.clock.now += 2.0

    def is_completed(self) -> bool:
        return False


def test_a_collective_is_busy_from_its_start_and_stalls_while_it_is_waited_for(clock: Clock) -> None:
    links = LinkCounters()
    work = Work(SlowWork(clock), links, "all_gather")
    assert not work.is_completed()
    clock.now += 3.0  # computing
    work.wait()
    work.wait()
    found = links.statistics()["all_gather"]
    assert (found.busy_s, found.stall_s) == (5.0, {"begun earlier": 4.0})
