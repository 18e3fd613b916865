"""I/O threads: a bounded queue of operations by priority, their tickets, and counters of bytes moved.

[Note: links]
A link is a name: a collective, a direction between two tiers, reading ahead. Code that moves bytes counts them there, in
any thread: `with links.moving("host_to_device", nbytes)` around a transfer that the caller waits for, else
`links.begin("prefetch", nbytes)`, and later `with links.waiting("prefetch", "not there in time")`.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Generic, TypeVar

from ..errors import UsageError
from .closing import OF_THE_PARENT, join_threads, notify_of_fork, start_threads

T = TypeVar("T")
U = TypeVar("U")


class Priority(IntEnum):
    """The order of operations that wait for a thread."""

    READ = 0
    """A caller waits for it now."""
    PREFETCH = 1
    """A caller will wait for it soon."""
    WRITE_BACK = 2
    """Changed state on its way to its tier."""
    CHECKPOINT = 3
    """Copies made during training."""


class Ticket(Generic[T]):
    """A running or queued operation: `await ticket` or `ticket.wait()` gives its result or raises its error.

    Giving up the wait, by a timeout or a cancelled task, does not stop the operation: the caller must not touch its
    memory until the ticket is done.
    """

    def __init__(self, future: Future[T], observed: Callable[[], None] | None = None) -> None:
        self.future = future
        """The same for `concurrent.futures`."""
        self._observed = observed
        """Called when the result or the error was returned."""
        self._process = os.getpid()

    def _here(self) -> Future[T]:
        """Return the future; raises UsageError in a forked child, where it would never be done. See [Note: forks]."""
        if self._process != os.getpid():
            raise UsageError(f"the operation is one of a store that {OF_THE_PARENT}")
        return self.future

    def wait(self, timeout_s: float | None = None) -> T:
        """Return the result; raises the operation's error, or TimeoutError after `timeout_s`."""
        if wait([self._here()], timeout_s).not_done:
            raise TimeoutError(f"the operation is not done after {timeout_s} s")
        try:
            return self._result()
        finally:
            del self  # the error's traceback would keep the future, which has the error

    def _result(self) -> T:
        self.mark_observed()
        try:
            return self.future.result()
        finally:
            del self  # see `wait`

    def mark_observed(self) -> None:
        """Record that the caller has the result or the error, as `wait` and `await` do."""
        if self._observed is not None:
            self._observed()

    def done(self) -> bool:
        """Return whether the operation ended, well or badly."""
        return self.future.done()

    def wait_for_end(self, timeout_s: float | None = None) -> bool:
        """Wait until the operation ended, well or badly; return whether it did within `timeout_s`."""
        return not wait([self._here()], timeout_s).not_done

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the operation ended, well or badly; from an I/O thread, so it must be short."""
        self.future.add_done_callback(lambda _: callback())

    def error(self) -> BaseException | None:
        """Wait for the end and return the operation's error, None if it went well."""
        return self._here().exception()

    def __await__(self) -> Generator[object, None, T]:
        if not self._here().done():
            import asyncio  # loaded only to await; a caller that just waits starts sooner without

            loop = asyncio.get_running_loop()
            ended = asyncio.Event()

            def wake(_: Future[T]) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits any more
                    loop.call_soon_threadsafe(ended.set)

            self.future.add_done_callback(wake)
            yield from ended.wait().__await__()
        try:
            return self._result()
        finally:
            del self  # see `wait`


def promise(operation: Callable[[], T]) -> tuple[Ticket[T], Callable[[], None]]:
    """Return a ticket for `operation`, and a function that carries it out, once, in the thread that calls it.

    It does nothing if the ticket's future was cancelled before.
    """
    future: Future[T] = Future()

    def carry_out() -> None:
        nonlocal future, operation
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = operation()
        except BaseException as error:  # the ticket carries it to those that wait
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            del future, operation  # see `Ticket.wait`

    return Ticket(future), carry_out


def wait_all(tickets: list[Ticket[T]]) -> list[T]:
    """Wait for all `tickets`, then return their results or raise the first error: nothing is left in flight."""
    errors = [error for ticket in tickets if (error := ticket.error()) is not None]
    if errors:
        raise errors[0]
    return [ticket.wait() for ticket in tickets]


def joined(tickets: list[Ticket[T]], change: Callable[[list[T]], U]) -> Ticket[U]:
    """Return a ticket for `change` of the results of all `tickets`, which is done once they are; its error is the one that
    `wait_all` raises. An I/O thread calls `change`, so it must be short."""
    own = [*tickets]
    ticket, carry_out = promise(lambda: change(wait_all(own)))

    def ended() -> None:
        carry_out()
        own.clear()  # they refer to this function, which refers to them

    when_all_done(tickets, ended)
    return ticket


def when_all_done(tickets: Sequence[Ticket[T]], callback: Callable[[], None]) -> None:
    """Call `callback` once all operations ended, well or badly; from an I/O thread, so it must be short."""
    left = itertools.count(len(tickets), -1)

    def ended() -> None:
        if next(left) == 0:
            callback()

    for each in tickets:
        each.when_done(ended)
    ended()  # there may be none


def in_order(tickets: Iterator[Ticket[T]], depth: int) -> Generator[T, None, None]:
    """Yield the results of `tickets`, which are requested ahead, up to `depth`; nothing is left in flight at the end."""
    pending: deque[Ticket[T]] = deque()
    try:
        for ticket in tickets:
            pending.append(ticket)
            if len(pending) == depth:
                yield pending.popleft().wait()
        while pending:
            yield pending.popleft().wait()
    finally:
        for ticket in pending:
            ticket.error()


@dataclass(frozen=True, kw_only=True)
class QueueStatistics:
    """The work of the I/O threads since they started."""

    blocked_s: float
    """Time that producers waited for room in the queue."""
    subjects: Mapping[str, LinkStatistics]
    """By priority name and subject, as "read optimizer"; only the ones that occurred."""

    def of(self, *priorities: Priority) -> LinkStatistics:
        """Return the sums over all subjects."""
        names = [priority.name.lower() for priority in priorities]
        return total_of_links(link for subject, link in self.subjects.items() if subject.split(" ")[0] in names)


class IoQueue:
    """`num_threads` threads that carry out operations, lowest priority value first, in order within a priority.

    At most `depth` operations wait; submitting one more blocks. Operations must not submit others.
    """

    def __init__(self, num_threads: int = 4, depth: int = 64) -> None:
        if num_threads < 1 or depth < 1:
            raise UsageError(f"expected at least one thread and a depth of one, got {num_threads} and {depth}")
        self._depth = depth
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        # Wakes one thread for each operation and each place: waking all costs more than most operations.
        self._filled = threading.Condition(self._lock)
        self._emptied = threading.Condition(self._lock)
        self._closed = False
        self._links = LinkCounters()
        self._blocked_s = 0.0
        self._threads = start_threads(num_threads, self._serve, "zstore-io")
        notify_of_fork(self)

    def _forked(self) -> None:
        """Go on without threads in a forked child: callers carry out their operations. See [Note: forks]."""
        self._lock = threading.Lock()
        self._filled, self._emptied = threading.Condition(self._lock), threading.Condition(self._lock)
        self._heap, self._threads = [], []

    def submit(
        self, operation: Callable[[], T], priority: Priority, nbytes: int = 0, *, subject: str = ""
    ) -> Ticket[T]:
        """Queue `operation`, which moves `nbytes` of `subject`; returns its ticket. Blocks while the queue
        is full."""
        ticket, run = self._ticket(operation, priority, nbytes, subject)
        if not self._threads:  # see [Note: endings]
            run()
            return ticket
        with self._lock:
            if len(self._heap) >= self._depth and not self._closed:
                started = time.perf_counter()
                while len(self._heap) >= self._depth and not self._closed:
                    self._emptied.wait()
                self._blocked_s += time.perf_counter() - started
            if self._closed:
                raise UsageError("the I/O threads are closed: no operation can be queued")
            heapq.heappush(self._heap, (priority, next(self._order), run))
            self._filled.notify()
        return ticket

    def carry_out(self, operation: Callable[[], T], priority: Priority, nbytes: int = 0) -> Ticket[T]:
        """Carry out `operation` in the calling thread, which would only wait for it; counted like queued ones."""
        ticket, run = self._ticket(operation, priority, nbytes, "")
        run()
        return ticket

    def _ticket(
        self, operation: Callable[[], T], priority: Priority, nbytes: int, subject: str
    ) -> tuple[Ticket[T], Callable[[], None]]:
        """Return a ticket for `operation`, and a function that carries it out."""
        link = f"{priority.name.lower()} {subject}"

        def counted() -> T:
            started = time.perf_counter()
            try:
                return operation()
            finally:
                self._links.begin(link, nbytes)
                self._links.busy(link, time.perf_counter() - started)

        return promise(counted)

    def _serve(self) -> None:
        while True:
            with self._lock:
                while not self._heap:
                    if self._closed:
                        return
                    self._filled.wait()
                run = heapq.heappop(self._heap)[2]
                self._emptied.notify()
            run()
            del run  # its objects, an error with its frames too, are not this thread's to keep

    def statistics(self) -> QueueStatistics:
        """Return the counters since the start."""
        return QueueStatistics(blocked_s=self._blocked_s, subjects=self._links.statistics())

    def close(self) -> None:
        """Carry out queued operations, then end the threads."""
        with self._lock:
            self._closed = True
            self._filled.notify_all()
            self._emptied.notify_all()
        join_threads(self._threads)


@dataclass(kw_only=True)
class LinkStatistics:
    """The work of one link of this rank since the start."""

    operations: int = 0
    bytes: int = 0
    """Bytes of operations begun, including unfinished ones."""
    busy_s: float = 0.0
    """Time from the beginning of each operation until it was seen to be done, summed: concurrent operations each count."""
    stall_s: dict[str, float] = field(default_factory=dict)
    """Seconds for which a caller waited, by cause."""

    def since(self, before: LinkStatistics) -> LinkStatistics:
        """Return the counts since `before`."""
        return LinkStatistics(
            operations=self.operations - before.operations,
            bytes=self.bytes - before.bytes,
            busy_s=self.busy_s - before.busy_s,
            stall_s={cause: seconds - before.stall_s.get(cause, 0.0) for cause, seconds in self.stall_s.items()},
        )


def total_of_links(links: Iterable[LinkStatistics]) -> LinkStatistics:
    """Return several links as one."""
    sums = LinkStatistics()
    for link in links:
        sums.operations += link.operations
        sums.bytes += link.bytes
        sums.busy_s += link.busy_s
        for cause, seconds in link.stall_s.items():
            sums.stall_s[cause] = sums.stall_s.get(cause, 0.0) + seconds
    return sums


class LinkCounters:
    """Counters by link, see [Note: links]. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, LinkStatistics] = {}

    def begin(self, link: str, nbytes: int) -> None:
        """Count an operation of `nbytes`."""
        with self._lock:
            counts = self._counts.setdefault(link, LinkStatistics())
            counts.operations += 1
            counts.bytes += nbytes

    def busy(self, link: str, seconds: float) -> None:
        """Count the time of an operation."""
        with self._lock:
            self._counts.setdefault(link, LinkStatistics()).busy_s += seconds

    def stalled(self, link: str, cause: str, seconds: float) -> None:
        """Count time for which a caller waited."""
        with self._lock:
            stall_s = self._counts.setdefault(link, LinkStatistics()).stall_s
            stall_s[cause] = stall_s.get(cause, 0.0) + seconds

    @contextlib.contextmanager
    def waiting(self, link: str, cause: str) -> Iterator[None]:
        """Count a `with` block as waiting."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.stalled(link, cause, time.perf_counter() - started)

    @contextlib.contextmanager
    def moving(self, link: str, nbytes: int, cause: str | None = "blocking call") -> Iterator[None]:
        """Count a `with` block as one operation of `nbytes` whose whole time the caller waits; a caller that loses
        nothing, such as a thread that works ahead, gives None as the cause."""
        self.begin(link, nbytes)
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.busy(link, seconds)
            if cause is not None:
                self.stalled(link, cause, seconds)

    def statistics(self) -> dict[str, LinkStatistics]:
        """Return the counters of every link used."""
        with self._lock:
            return {link: replace(counts, stall_s=dict(counts.stall_s)) for link, counts in self._counts.items()}
