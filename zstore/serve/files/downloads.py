"""Weights on their way to clients: the files that they are laid out in, blocks made ahead in threads, and the memory of all
of them together.

[Note: memory of downloads]
Memory is counted in units of 1 MiB. A download has room for two blocks while it lasts: one that is sent, one that is made.
More are made ahead as long as a quarter of all memory stays free and nobody waits. The first downloads have large blocks,
which are made faster; later ones, once half of the memory is taken, small ones. A slow client holds its blocks and no
more. If there is no room for two blocks, a download waits a while for others to end, and is then refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from anyio import CapacityLimiter, to_thread

from ...checkpoint.reader import CheckpointReader
from ...weights.from_checkpoint import DTYPES, list_weights
from ...weights.layout import FileLayout, plan_files
from ..cache import Cache

UNIT_BYTES = 1024 * 1024
_LARGE, _SMALL = 4, 1
"""Units of a block."""
_OWN_BLOCKS = 2
_MOST_BLOCKS = 6
_NUM_THREADS = 4
_WAIT_S = 20.0
_MOST_PLANS = 8
_MOST_REFUSED = 256

Make = Callable[[], memoryview]
"""Makes a block's bytes; called in a thread."""
Cut = Callable[[int], Iterator[Make]]
"""Returns functions that make the blocks, in order, of at most so many bytes each."""


class BusyError(Exception):
    """There are as many downloads as memory allows."""


class Downloads:
    """The state that all downloads share; of one event loop. `memory_bytes` bounds all their blocks together."""

    def __init__(self, memory_bytes: int, *, wait_s: float = _WAIT_S) -> None:
        self._all = self._free = max(_OWN_BLOCKS * _SMALL, memory_bytes // UNIT_BYTES)
        self._wait_s = wait_s
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._threads: CapacityLimiter | None = None
        self.peak_bytes = 0
        """Peak memory so far."""

    @property
    def taken_bytes(self) -> int:
        """Memory that downloads hold now."""
        return (self._all - self._free) * UNIT_BYTES

    @property
    def threads(self) -> CapacityLimiter:
        """The limiter of the threads that make blocks; belongs to the event loop that asks first."""
        if self._threads is None:
            self._threads = CapacityLimiter(_NUM_THREADS)
        return self._threads

    @contextlib.asynccontextmanager
    async def download(self, cut: Cut) -> AsyncIterator[Download]:
        """Yield the download of the blocks that `cut` makes, as soon as there is room; raises BusyError if there is none
        for long."""
        least = _OWN_BLOCKS * _SMALL
        if self._waiting or self._free < least:
            await self._wait_for(least)
        size = _LARGE if 2 * self._free >= self._all and self._free >= _OWN_BLOCKS * _LARGE else _SMALL
        self._take(_OWN_BLOCKS * size)
        download = Download(self, size, cut(size * UNIT_BYTES))
        try:
            yield download
        finally:
            download.close()

    async def _wait_for(self, units: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._wait_s):
                while self._waiting[0] is not turn or self._free < units:
                    await turn
                    turn = self._waiting[0] = asyncio.get_running_loop().create_future()
        except TimeoutError as error:
            raise BusyError("as many downloads of weights are under way as memory allows") from error
        finally:
            self._waiting.remove(turn)
            self._wake()

    def _wake(self) -> None:
        if self._waiting and not self._waiting[0].done():
            self._waiting[0].set_result(None)

    def _take(self, units: int) -> None:
        self._free -= units
        self.peak_bytes = max(self.peak_bytes, self.taken_bytes)

    def take_spare(self, units: int) -> bool:
        """Take memory to make a block ahead; return whether there is enough of it."""
        if self._waiting or self._free - units < self._all // 4:
            return False
        self._take(units)
        return True

    def give_back(self, units: int) -> None:
        """Give memory back."""
        self._free += units
        self._wake()


class Plans:
    """The layouts that were asked for last, by checkpoint, and which weights fit no type. Usable from any thread."""

    def __init__(self) -> None:
        self._layouts: Cache[tuple[str, str, int], list[FileLayout]] = Cache(_MOST_PLANS)
        self._refused: Cache[tuple[str, str], str] = Cache(_MOST_REFUSED)

    def layouts(self, reader: CheckpointReader, dtype: str, max_file_bytes: int) -> list[FileLayout]:
        """Return the files of the model, as `zstore consolidate` writes them."""
        key = (reader.record.id, dtype, max_file_bytes)
        found = self._layouts.get(key)
        return found or self._layouts.put(key, plan_files(list_weights(reader, DTYPES[dtype]), max_file_bytes))

    def refuse(self, reader: CheckpointReader, dtype: str, reason: str) -> None:
        """Remember why the weights cannot be written as `dtype`, which is found out on the way."""
        self._refused.put((reader.record.id, dtype), reason)

    def refused(self, reader: CheckpointReader, dtype: str) -> str | None:
        """Return why the weights cannot be written as `dtype`; None as far as is known."""
        return self._refused.get((reader.record.id, dtype))


class Download:
    """Blocks in order. Used by one task. `size` is a block's memory in units, and it starts with that of two blocks."""

    def __init__(self, shared: Downloads, size: int, blocks: Iterator[Make]) -> None:
        self._shared = shared
        self._size = size
        self._blocks = blocks
        self._coming: deque[asyncio.Task[memoryview]] = deque()
        self._room = _OWN_BLOCKS
        """Number of blocks that it has memory for."""
        self._ended = False

    async def next(self) -> memoryview | None:
        """Return the next block, None after the last; the one before must have been sent. Raises the errors of making it."""
        self._make_ahead()
        self._shrink()
        if not self._coming:
            return None
        block = await self._coming[0]
        self._coming.popleft()
        return block

    def _make_ahead(self) -> None:
        while not self._ended and len(self._coming) < _MOST_BLOCKS:
            if len(self._coming) == self._room:
                if not self._shared.take_spare(self._size):
                    return
                self._room += 1
            make = next(self._blocks, None)
            if make is None:
                self._ended = True
                return
            self._coming.append(asyncio.create_task(self._run(make)))

    async def _run(self, make: Make) -> memoryview:
        return await to_thread.run_sync(make, limiter=self._shared.threads)

    def _shrink(self) -> None:
        """Release memory that is not needed now."""
        spare = self._room - max(_OWN_BLOCKS, len(self._coming))
        if spare > 0:
            self._room -= spare
            self._shared.give_back(spare * self._size)

    def close(self) -> None:
        """Make no more blocks. One that a thread is busy with keeps its memory until it is done."""
        self._ended = True
        at_work = [task for task in self._coming if not task.done()]
        for task in self._coming:
            task.add_done_callback(_look_at)
        self._coming.clear()
        self._shared.give_back((self._room - len(at_work)) * self._size)
        for task in at_work:
            task.cancel()
            task.add_done_callback(lambda _: self._shared.give_back(self._size))


def _look_at(task: asyncio.Task[memoryview]) -> None:
    """Retrieve an error that nobody waits for."""
    if not task.cancelled():
        task.exception()
