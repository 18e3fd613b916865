"""Files of weights that are cast once for all who download them, and kept.

As fast as the drive gives its values: each is sent the bytes that are there, and waits for more. A file is kept when it is
whole, and given up when nobody downloads it any more. Who wants a part far ahead, or finds that it failed, has a download of
blocks of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from anyio import to_thread

from ...errors import ZstoreError
from ..kept import KeptFiles
from .downloads import Block, BusyError, Cut, Download, Downloads

_log = logging.getLogger(__name__)

_FAR_BYTES = 64 * 1024 * 1024


class Castings:
    """The files that are being cast, and those in `kept` (None: there are none). Of one event loop."""

    def __init__(self, downloads: Downloads, kept: KeptFiles | None) -> None:
        self._downloads, self._kept = downloads, kept
        self._under_way: dict[Path, Casting] = {}

    def open(self, etag: str) -> BinaryIO | None:
        """Return the file with a tag, which the caller closes; None if it is not kept. Usable from any thread."""
        with contextlib.suppress(FileNotFoundError):  # it may go meanwhile
            if self._kept is not None and (place := self._kept.get(self._kept.place("weights", etag))) is not None:
                return place.open("rb", buffering=0)
        return None

    def join(self, etag: str, size: int, start: int, cut: Cut) -> Casting | None:
        """Return the file of `size` bytes that the blocks of `cut` make, unless it is not to be kept, or byte `start` is far
        ahead."""
        if self._kept is None or (self._kept.most_bytes is not None and size > self._kept.most_bytes):
            return None
        place = self._kept.place("weights", etag)
        found = self._under_way.get(place)
        if start - (0 if found is None else found.done_bytes) > _FAR_BYTES:
            return None
        if found is None:
            try:
                found = self._under_way[place] = Casting(self._kept, place, size, self._downloads.cast(cut))
            except (OSError, ZstoreError) as error:
                _log.warning("weights are not kept: %s", error)
                return None
            found.task.add_done_callback(lambda _: self._under_way.pop(place))
        return found


class Casting:
    """A file of weights that is being made, for all who download it. Of one event loop."""

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
                async for block in blocks:
                    self.done_bytes += await to_thread.run_sync(_write, self.file, block)
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


def _write(file: BinaryIO, block: Block) -> int:
    """Write a block, and return its bytes."""
    left = memoryview(cast(bytes, block))
    while left:
        left = left[file.write(left) :]
    return len(block)
