"""I/O threads: who goes first, when a producer waits, and where results and errors go."""

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.waiting import until
from zstore.errors import UsageError
from zstore.io import LinkCounters, LinkStatistics
from zstore.io.queue import IoQueue, Priority, Ticket, combined, promise, wait_all


class Holder:
    """Occupies I/O threads until told: what is queued behind it stays in the queue."""

    def __init__(self, queue: IoQueue, count: int = 1) -> None:
        self.gate = threading.Event()
        started = threading.Barrier(count + 1)

        def hold() -> None:
            started.wait(200)
            assert self.gate.wait(200)

        self.tickets = [queue.submit(hold, Priority.READ) for _ in range(count)]
        started.wait(200)

    def let_go(self) -> None:
        self.gate.set()
        wait_all(self.tickets)


@pytest.fixture
def queue() -> Iterator[IoQueue]:
    queue = IoQueue(1, depth=64)
    yield queue
    queue.close()


def finished(value: int) -> Ticket[int]:
    ticket, carry_out = promise(lambda: value)
    carry_out()
    return ticket


def test_lower_priority_values_go_first_and_equals_in_order(queue: IoQueue) -> None:
    holder = Holder(queue)
    order: list[tuple[Priority, int]] = []
    tickets = [queue.submit(lambda p=at, n=k: order.append((p, n)), at) for k in range(3) for at in reversed(Priority)]
    assert order == []
    assert len(queue._heap) == len(tickets)
    holder.let_go()
    wait_all(tickets)
    assert order == [(priority, number) for priority in Priority for number in range(3)]


def test_a_full_queue_blocks_the_producer_until_there_is_room() -> None:
    queue = IoQueue(1, depth=2)
    holder = Holder(queue)
    tickets = [queue.submit(lambda: None, Priority.CHECKPOINT) for _ in range(2)]
    submitted = threading.Event()
    blocked: list[Ticket[str]] = []

    def produce() -> None:
        blocked.append(queue.submit(lambda: "late", Priority.READ))
        submitted.set()

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    # It cannot get in, however urgent, before one of the two left the queue.
    assert not submitted.wait(0.05)
    assert len(queue._heap) == 2
    holder.let_go()
    assert submitted.wait(200)
    assert blocked[0].wait(200) == "late"
    wait_all(tickets)
    assert queue.statistics().blocked_s > 0.04
    queue.close()


def test_an_error_goes_to_the_ticket_and_the_threads_live_on(queue: IoQueue) -> None:
    class Odd(BaseException):
        pass

    def fail(kind: type[BaseException]) -> None:
        raise kind("no")

    for kind in (ValueError, KeyboardInterrupt, SystemExit, Odd):
        ticket = queue.submit(lambda kind=kind: fail(kind), Priority.READ)
        assert isinstance(ticket.error(), kind)
        with pytest.raises(kind):
            ticket.wait()
        assert ticket.done()
    assert queue.submit(lambda: 3, Priority.READ).wait() == 3


def test_joined_tickets_end_with_the_last_of_them() -> None:
    ends = [promise(lambda n=n: 1 // n) for n in (1, 0, 2)]
    good, bad = combined([ends[0][0], ends[2][0]], sum), combined([ticket for ticket, _ in ends], sum)
    ends[2][1]()
    assert not good.done()
    ends[0][1]()
    assert good.wait() == 1
    assert not bad.done()
    ends[1][1]()
    assert isinstance(bad.error(), ZeroDivisionError)
    assert combined([], len).wait() == 0


def test_wait_all_waits_for_all_and_raises_the_first_error(queue: IoQueue) -> None:
    done: list[int] = []

    def work(number: int) -> None:
        done.append(number)
        if number in (1, 2):
            raise ValueError(number)

    tickets = [queue.submit(lambda n=n: work(n), Priority.READ) for n in range(5)]
    with pytest.raises(ValueError, match="1"):
        wait_all(tickets)
    assert done == [0, 1, 2, 3, 4]


def test_when_done_is_called_after_good_and_bad_ends_and_at_once_when_it_ended(queue: IoQueue) -> None:
    holder = Holder(queue)
    called = threading.Semaphore(0)
    good = queue.submit(lambda: 1, Priority.READ)
    bad = queue.submit(lambda: 1 // 0, Priority.READ)
    good.when_done(called.release)
    bad.when_done(called.release)
    assert not called.acquire(blocking=False)
    holder.let_go()
    assert called.acquire(timeout=200)
    assert called.acquire(timeout=200)
    finished(7).when_done(called.release)
    assert called.acquire(blocking=False)
    assert finished(7).wait() == 7


def test_await_gives_results_and_errors_in_a_running_loop(queue: IoQueue) -> None:
    async def main() -> list[int]:
        tickets = [queue.submit(lambda n=n: n, Priority.READ) for n in range(5)]
        values = [await ticket for ticket in tickets]
        assert await tickets[0] == 0
        assert tickets[0].wait() == 0
        with pytest.raises(ZeroDivisionError):
            await queue.submit(lambda: 1 // 0, Priority.READ)
        assert await asyncio.gather(*map(one, range(3))) == [0, 1, 2]
        return values

    async def one(number: int) -> int:
        return await queue.submit(lambda: number, Priority.READ)

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]


def test_giving_up_an_await_gives_up_the_waiting_not_the_operation(queue: IoQueue) -> None:
    holder = Holder(queue)
    done: list[str] = []

    async def main(ticket: Ticket[None]) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ticket, 0.001)
        task = asyncio.ensure_future(asyncio.wait_for(ticket, 30))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for loops in range(2):
        ticket = queue.submit(lambda n=loops: done.append(f"done {n}"), Priority.READ)
        asyncio.run(main(ticket))
        assert not ticket.done()
    holder.let_go()
    ticket.wait(200)
    assert done == ["done 0", "done 1"]
    # The thread that carried them out is still there.
    assert queue.submit(lambda: "alive", Priority.READ).wait(200) == "alive"


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("start", [IoQueue.submit, IoQueue.run_inline])
def test_an_error_frees_its_values_without_the_cyclic_collector(queue: IoQueue, start: Any) -> None:
    def fail(values: list[Any]) -> None:
        tickets = [start(queue, partial(max, values, key=len), Priority.READ) for _ in range(2)]
        wait_all(tickets)

    values = [type("Value", (), {})()]
    freed = weakref.ref(values[0])
    with pytest.raises(TypeError, match="has no len"):
        fail([values.pop()])
    until(lambda: freed() is None, "the error keeps the value")


def test_an_operation_that_ends_after_its_loop_is_quiet(queue: IoQueue, caplog: pytest.LogCaptureFixture) -> None:
    holder = Holder(queue)

    async def main() -> None:
        task = asyncio.ensure_future(asyncio.wait_for(holder.tickets[0], 30))
        await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(main())
    holder.let_go()
    assert queue.submit(lambda: 1, Priority.READ).wait(200) == 1
    assert caplog.records == []


def test_statistics_count_by_subject() -> None:
    queue = IoQueue(3)
    wait_all(
        [queue.submit(lambda: None, Priority.READ, n, label=s) for n, s in ((1, "model"), (2, "a b"), (4, "model"))]
    )
    queue.submit(lambda: None, Priority.WRITE_BACK, 8, label="model").wait()
    queue.submit(lambda: None, Priority.READ, 16).wait()
    found = queue.statistics()
    assert {key: (link.operations, link.bytes) for key, link in found.by_label.items()} == {
        "read model": (2, 5),
        "read a b": (1, 2),
        "write_back model": (1, 8),
        "read ": (1, 16),
    }
    reads = found.of(Priority.READ)
    assert (reads.operations, reads.bytes) == (4, 23)
    assert reads.busy_s == pytest.approx(sum(found.by_label[f"read {s}"].busy_s for s in ("model", "a b", "")))
    queue.close()


def test_close_carries_out_what_is_queued_and_takes_no_more() -> None:
    queue = IoQueue(2, depth=100)
    holder = Holder(queue, count=2)
    done: list[int] = []
    tickets = [queue.submit(lambda n=n: done.append(n), Priority.CHECKPOINT) for n in range(50)]
    closer = threading.Thread(target=queue.close, daemon=True)
    closer.start()
    holder.let_go()
    closer.join(200)
    assert not closer.is_alive()
    wait_all(tickets)
    assert sorted(done) == list(range(50))
    with pytest.raises(UsageError, match="closed"):
        queue.submit(lambda: None, Priority.READ)
    queue.close()


class Clock:
    now = 0.0

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
    links.add_busy("prefetch", 4.0)
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
    pytest.importorskip("torch")  # the other Pythons have the store alone
    from zstore.ranks.world import Work

    links = LinkCounters()
    work = Work(SlowWork(clock), links, "all_gather")
    assert not work.is_completed()
    clock.now += 3.0  # computing
    work.wait()
    work.wait()
    found = links.statistics()["all_gather"]
    assert (found.busy_s, found.stall_s) == (5.0, {"begun earlier": 4.0})
