"""Answers without an end of their own: the event streams of live pages."""

from __future__ import annotations

import asyncio


class Streams:
    """The tasks that answer with an event stream. Used on the event loop alone."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self.are_closed = False
        """Whether the service is shutting down."""

    def add(self, task: asyncio.Task[object] | None) -> None:
        """Register the task that answers a request; it is forgotten when it ends."""
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Cancel all streams."""
        self.are_closed = True
        for task in list(self._tasks):
            task.cancel()
