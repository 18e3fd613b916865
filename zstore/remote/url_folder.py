"""The base of all folders behind URLs: small files, many at a time, and ranges of large ones."""

from __future__ import annotations

import contextlib
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ..checkpoint.folder import Folder, NetworkTraffic
from ..checkpoint.format import MAX_JSON_BYTES
from ..errors import CorruptionError, StorageError, UsageError, storage_error
from ..format.arrays import Bytes
from ..io.files import Files, OpenFile, ScatteredMemory
from ..io.pool import Workers
from ..io.shards import IoResources

NUM_THREADS = 16
"""Small files that are read at a time."""


class UrlFolder(Folder):
    """A folder that people call by a URL, `location`."""

    is_local = False
    traffic: NetworkTraffic

    def __init__(self, location: str, name: str, traffic: NetworkTraffic | None) -> None:
        super().__init__(location, name)
        self.traffic = traffic or NetworkTraffic()

    @property
    def path(self) -> Path:
        raise UsageError(f"{self.location} is behind a URL and has no path on this machine: read it through its reader")

    @abstractmethod
    def read_range(self, file: str, start: int, stop: int) -> bytes:
        """Return bytes `[start, stop)` of a file, fewer if it ends before.

        Raises FileNotFoundError if it is missing, StorageError for other failures.
        """

    @abstractmethod
    def size(self, file: str) -> int:
        """Return the file's bytes; FileNotFoundError if it is missing, IsADirectoryError if it is a folder."""

    def location_of(self, file: str) -> str:
        return f"{self.location}/{file}"

    def file_at(self, location: str) -> str:
        """Return the file in it for which `location_of` gives `location`."""
        return location[len(self.location) + 1 :]

    def read_small(self, file: str, most_bytes: int = MAX_JSON_BYTES) -> bytes:
        data = self.read_range(file, 0, most_bytes + 1)
        if len(data) > most_bytes:
            raise CorruptionError(
                f"{self.location_of(file)} has more than {most_bytes} bytes: it is not a checkpoint file"
            )
        return data

    def check_file(self, file: str) -> None:
        """Do nothing: there are no links behind a URL."""

    def read_all(self, files: Sequence[str]) -> list[bytes | Exception]:
        """Read them, many at a time."""
        if len(files) < 2:
            return super().read_all(files)
        with Workers(min(NUM_THREADS, len(files)), "zstore-remote") as workers:
            return workers.run([partial(self.try_read, file) for file in files])

    def has(self, file: str) -> bool:
        try:
            self.size(file)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return False
        return True

    def resources(self, res: IoResources) -> IoResources:
        return replace(res, files=_UrlFiles(self))


class _UrlFiles(Files):
    """Reads ranges of the files of `folder`; they are named by their URLs, and written by nobody."""

    def __init__(self, folder: UrlFolder) -> None:
        super().__init__(direct=False)
        self._folder = folder

    @contextlib.contextmanager
    def opened(
        self, path: str | Path, *, write: bool = False, create: bool = False, direct: bool = True
    ) -> Iterator[OpenFile]:
        """Yield what `read_into` takes."""
        if write or create:
            raise UsageError(f"{path} is behind a URL: it is written by uploads, not in place")
        yield OpenFile(-1, os.fspath(path), False)

    def read_into(self, file: OpenFile, out: Bytes | ScatteredMemory, offset: int) -> None:
        """Read by one request."""
        try:
            data = self._folder.read_range(self._folder.file_at(file.path), offset, offset + out.size)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise storage_error(error, "cannot read", path=file.path, offset=offset, nbytes=out.size) from error
        if len(data) != out.size:
            raise StorageError(
                f"expected {out.size} bytes, got {len(data)}: the file ended",
                path=file.path,
                offset=offset,
                nbytes=out.size,
            )
        if isinstance(out, ScatteredMemory):
            out.fill(data)
        else:
            out[:] = np.frombuffer(data, dtype=np.uint8)

    def size(self, path: str | Path) -> int:
        return self._folder.size(self._folder.file_at(os.fspath(path)))
