"""Bytes on their way to clients: blocks of files that are read and of weights that are cast, made in threads, and the memory
of all of them together.

[Note: memory of downloads]
Half of the memory is for reads, which are never refused: each has a block that is read and one that is sent, smaller ones
among many. A block that the page cache has is not read but sent by the kernel.

The other half is for casts. One has room for two blocks while it lasts: one that is sent, one that is made. More are made
ahead as long as a quarter of this half stays free and nobody waits. The first casts have large blocks, which are made
faster; later ones, once half of the memory for casts is taken, small ones. A slow client holds its blocks and no more. If
there is no room for two blocks, a cast waits a while for others to end, and is then refused.

Casts, which take a core each, have other threads than reads, which wait for the drive.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial

from ...io.closing import Closing
from .opened import Opened
from .ranges import Part

BLOCK_BYTES = 1024 * 1024
"""Of a block that is read, and of a small one that is cast."""
_LARGE_BYTES = 4 * BLOCK_BYTES
"""Of a large block that is cast, and of one that is read from a URL."""
_LEAST_BYTES = 64 * 1024
_FEW = 4
_NUM_READING, _NUM_CASTING = 16, 4
_OWN_BLOCKS, _MOST_BLOCKS = 2, 6
_WAIT_S = 20.0

ZERO_COPY = "http.response.zerocopysend"
"""ASGI's extension, and the type of its message, by which the kernel sends `count` bytes of an open `file` from `offset` on."""

Block = bytes | memoryview | range
"""Bytes, or the range of a file that has them."""
Make = Callable[[], bytes | memoryview]
"""Makes a block; called in a thread."""
Cut = Callable[[int], Iterator[Make]]
"""Returns functions that make the blocks, in order, of at most so many bytes each."""


class BusyError(Exception):
    """There are as many casts as memory allows."""


class Downloads(Closing):
    """The memory and the threads of all downloads; of one event loop. See [Note: memory of downloads]."""

    def __init__(self, memory_bytes: int, *, wait_s: float = _WAIT_S) -> None:
        self._reading_bytes = memory_bytes // 2
        self._num_reads = 0
        self._casting_bytes = self._free_bytes = max(_OWN_BLOCKS * BLOCK_BYTES, memory_bytes // 2)
        self._wait_s = wait_s
        self._queue, self._given_back = asyncio.Lock(), asyncio.Event()
        self._readers = ThreadPoolExecutor(_NUM_READING, "zstore-read")
        self._casters = ThreadPoolExecutor(_NUM_CASTING, "zstore-cast")

    @property
    def taken_bytes(self) -> int:
        """Memory that casts hold now."""
        return self._casting_bytes - self._free_bytes

    @contextlib.contextmanager
    def read(self, opened: Opened, part: Part, *, cached: bool = False) -> Iterator[Download]:
        """Yield the download of `part` of a file; with `cached` its blocks are ranges where the page cache has the bytes.

        Its blocks raise EOFError if the file has become shorter.
        """
        self._num_reads += 1
        try:
            blocks = self._cut(opened, part, cached)
            with contextlib.closing(Download(self, self._readers, blocks, size=0, most_blocks=1)) as download:
                yield download
        finally:
            self._num_reads -= 1

    def _cut(self, opened: Opened, part: Part, cached: bool) -> Iterator[Make | range]:
        at, most_bytes = part.start, _LARGE_BYTES if opened.file is None else BLOCK_BYTES
        while at < part.stop:
            # Of many at a time little each: the event loop has to come to everybody else in between.
            stop = min(at + max(_LEAST_BYTES, BLOCK_BYTES * _FEW // max(_FEW, self._num_reads)), part.stop)
            if cached and opened.file is not None and _is_cached(opened.file.fileno(), at, stop):
                yield range(at, stop)
            else:
                share = self._reading_bytes // (2 * self._num_reads)
                stop = min(at + max(_LEAST_BYTES, min(most_bytes, share)), part.stop)
                yield partial(_read, opened, at, stop)
            at = stop

    @contextlib.asynccontextmanager
    async def cast(self, cut: Cut) -> AsyncIterator[Download]:
        """Yield the download of the blocks that `cut` makes, as soon as there is room; raises BusyError if there is none
        for long."""
        try:
            async with asyncio.timeout(self._wait_s), self._queue:
                while self._free_bytes < _OWN_BLOCKS * BLOCK_BYTES:
                    self._given_back.clear()
                    await self._given_back.wait()
                is_roomy = self._free_bytes >= max(_OWN_BLOCKS * _LARGE_BYTES, self._casting_bytes // 2)
                size = _LARGE_BYTES if is_roomy else BLOCK_BYTES
                self._free_bytes -= _OWN_BLOCKS * size
        except TimeoutError as error:
            raise BusyError("as many downloads of weights are under way as memory allows") from error
        with contextlib.closing(Download(self, self._casters, cut(size), size, _MOST_BLOCKS)) as download:
            yield download

    def take_spare(self, nbytes: int) -> bool:
        """Take memory to make a block ahead; return whether there is enough of it."""
        if self._queue.locked() or self._free_bytes - nbytes < self._casting_bytes // 4:
            return False
        self._free_bytes -= nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Give memory back."""
        self._free_bytes += nbytes
        self._given_back.set()

    def close(self) -> None:
        """End the threads, once they have made the blocks that they are at."""
        for threads in (self._readers, self._casters):
            threads.shutdown(wait=True, cancel_futures=True)


class Download:
    """Blocks in order, for one task, of which `most_blocks` at most are made and not yet sent. Each takes `size` bytes of the
    memory for casts, none if it is read, and it starts with that of two."""

    def __init__(
        self, shared: Downloads, threads: Executor, blocks: Iterator[Make | range], size: int, most_blocks: int
    ) -> None:
        self._shared, self._threads, self._blocks = shared, threads, blocks
        self._size, self._most_blocks = size, most_blocks
        self._coming: deque[Future[bytes | memoryview] | range] = deque()
        self._room = _OWN_BLOCKS
        """Number of blocks that it has memory for."""

    def __aiter__(self) -> AsyncIterator[Block]:
        return self

    async def __anext__(self) -> Block:
        """Return the next block; the one before must have been sent. Raises the errors of making it."""
        while len(self._coming) < self._most_blocks and self._has_room() and (make := next(self._blocks, None)):
            self._coming.append(make if isinstance(make, range) else self._threads.submit(make))
        spare = self._room - max(_OWN_BLOCKS, len(self._coming))
        self._room -= spare
        self._shared.give_back(spare * self._size)
        if not self._coming:
            raise StopAsyncIteration
        coming = self._coming[0]
        if isinstance(coming, Future):
            block: Block = await asyncio.wrap_future(coming)
        else:
            block = coming
        self._coming.popleft()
        return block

    def _has_room(self) -> bool:
        if len(self._coming) == self._room and self._shared.take_spare(self._size):
            self._room += 1
        return len(self._coming) < self._room

    def close(self) -> None:
        """Make no more blocks. One that a thread is busy with keeps its memory until it is done."""
        pending = [each for each in self._coming if isinstance(each, Future)]
        at_work = [each for each in pending if not each.cancel() and not each.done()]
        self._coming.clear()
        self._shared.give_back((self._room - len(at_work)) * self._size)
        for each in at_work:
            asyncio.wrap_future(each).add_done_callback(self._end)

    def _end(self, made: asyncio.Future[bytes | memoryview]) -> None:
        self._shared.give_back(self._size)
        if not made.cancelled():
            made.exception()  # nobody waits for it


def _read(opened: Opened, start: int, stop: int) -> bytes:
    data = b""
    while (at := start + len(data)) < stop:
        some = opened.read(at, stop)
        if not some:
            raise EOFError(f"{opened.folder.location_of(opened.path)} ended at {at} of {opened.size} bytes")
        data += some  # no copy of the first
    return data


def _is_cached(fd: int, start: int, stop: int) -> bool:
    """Return whether the page cache has the ends of a range of a file, and so most likely all of it."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    with contextlib.suppress(OSError):  # EAGAIN: it has to be read
        return all(os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT) for at in (start, stop - 1))
    return False
