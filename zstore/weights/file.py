"""A file of known size, written in any order from several threads, past the page cache."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..format.arrays import Bytes, round_up
from ..io.buffers import PAGE_BYTES, Slabs
from ..io.files import Files, OpenFile

BLOCK_BYTES = 4 * 1024 * 1024


@dataclass(eq=False)
class _Block:
    """A block of the file that is not complete."""

    slab: Bytes
    missing_bytes: int


def make_file(files: Files, path: Path, nbytes: int) -> None:
    """Make the file that a `BlockFile` fills."""
    with files.opened(path, write=True, create=True) as file:
        files.allocate(file, round_up(nbytes, PAGE_BYTES))


class BlockFile:
    """The file `path` of `nbytes`, which `make_file` made. Every byte is filled once; a block is written when it is complete.

    Filling roughly in order needs memory for a few blocks only. With the last byte the file is made durable and closed: a
    model may have more files than a process may have open.
    """

    def __init__(self, files: Files, path: Path, nbytes: int, slabs: Slabs) -> None:
        self.path = path
        self.nbytes = nbytes
        self._files = files
        self._slabs = slabs
        self._blocks: dict[int, _Block] = {}
        self._lock = threading.Lock()
        self._missing_bytes = nbytes
        self._is_durable = False
        self._cleanup = ExitStack()
        self._file: OpenFile = self._cleanup.enter_context(files.opened(path, write=True))

    @property
    def is_filled(self) -> bool:
        """Whether every byte was filled, and is durable."""
        with self._lock:
            return self._is_durable

    def fill(self, offset: int, nbytes: int, put: Callable[[int, Bytes], None]) -> None:
        """Fill bytes `[offset, offset + nbytes)`: `put(start, view)` sets those from `offset + start` on, view by view.

        Returns when the blocks that this completed are written.
        """
        done = 0
        while done < nbytes:
            number, start = divmod(offset + done, BLOCK_BYTES)
            size = min(BLOCK_BYTES - start, nbytes - done)
            block = self._block(number)
            put(done, block.slab[start : start + size])
            with self._lock:
                block.missing_bytes -= size
                complete = block.missing_bytes == 0
            if complete:
                self._write(number, block)
            done += size

    def _block(self, number: int) -> _Block:
        with self._lock:
            if number not in self._blocks:
                size = min(BLOCK_BYTES, self.nbytes - number * BLOCK_BYTES)
                self._blocks[number] = _Block(self._slabs.acquire(), size)
            return self._blocks[number]

    def _write(self, number: int, block: _Block) -> None:
        size = min(BLOCK_BYTES, self.nbytes - number * BLOCK_BYTES)
        padded = round_up(size, PAGE_BYTES)
        block.slab[size:padded] = 0
        self._files.write_from(self._file, block.slab[:padded], number * BLOCK_BYTES)
        with self._lock:
            del self._blocks[number]
            self._missing_bytes -= size
            is_last = self._missing_bytes == 0
        self._slabs.release(block.slab)
        if is_last:
            self._finish()

    def _finish(self) -> None:
        """Cut the last block's padding off, make it durable and close the file."""
        with self._cleanup:
            os.truncate(self.path, self.nbytes)
            self._files.sync_data(self._file)
        with self._lock:
            self._is_durable = True

    def close(self) -> None:
        """Close the file as it is; a second call does nothing."""
        self._cleanup.close()
