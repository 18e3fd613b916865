"""Weights on their way to clients: blocks made ahead in threads, and the memory of all of them together.

[Note: memory of downloads]
A download may have two blocks at any time: one that is sent, one that is made. More are made ahead while blocks are left
that all share, so that one client alone is served fast; a slow one holds what it has and no more. There are as many
downloads at a time as have two blocks each; others wait a while for one to end, and are turned away then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from anyio import CapacityLimiter, to_thread

BLOCK_BYTES = 1024 * 1024
OWN_BLOCKS = 2
_MOST_BLOCKS = 8
_NUM_THREADS = 8
_WAIT_S = 20.0

Make = Callable[[], memoryview]
"""Makes a block's bytes; called in a thread."""


class BusyError(Exception):
    """There are as many downloads as memory allows."""


class Downloads:
    """What all downloads share; of one event loop. `memory_bytes` is what all their blocks take together."""

    def __init__(self, memory_bytes: int, *, wait_s: float = _WAIT_S) -> None:
        blocks = max(2 * OWN_BLOCKS, memory_bytes // BLOCK_BYTES)
        self.most = blocks // 2 // OWN_BLOCKS
        """Downloads at a time."""
        self._wait_s = wait_s
        self._spare = blocks - self.most * OWN_BLOCKS
        self._slots = asyncio.Semaphore(self.most)
        self._threads: CapacityLimiter | None = None
        self.held = 0
        """Blocks that are made or sent."""
        self.peak = 0
        """Most of them at a time so far."""

    @property
    def threads(self) -> CapacityLimiter:
        """What bounds the threads that make blocks; belongs to the event loop that asks first."""
        if self._threads is None:
            self._threads = CapacityLimiter(_NUM_THREADS)
        return self._threads

    @contextlib.asynccontextmanager
    async def download(self, blocks: Iterator[Make]) -> AsyncIterator[Download]:
        """Yield the download of `blocks`, as soon as there is room for it; raises BusyError where there is none for long."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._slots.acquire()
        except TimeoutError as error:
            raise BusyError(f"{self.most} downloads of weights are under way, as many as memory allows") from error
        download = Download(self, blocks)
        try:
            yield download
        finally:
            download.close()

    def take(self, *, spare: bool) -> bool:
        """Count a block; return whether there is one. A `spare` one is not the download's own."""
        if spare and not self._spare:
            return False
        self._spare -= spare
        self.held += 1
        self.peak = max(self.peak, self.held)
        return True

    def give_back(self, *, spare: bool) -> None:
        """Count a block as free again."""
        self._spare += spare
        self.held -= 1

    def end(self) -> None:
        """Let another download begin."""
        self._slots.release()


class Download:
    """Blocks in order. Used by one task."""

    def __init__(self, shared: Downloads, blocks: Iterator[Make]) -> None:
        self._shared = shared
        self._blocks = blocks
        self._made: deque[asyncio.Task[memoryview]] = deque()
        self._num_held = 0
        """Blocks that are made, waited for, or sent."""
        self._closed = False

    async def next(self) -> memoryview | None:
        """Return the next block, None after the last; the one before must have been sent. Raises what making it raises."""
        if self._num_held > len(self._made):
            self._release()
        self._make_ahead()
        return await self._made.popleft() if self._made else None

    def _make_ahead(self) -> None:
        while self._num_held < _MOST_BLOCKS and self._shared.take(spare=self._num_held >= OWN_BLOCKS):
            self._num_held += 1
            make = next(self._blocks, None)
            if make is None:
                self._release()
                return
            self._made.append(asyncio.create_task(self._run(make)))

    async def _run(self, make: Make) -> memoryview:
        return await to_thread.run_sync(make, limiter=self._shared.threads)

    def _release(self, _: object = None) -> None:
        self._num_held -= 1
        self._shared.give_back(spare=self._num_held >= OWN_BLOCKS)
        if self._closed and not self._num_held:
            self._shared.end()

    def close(self) -> None:
        """Make no more. What a thread is busy with counts until it is done."""
        waiting = len(self._made)
        for _ in range(self._num_held - waiting):  # the one that was sent
            self._release()
        self._closed = True
        if not self._num_held:
            self._shared.end()
        for task in self._made:
            task.cancel()
            task.add_done_callback(_look_at)
            task.add_done_callback(self._release)
        self._made.clear()


def _look_at(task: asyncio.Task[memoryview]) -> None:
    """Take notice of an error that nobody waits for."""
    if not task.cancelled():
        task.exception()
