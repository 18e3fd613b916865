"""Answers that go on until somebody ends them: live pages."""

from __future__ import annotations

import asyncio


class Endless:
    """The tasks of such answers. Used on the event loop alone."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self.is_over = False
        """Whether the service ends."""

    def add(self, task: asyncio.Task[object] | None) -> None:
        """Take up the task that answers a request."""
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def end(self) -> None:
        """Cancel them all."""
        self.is_over = True
        for task in list(self._tasks):
            task.cancel()
