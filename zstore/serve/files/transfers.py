"""Reading files for clients: by blocks, in threads, in bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from aiofiles.threadpool import wrap

from ...io.closing import Closing
from .opened import Opened
from .ranges import Part

_BLOCK_BYTES = 1024 * 1024
_LEAST_BLOCK_BYTES = 64 * 1024
_REMOTE_BLOCK_BYTES = 4 * 1024 * 1024
_NUM_THREADS = 16


class Transfers(Closing):
    """Files on their way to clients: the threads that read them, and how much each may hold."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._under_way = 0
        self.threads = ThreadPoolExecutor(_NUM_THREADS, "zstore-files")

    def block_bytes(self, most_bytes: int) -> int:
        """Return the bytes that a transfer reads at a time: each holds a block that is read and one that is sent."""
        share = self._memory_bytes // (2 * max(1, self._under_way))
        return max(_LEAST_BLOCK_BYTES, min(most_bytes, share))

    async def blocks(self, opened: Opened, part: Part) -> AsyncIterator[bytes]:
        """Yield the bytes of `part`. Raises EOFError if the file has become shorter."""
        self._under_way += 1
        try:
            at = part.start
            file = None if opened.file is None else wrap(opened.file, executor=self.threads)
            if opened.file is not None:
                opened.file.seek(at)
            while at < part.stop:
                if file is not None:
                    data = await file.read(min(self.block_bytes(_BLOCK_BYTES), part.stop - at))
                else:
                    stop = min(at + self.block_bytes(_REMOTE_BLOCK_BYTES), part.stop)
                    data = await asyncio.get_running_loop().run_in_executor(self.threads, opened.read, at, stop)
                if not data:
                    raise EOFError(f"{opened.folder.location_of(opened.path)} ended at {at} of {part.stop} bytes")
                at += len(data)
                yield data
        finally:
            self._under_way -= 1

    def close(self) -> None:
        """End the threads, once they have read all requested blocks."""
        self.threads.shutdown(wait=True, cancel_futures=True)
