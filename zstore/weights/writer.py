"""The files of one model: values come in pieces from several threads, are cast into blocks of the files, and written past
the page cache."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError, DiskFullError
from ..format.arrays import numpy_dtype
from ..io.buffers import PAGE_BYTES, Bytes, make_slab
from ..io.files import Files, OpenFile
from .cast import Overflow, cast_into
from .layout import FileLayout, index_document, index_file

BLOCK_BYTES = 4 * 1024 * 1024
_MOST_NAMED = 20

Lost = dict[str, int]
"""How many values of a weight its new type cannot hold, by the weight's name."""


@dataclass(eq=False)
class _Block:
    """A block of the file that is not complete."""

    slab: Bytes
    missing_bytes: int


class BlockFile:
    """The new file `path` of `nbytes`. Every byte is filled once; a block is written when it is complete.

    What is filled roughly in order needs memory for a few blocks only; it is taken from `free`, blocks that no file needs
    now, and put there again. Complete and durable once `finish` returned.
    """

    def __init__(self, files: Files, path: Path, nbytes: int, free: list[Bytes]) -> None:
        self.path = path
        self.nbytes = nbytes
        self._files = files
        self._free = free
        self._blocks: dict[int, _Block] = {}
        self._lock = threading.Lock()
        self._missing_bytes = nbytes
        self._cleanup = contextlib.ExitStack()
        self._file: OpenFile = self._cleanup.enter_context(files.opened(path, write=True, create=True))
        try:
            files.allocate(self._file, _pages(nbytes))
        except BaseException:
            self._cleanup.close()
            raise

    @property
    def is_filled(self) -> bool:
        """Whether every byte was filled and written."""
        with self._lock:
            return self._missing_bytes == 0

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
                try:
                    slab = self._free.pop()  # by no other thread at the same time
                except IndexError:
                    slab = make_slab(BLOCK_BYTES)
                self._blocks[number] = _Block(slab, size)
            return self._blocks[number]

    def _write(self, number: int, block: _Block) -> None:
        size = min(BLOCK_BYTES, self.nbytes - number * BLOCK_BYTES)
        padded = _pages(size)
        block.slab[size:padded] = 0
        self._files.write_from(self._file, block.slab[:padded], number * BLOCK_BYTES)
        with self._lock:
            del self._blocks[number]
            self._missing_bytes -= size
        self._free.append(block.slab)

    def finish(self) -> None:
        """Cut the last block's padding off, make the file durable and close it."""
        with self._cleanup:
            os.truncate(self.path, self.nbytes)
            self._files.sync_data(self._file)

    def close(self) -> None:
        """Close the file as it is; a second call does nothing."""
        self._cleanup.close()


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class WeightsWriter:
    """Writes the files `layouts` into `folder`; usable from several threads. Close it, or use it in a `with` block.

    Every element of every weight is put once, roughly in the order of the layouts; then `finish`. Raises DiskFullError
    where the folder's file system lacks room.
    """

    def __init__(self, files: Files, layouts: Sequence[FileLayout], folder: Path, *, overflow: Overflow) -> None:
        needed = sum(layout.file_bytes for layout in layouts)
        free = files.free_bytes(folder)
        if needed > free:
            raise DiskFullError(f"the weights need {needed} bytes, but only {free} are free", path=str(folder))
        self._files = files
        self._layouts = layouts
        self._folder = folder
        self._overflow = overflow
        self._places = {
            weight.array: (layout, weight, offset)
            for layout in layouts
            for weight, offset in zip(layout.weights, layout.offsets, strict=True)
        }
        self._open: dict[str, BlockFile] = {}
        self._free: list[Bytes] = []
        """Blocks of memory that no file needs now."""
        self.lost: Lost = {}
        self._lock = threading.Lock()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the blocks that were in memory at the same time, at most; known once all is written."""
        return len(self._free) * BLOCK_BYTES

    def put(self, array: str, first: int, values: npt.NDArray[Any]) -> None:
        """Write `values`, 1-D, as the flat elements from `first` on of the weight that comes from `array`.

        With overflow "error", nothing more is written once a value could not be held: the rest is only looked at, so
        that every such weight can be named.
        """
        layout, weight, offset = self._places[array]
        itemsize = weight.itemsize
        lost = 0

        def put(start: int, view: Bytes) -> None:
            nonlocal lost
            piece = values[start // itemsize : (start + view.size) // itemsize]
            lost += cast_into(piece, view.view(numpy_dtype(weight.dtype)), weight.dtype, self._overflow)

        if self._is_refused:
            put(0, np.empty(values.size * itemsize, np.uint8))
        else:
            self._file(layout).fill(offset + first * itemsize, values.size * itemsize, put)
        if lost:
            with self._lock:
                self.lost[weight.name] = self.lost.get(weight.name, 0) + lost

    @property
    def _is_refused(self) -> bool:
        return bool(self.lost) and self._overflow == "error"

    def _file(self, layout: FileLayout) -> BlockFile:
        with self._lock:
            if layout.name not in self._open:
                file = BlockFile(self._files, self._folder / layout.name, layout.file_bytes, self._free)
                self._open[layout.name] = file
                header = np.frombuffer(layout.header, np.uint8)
                file.fill(0, header.size, lambda start, view: np.copyto(view, header[start : start + view.size]))
            return self._open[layout.name]

    def finish(self) -> list[str]:
        """Make all files durable, with an index where there are several; return their names, the index last.

        Does nothing and returns no name where values could not be held and overflow is "error".
        """
        if self._is_refused:
            return []
        for layout in self._layouts:
            file = self._file(layout)
            if not file.is_filled:
                raise CheckpointError(f"{file.path} was not filled; this is a bug")
            file.finish()
        names = [layout.name for layout in self._layouts]
        if len(names) > 1:
            names.append(index_file(self._layouts))
            document = json.dumps(index_document(self._layouts), indent=2).encode()
            self._files.write_small(self._folder / names[-1], document)
        return names

    def close(self) -> None:
        """Close the files as they are; a second call does nothing."""
        for file in self._open.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def lost_text(lost: Lost, dtype: str, advice: str) -> str:
    """Return the message for values that `dtype` cannot hold; `advice` says what to do."""
    named = [f"\n  {name}: {count} value(s)" for name, count in sorted(lost.items())[:_MOST_NAMED]]
    more = f"\n  and {len(lost) - _MOST_NAMED} more" if len(lost) > _MOST_NAMED else ""
    return f"{len(lost)} tensor(s) have values that {dtype} cannot hold; nothing was written. {advice}:{''.join(named)}{more}"
