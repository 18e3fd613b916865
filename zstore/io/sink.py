"""A file that is written from its beginning to its end, in pieces of any size."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np

from ..format.arrays import Bytes
from .files import Files, OpenFile


class NewFile:
    """The new file `path`, closed with `opened`. Goes through the page cache, so that pieces need no alignment."""

    def __init__(self, files: Files, path: str | Path, opened: ExitStack) -> None:
        self._files = files
        self._file: OpenFile = opened.enter_context(files.opened(path, write=True, create=True, direct=False))
        self.offset = 0

    def write(self, data: bytes | bytearray | Bytes) -> None:
        """Write at the end."""
        part = np.frombuffer(data, np.uint8) if isinstance(data, bytes | bytearray) else data
        self._files.write_from(self._file, part, self.offset)
        self.offset += part.size

    def patch(self, offset: int, data: bytes) -> None:
        """Replace bytes that were written."""
        self._files.write_from(self._file, np.frombuffer(data, np.uint8), offset)

    def finish(self) -> None:
        """Make the file durable."""
        self._files.sync_data(self._file)
