"""Reading files for clients: by blocks, in threads, in bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from ...io.closing import Closing
from .opened import Opened
from .ranges import Part

_BLOCK_BYTES = 1024 * 1024
_LEAST_BLOCK_BYTES = 64 * 1024
_REMOTE_BLOCK_BYTES = 4 * 1024 * 1024
_NUM_THREADS = 16
_FEW = 4

ZERO_COPY = "http.response.zerocopysend"
"""ASGI's extension, and the type of its message, by which the kernel sends `count` bytes of an open `file` from `offset` on."""


class FileTransfers(Closing):
    """Files on their way to clients: the threads that read them, and how much each may hold."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._under_way = 0
        self.threads = ThreadPoolExecutor(_NUM_THREADS, "zstore-files")

    def block_bytes(self, most_bytes: int) -> int:
        """Return the bytes that a transfer reads at a time: each holds a block that is read and one that is sent."""
        share = self._memory_bytes // (2 * max(1, self._under_way))
        return max(_LEAST_BLOCK_BYTES, min(most_bytes, share))

    async def blocks(self, opened: Opened, part: Part, *, cached: bool = False) -> AsyncIterator[bytes | range]:
        """Yield the bytes of `part`; with `cached` only their range if the page cache has them. Raises EOFError if the file has
        become shorter."""
        self._under_way += 1
        try:
            at, loop = part.start, asyncio.get_running_loop()
            while at < part.stop:
                # Of many at a time little each: the event loop has to come to everybody else in between.
                stop = min(at + max(_LEAST_BLOCK_BYTES, _BLOCK_BYTES * _FEW // max(_FEW, self._under_way)), part.stop)
                if cached and opened.file is not None and _is_cached(opened.file.fileno(), at, stop):
                    yield range(at, stop)
                    at = stop
                    continue
                most_bytes = _REMOTE_BLOCK_BYTES if opened.file is None else _BLOCK_BYTES
                stop = min(at + self.block_bytes(most_bytes), part.stop)
                data = await loop.run_in_executor(self.threads, opened.read, at, stop)
                if not data:
                    raise EOFError(f"{opened.folder.location_of(opened.path)} ended at {at} of {part.stop} bytes")
                at += len(data)
                yield data
        finally:
            self._under_way -= 1

    def close(self) -> None:
        """End the threads, once they have read all requested blocks."""
        self.threads.shutdown(wait=True, cancel_futures=True)


def _is_cached(fd: int, start: int, stop: int) -> bool:
    """Return whether the page cache has the ends of a range of a file, and so most likely all of it."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    with contextlib.suppress(OSError):  # EAGAIN: it has to be read
        return all(os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT) for at in (start, stop - 1))
    return False
