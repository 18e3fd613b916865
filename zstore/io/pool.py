"""Threads for tasks that wait for others: a few that carry out tasks in order, and one for a task that takes long."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import TypeVar

from ..closing import Closing
from .queue import Ticket, promise

T = TypeVar("T")


def num_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers(Closing):
    """`num_threads` threads, started at once: a save that ends behind the interpreter's last line may start none.

    Unlike the I/O threads, these may wait for tickets and buffers. Close it, or use it in a `with` block.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._tasks: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True) for i in range(max(1, num_threads))
        ]
        for thread in self._threads:
            thread.start()

    def run(self, tasks: Iterable[Callable[[], T]]) -> list[T]:
        """Carry out all tasks and return their results in order; must not be called from a task.

        The first error stops those that have not begun, and is raised when the others ended.
        """
        batch = list(tasks)
        results: list[T | None] = [None] * len(batch)
        errors: list[BaseException] = []
        left = len(batch)

        def carry_out(number: int) -> None:
            nonlocal left
            try:
                if not errors:
                    results[number] = batch[number]()
            except BaseException as error:
                errors.append(error)
            with self._changed:
                left -= 1
                if left == 0:
                    self._changed.notify_all()

        with self._changed:
            self._tasks.extend(lambda number=number: carry_out(number) for number in range(len(batch)))  # type: ignore[misc]
            self._changed.notify_all()
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
        if not self._threads:
            raise RuntimeError("a task after the shutdown of its threads")
        ticket, carry_out = promise(task)
        with self._changed:
            self._tasks.append(carry_out)
            self._changed.notify()
        return ticket

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closed)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            task()
            del task  # what it holds is not this thread's to keep

    def close(self) -> None:
        """End the threads once nothing is queued."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads.clear()


def run_in_thread(task: Callable[[], T], name: str) -> Ticket[T]:
    """Carry out `task` in a thread of its own, called `name`, for whose end the interpreter waits at its own."""
    ticket, carry_out = promise(task)
    threading.Thread(target=carry_out, name=name, daemon=False).start()
    return ticket


def in_turn(first: Sequence[T], second: Sequence[T]) -> list[T]:
    """Return all of both, each in order, one of each as long as there are some."""
    return [each for pair in zip_longest(first, second) for each in pair if each is not None]
