"""I/O threads: a bounded queue of operations by priority, their tickets, and counters of bytes moved.

[Note: links]
A link is a name for a kind of transfer: a collective, a direction between two tiers, prefetching. Code that moves bytes
counts them under that name, in any thread: `with links.moving("host_to_device", nbytes)` around a transfer that the caller
waits for, else `links.begin("prefetch", nbytes)` and later `with links.waiting("prefetch", "not ready in time")`.
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
from .closing import FORKED_ERROR_TEXT, join_threads, register_forkable, start_threads

T = TypeVar("T")
U = TypeVar("U")


class Priority(IntEnum):
    """The priority of queued operations."""

    READ = 0
    """A caller is waiting for it."""
    PREFETCH = 1
    """A caller will wait for it soon."""
    WRITE_BACK = 2
    """Writes changed state back to its tier."""
    CHECKPOINT = 3
    """Writes a checkpoint in the background."""


class Ticket(Generic[T]):
    """A running or queued operation: `await ticket` or `ticket.wait()` gives its result or raises its error.

    Giving up on the wait, on a timeout or because the task was cancelled, does not stop the operation: the caller must not
    touch its memory until the ticket is done.
    """

    def __init__(self, future: Future[T], on_observed: Callable[[], None] | None = None) -> None:
        self.future = future
        """The operation as a `concurrent.futures.Future`."""
        self._on_observed = on_observed
        """Called when the result or the error is returned to the caller."""
        self._process = os.getpid()

    def _checked_future(self) -> Future[T]:
        """Return the future; raises UsageError in a forked child, where it would never be done. See [Note: forks]."""
        if self._process != os.getpid():
            raise UsageError(f"the operation belongs to a store that {FORKED_ERROR_TEXT}")
        return self.future

    def wait(self, timeout_s: float | None = None) -> T:
        """Return the result; raises the operation's error, or TimeoutError after `timeout_s`."""
        if wait([self._checked_future()], timeout_s).not_done:
            raise TimeoutError(f"the operation did not finish within {timeout_s} s")
        try:
            return self._result()
        finally:
            del self  # the error's traceback would keep the future alive, which holds the error

    def _result(self) -> T:
        self.mark_observed()
        try:
            return self.future.result()
        finally:
            del self  # see `wait`

    def mark_observed(self) -> None:
        """Record that the caller has the result or the error, as `wait` and `await` do."""
        if self._on_observed is not None:
            self._on_observed()

    def done(self) -> bool:
        """Return whether the operation has succeeded or failed."""
        return self.future.done()

    def wait_for_end(self, timeout_s: float | None = None) -> bool:
        """Wait until the operation has succeeded or failed; return whether it did within `timeout_s`."""
        return not wait([self._checked_future()], timeout_s).not_done

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the operation has succeeded or failed; from an I/O thread, so it must be short."""
        self.future.add_done_callback(lambda _: callback())

    def error(self) -> BaseException | None:
        """Wait for the end, and return the operation's error, or None if it succeeded."""
        return self._checked_future().exception()

    def __await__(self) -> Generator[object, None, T]:
        if not self._checked_future().done():
            import asyncio  # only here, because the import takes time and synchronous callers do not need it

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
    """Return a ticket for `operation`, and a function that runs it, once, in the thread that calls the function.

    The function does nothing if the ticket's future has been cancelled.
    """
    future: Future[T] = Future()

    def run() -> None:
        nonlocal future, operation
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = operation()
        except BaseException as error:  # raised by the ticket
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            del future, operation  # see `Ticket.wait`

    return Ticket(future), run


def wait_all(tickets: list[Ticket[T]]) -> list[T]:
    """Wait for all `tickets`, then return their results or raise the first error; no operation is left running.

    On an error `tickets` is emptied: the error's traceback keeps the callers' variables alive, and the tickets the error.
    """
    errors = [error for ticket in tickets if (error := ticket.error()) is not None]
    if errors:
        tickets.clear()
        try:
            raise errors[0]
        finally:
            del error, errors  # see `Ticket.wait`
    return [ticket.wait() for ticket in tickets]


def combined(tickets: list[Ticket[T]], transform: Callable[[list[T]], U]) -> Ticket[U]:
    """Return a ticket for `transform` of the results of all `tickets`, which is done once they are; its error is the one that
    `wait_all` raises. An I/O thread calls `transform`, so it must be short."""
    pending = [*tickets]
    ticket, run = promise(lambda: transform(wait_all(pending)))

    def on_done() -> None:
        run()
        pending.clear()  # breaks a reference cycle: the tickets refer to this function

    when_all_done(tickets, on_done)
    return ticket


def when_all_done(tickets: Sequence[Ticket[T]], callback: Callable[[], None]) -> None:
    """Call `callback` once all operations have succeeded or failed; from an I/O thread, so it must be short."""
    remaining = itertools.count(len(tickets), -1)

    def on_done() -> None:
        if next(remaining) == 0:
            callback()

    for ticket in tickets:
        ticket.when_done(on_done)
    on_done()  # there may be none


def in_order(tickets: Iterator[Ticket[T]], depth: int) -> Generator[T, None, None]:
    """Yield the results of `tickets`, with up to `depth` requested ahead; no operation is left running at the end."""
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
    by_label: Mapping[str, LinkStatistics]
    """Statistics by priority and label, such as "read optimizer"; only those that occurred."""

    def of(self, *priorities: Priority) -> LinkStatistics:
        """Return the sums over all labels."""
        names = [priority.name.lower() for priority in priorities]
        return total_of_links(link for key, link in self.by_label.items() if key.split(" ")[0] in names)


class IoQueue:
    """`num_threads` threads that run operations, lowest priority value first, in order within a priority.

    At most `depth` operations wait; submitting one more blocks. Operations must not submit others.
    """

    def __init__(self, num_threads: int = 4, depth: int = 64) -> None:
        if num_threads < 1 or depth < 1:
            raise UsageError(f"expected at least one thread and a depth of one, got {num_threads} and {depth}")
        self._depth = depth
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        # One thread is woken per operation or free slot: waking all costs more than most operations.
        self._not_empty = threading.Condition(self._lock)
        self._not_full = threading.Condition(self._lock)
        self._closed = False
        self._links = LinkCounters()
        self._blocked_s = 0.0
        self._threads = start_threads(num_threads, self._serve, "zstore-io")
        register_forkable(self)

    def _forked(self) -> None:
        """Continue without threads in a forked child: operations run in the calling thread. See [Note: forks]."""
        self._lock = threading.Lock()
        self._not_empty, self._not_full = threading.Condition(self._lock), threading.Condition(self._lock)
        self._heap, self._threads = [], []

    def submit(self, operation: Callable[[], T], priority: Priority, nbytes: int = 0, *, label: str = "") -> Ticket[T]:
        """Queue `operation`, which moves `nbytes`, counted as `label`; returns its ticket. Blocks while the queue is full."""
        if not self._threads:  # see [Note: endings]
            return self.run_inline(operation, priority, nbytes, label=label)
        ticket, run = self._ticket(operation, priority, nbytes, label)
        with self._lock:
            if len(self._heap) >= self._depth and not self._closed:
                started = time.perf_counter()
                while len(self._heap) >= self._depth and not self._closed:
                    self._not_full.wait()
                self._blocked_s += time.perf_counter() - started
            if self._closed:
                raise UsageError("the I/O queue is closed: no operation can be queued")
            heapq.heappush(self._heap, (priority, next(self._order), run))
            self._not_empty.notify()
        return ticket

    def run_inline(
        self, operation: Callable[[], T], priority: Priority, nbytes: int = 0, *, label: str = ""
    ) -> Ticket[T]:
        """Run `operation` in the calling thread, which would only wait for it; counted like queued operations."""
        ticket, run = self._ticket(operation, priority, nbytes, label)
        run()
        try:
            return ticket
        finally:
            del ticket  # see `Ticket.wait`: an error's frames include this one

    def _ticket(
        self, operation: Callable[[], T], priority: Priority, nbytes: int, label: str
    ) -> tuple[Ticket[T], Callable[[], None]]:
        """Return a ticket for `operation`, and a function that runs and counts it."""
        link = f"{priority.name.lower()} {label}"

        def counted() -> T:
            started = time.perf_counter()
            try:
                return operation()
            finally:
                self._links.begin(link, nbytes)
                self._links.add_busy(link, time.perf_counter() - started)

        return promise(counted)

    def _serve(self) -> None:
        while True:
            with self._lock:
                while not self._heap:
                    if self._closed:
                        return
                    self._not_empty.wait()
                run = heapq.heappop(self._heap)[2]
                self._not_full.notify()
            run()
            del run  # do not keep its objects alive, such as an error with its frames

    def statistics(self) -> QueueStatistics:
        """Return the counters since the start."""
        return QueueStatistics(blocked_s=self._blocked_s, by_label=self._links.statistics())

    def close(self) -> None:
        """Run the queued operations, then stop the threads."""
        with self._lock:
            self._closed = True
            self._not_empty.notify_all()
            self._not_full.notify_all()
        join_threads(self._threads)


@dataclass(kw_only=True)
class LinkStatistics:
    """The transfers over one link of this rank since the start."""

    operations: int = 0
    bytes: int = 0
    """Bytes of all operations, including unfinished ones."""
    busy_s: float = 0.0
    """Sum of the operations' durations, each until it was observed to be done; concurrent operations count separately."""
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
    """Return the sums over several links."""
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

    def add_busy(self, link: str, seconds: float) -> None:
        """Count the time of an operation."""
        with self._lock:
            self._counts.setdefault(link, LinkStatistics()).busy_s += seconds

    def add_stall(self, link: str, cause: str, seconds: float) -> None:
        """Count time that a caller waited, by cause."""
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
            self.add_stall(link, cause, time.perf_counter() - started)

    @contextlib.contextmanager
    def moving(self, link: str, nbytes: int, cause: str | None = "blocking call") -> Iterator[None]:
        """Count a `with` block as one operation of `nbytes`, during all of which the caller waits. If that delays
        nothing, as in a thread that prefetches, pass None as the cause."""
        self.begin(link, nbytes)
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.add_busy(link, seconds)
            if cause is not None:
                self.add_stall(link, cause, seconds)

    def statistics(self) -> dict[str, LinkStatistics]:
        """Return the counters of every link used."""
        with self._lock:
            return {link: replace(counts, stall_s=dict(counts.stall_s)) for link, counts in self._counts.items()}
