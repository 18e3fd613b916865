"""All files of one model: values come in pieces, are cast into blocks of the files, and are written past the page
cache."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from ..format.arrays import numpy_dtype
from ..io.buffers import Slabs
from ..io.closing import Closing
from ..io.files import Files
from .cast import Overflow, cast_into
from .file import BLOCK_BYTES, BlockFile, make_file
from .layout import FileLayout, index_document, index_file

_MOST_NAMED = 20


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Values of one weight that its new type cannot hold."""

    name: str
    count: int


class WeightsWriter(Closing):
    """Writes the files `layouts` into `folder`; usable from several threads. Close it, or use it in a `with` block.

    Every element of every weight is put once, roughly in the order of the layouts; then `finish`. Raises DiskFullError
    if the folder's file system lacks room.
    """

    def __init__(self, files: Files, layouts: Sequence[FileLayout], folder: Path, *, overflow: Overflow) -> None:
        make_files(files, layouts, folder)
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
        self._slabs = Slabs(BLOCK_BYTES)
        self._lost: dict[str, int] = {}
        self._lock = threading.Lock()

    def lost(self) -> list[Lost]:
        """Return which weights had values that could not be held."""
        return [Lost(name=name, count=count) for name, count in sorted(self._lost.items())]

    def put(self, array: str, first: int, values: npt.NDArray[Any]) -> None:
        """Write `values`, 1-D, as the flat elements from `first` on of the weight that comes from `array`.

        With overflow "error", nothing more is written once a value could not be held: later values are only looked at, so
        that every such weight can be named.
        """
        layout, weight, offset = self._places[array]
        itemsize = weight.itemsize
        lost = 0

        def put(start: int, view: npt.NDArray[np.uint8]) -> None:
            nonlocal lost
            piece = values[start // itemsize : (start + view.size) // itemsize]
            lost += cast_into(piece, view.view(numpy_dtype(weight.dtype)), weight.dtype, self._overflow)

        if self._is_refused:
            put(0, np.empty(values.size * itemsize, np.uint8))
        else:
            self._file(layout).fill(offset + first * itemsize, values.size * itemsize, put)
        if lost:
            with self._lock:
                self._lost[weight.name] = self._lost.get(weight.name, 0) + lost

    @property
    def _is_refused(self) -> bool:
        return bool(self._lost) and self._overflow == "error"

    def _file(self, layout: FileLayout) -> BlockFile:
        with self._lock:
            if layout.name not in self._open:
                file = BlockFile(self._files, self._folder / layout.name, layout.file_bytes, self._slabs)
                self._open[layout.name] = file
                header = np.frombuffer(layout.header, np.uint8)
                file.fill(0, header.size, lambda start, view: np.copyto(view, header[start : start + view.size]))
            return self._open[layout.name]

    def finish(self) -> list[str]:
        """Complete the files; return their names, with that of an index if there are several.

        Does nothing and returns no name if values could not be held
        and overflow is "error".
        """
        if self._is_refused:
            return []
        for layout in self._layouts:
            file = self._file(layout)
            if not file.is_filled:
                raise CheckpointError(f"{file.path} was not filled; this is a bug")
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


def make_files(files: Files, layouts: Sequence[FileLayout], folder: Path) -> None:
    """Make the files that are filled then. Raises DiskFullError if the folder's file system lacks room."""
    needed = sum(layout.file_bytes for layout in layouts)
    files.require_room(folder, needed, f"the weights need {needed} bytes")
    for layout in layouts:
        make_file(files, folder / layout.name, layout.file_bytes)


def lost_text(lost: Sequence[Lost], dtype: str, advice: str) -> str:
    """Return the message for values that `dtype` cannot hold; `advice` says what to do."""
    named = [f"\n  {each.name}: {each.count} value(s)" for each in lost[:_MOST_NAMED]]
    more = f"\n  and {len(lost) - _MOST_NAMED} more" if len(lost) > _MOST_NAMED else ""
    return f"{len(lost)} tensor(s) have values that {dtype} cannot hold; nothing was written. {advice}:{''.join(named)}{more}"
