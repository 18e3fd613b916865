"""Threads for tasks that wait for others: a few that carry out tasks in order, and one for a task that takes long."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from operator import length_hint
from typing import Any, Self, TypeVar

from .closing import Closing, join_threads, run_to_the_end, start_threads, tell_of_fork
from .queue import Ticket, promise

T = TypeVar("T")

_BYTES_A_THREAD = 24 * 1024 * 1024
_FILES_A_THREAD = 8


def num_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def helpful_threads(nbytes: int, num_files: int) -> int:
    """Return how many threads, besides the caller's, a write of so many files with so many bytes in all is worth.

    Starting one takes as long as writing a small file, and each system call releases the GIL.
    """
    return max(nbytes // _BYTES_A_THREAD, num_files // _FILES_A_THREAD)


class Workers(Closing):
    """`num_threads` threads, started at once; with none, as at the end of the interpreter, when none can be started, callers
    carry out their tasks themselves. See [Note: endings].

    Unlike the I/O threads, these may wait for tickets and buffers. Close it, or use it in a `with` block.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._tasks: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = start_threads(num_threads, self._serve, name)
        tell_of_fork(self)

    def _forked(self) -> None:
        """Go on without threads in a forked child: callers carry out their tasks. See [Note: forks]."""
        self._tasks, self._changed, self._threads = deque(), threading.Condition(), []

    def run(self, tasks: Iterable[Callable[[], T]], *, here: bool = False) -> list[T]:
        """Carry out all tasks, each asked for as a thread comes to it, and return their results in order; must not be called
        from a task. With `here` the caller carries out some of them.

        The first error stops those that have not begun, and is raised when the others ended.
        """
        batch = iter(tasks)
        results: list[T | None] = []
        errors: list[BaseException] = []
        here |= not self._threads
        left = min(len(self._threads), length_hint(tasks, len(self._threads))) + here

        def take() -> Callable[[], None] | None:
            with self._changed:
                task, number = None if errors else next(batch, None), len(results)
                if task is None:
                    return None
                results.append(None)
            return partial(carry_out, task, number)

        def carry_out(task: Callable[[], T], number: int) -> None:
            results[number] = task()

        def serve() -> None:
            nonlocal left
            try:
                while (task := take()) is not None:
                    task()
            except BaseException as error:
                errors.append(error)
            with self._changed:
                left -= 1
                if left == 0:
                    self._changed.notify_all()

        with self._changed:
            self._tasks.extend([serve] * (left - here))
            self._changed.notify_all()
        if here:
            serve()
        with self._changed:
            try:
                self._changed.wait_for(lambda: left == 0)
            except BaseException as error:  # Ctrl-C: nothing new begins, and close() waits for what runs
                errors.append(error)
                raise
        if errors:
            raise errors[0]
        return results  # type: ignore[return-value]

    def submit(self, task: Callable[[], T]) -> Ticket[T]:
        """Queue one task; may be called from a task. Raises RuntimeError once the threads ended."""
        if self._closed:
            raise RuntimeError("a task after the shutdown of its threads")
        ticket, carry_out = promise(task)
        with self._changed:
            self._tasks.append(carry_out)
            self._changed.notify()
        while not self._threads and self._tasks:
            self._tasks.popleft()()
        return ticket

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closed)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            task()
            del task  # its objects are not this thread's to keep

    def close(self) -> None:
        """End the threads once nothing is queued."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        join_threads(self._threads)
        self._threads.clear()


def run_in_thread(task: Callable[[], T], name: str) -> Ticket[T]:
    """Carry out `task` in a thread of its own, called `name`; the interpreter waits for its end."""
    ticket, carry_out = promise(task)
    run_to_the_end(carry_out, name)
    return ticket


class AsyncClosing(Closing):
    """Closes itself at the end of an `async with` block, too, in a thread."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await run_in_thread(self.close, "zstore-close")


class LastingExecutor(ThreadPoolExecutor):
    """An event loop's executor that also works at the end of the interpreter, which shuts the loop's own down."""

    def __init__(self, num_threads: int, name: str) -> None:
        super().__init__(num_threads)  # starts no thread of its own: nothing is submitted to it
        self._workers = Workers(num_threads, name)

    def submit(self, task: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Queue a call and return its future."""
        return self._workers.submit(partial(task, *args, **kwargs)).future


def in_turn(first: Iterable[T], second: Iterable[T]) -> Iterator[T]:
    """Yield all of both, each in order, one of each as long as there are some."""
    return (each for pair in zip_longest(first, second) for each in pair if each is not None)
