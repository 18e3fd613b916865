"""Weights on their way to clients: the files that they are laid out in, blocks made ahead in threads, and the memory of all
of them together.

[Note: memory of downloads]
Memory is counted in units of 1 MiB. A download has room for two blocks while it lasts: one that is sent, one that is made.
More are made ahead as long as a quarter of all memory stays free and nobody waits. The first downloads have large blocks,
which are made faster; later ones, once half of the memory is taken, small ones. A slow client holds its blocks and no
more. If there is no room for two blocks, a download waits a while for others to end, and is then refused.

[Note: files that are kept]
With a folder for it, a file is cast once for all who download it, as fast as the drive gives its values: each is sent the
bytes that are there, and waits for more. It is kept when it is whole, and given up when nobody downloads it any more. Who wants
a part far ahead, or finds that it failed, has a download of blocks of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from anyio import CapacityLimiter, to_thread

from ...checkpoint.reader import CheckpointReader
from ...errors import ZstoreError
from ...weights.from_checkpoint import DTYPES, list_weights
from ...weights.layout import FileLayout, plan_files
from ..cache import Cache
from ..kept import KeptFiles

_log = logging.getLogger(__name__)

UNIT_BYTES = 1024 * 1024
_LARGE, _SMALL = 4, 1
"""Units of a block."""
_OWN_BLOCKS = 2
_MOST_BLOCKS = 6
_NUM_THREADS = 4
_WAIT_S = 20.0
_FAR_BYTES = 64 * 1024 * 1024
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
        self._castings: dict[Path, Casting] = {}

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

    def casting(self, kept: KeptFiles, place: Path, size: int, start: int, cut: Cut) -> Casting | None:
        """Return the file of `size` bytes that the blocks of `cut` make to be kept, unless byte `start` is far ahead."""
        found = self._castings.get(place)
        if start - (0 if found is None else found.done_bytes) > _FAR_BYTES:
            return None
        if found is None:
            try:
                found = self._castings[place] = Casting(kept, place, size, self.download(cut))
            except (OSError, ZstoreError) as error:
                _log.warning("weights are not kept: %s", error)
                return None
            found.task.add_done_callback(lambda _: self._castings.pop(place))
        return found

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


class Casting:
    """A file of weights that is being made, for all who download it. Of one event loop. See [Note: files that are kept]."""

    def __init__(
        self, kept: KeptFiles, place: Path, size: int, download: contextlib.AbstractAsyncContextManager[Download]
    ) -> None:
        self._kept, self._place, self._part = kept, place, kept.part(place)
        self.file = self._part.open("w+b", buffering=0)
        self.done_bytes, self._size = 0, size
        self._num_readers = 0
        self._more = asyncio.Event()
        self.task = asyncio.create_task(self._make(download))
        self.task.add_done_callback(lambda _: self._tell())
        self.task.add_done_callback(lambda _: self._close())

    async def _make(self, download: contextlib.AbstractAsyncContextManager[Download]) -> None:
        try:
            async with download as blocks:
                while (block := await blocks.next()) is not None:
                    await to_thread.run_sync(_write, self.file, block)
                    self.done_bytes += len(block)
                    self._tell()
            await to_thread.run_sync(self._kept.keep, self._part, self._place)
        except (BusyError, ZstoreError, OSError) as error:  # each reader finds out by blocks of its own
            _log.info("weights are not kept: %s", error)

    async def more(self, at: int) -> int:
        """Wait for bytes behind `at`; return how many there are in all, no more than that if it ended without."""
        while self.done_bytes <= at and not self.task.done():
            await self._more.wait()
        return self.done_bytes

    def _tell(self) -> None:
        """Wake whoever waits, for bytes or the end."""
        self._more.set()
        self._more = asyncio.Event()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the file open; it is given up when nobody does any more."""
        self._num_readers += 1
        try:
            yield
        finally:
            self._num_readers -= 1
            if not self._num_readers and self.done_bytes < self._size:
                self.task.cancel()
            self._close()

    def _close(self) -> None:
        if self.task.done() and not self._num_readers:
            self.file.close()
            self._part.unlink(missing_ok=True)


def _write(file: BinaryIO, block: memoryview) -> None:
    while block:
        block = block[file.write(block) :]


def _look_at(task: asyncio.Task[memoryview]) -> None:
    """Retrieve an error that nobody waits for."""
    if not task.cancelled():
        task.exception()
