"""A visible file, opened: its bytes, tag and content type. Local files are opened without following any link."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from typing import BinaryIO, cast

from ...checkpoint.folder import Folder
from ...errors import CheckpointNotFoundError
from ..cache import Cache
from ..kept import short_digest
from .visible import Place

_TYPES = {
    ".json": "application/json",
    ".jsonl": "application/x-ndjson",
    ".txt": "text/plain; charset=utf-8",
    ".py": "text/plain; charset=utf-8",
    ".jinja": "text/plain; charset=utf-8",
}
_MOST_SIZES = 65536
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.EMLINK})


class IsFolderError(Exception):
    """The place is a folder inside a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A file's bytes. The caller closes it."""

    folder: Folder
    path: str
    size: int
    etag: str | None
    """Changes whenever the bytes under the same URL do. None: not known."""
    file: BinaryIO | None
    """None if it is behind a URL."""

    @property
    def media_type(self) -> str:
        """The content type; never one that a browser runs."""
        name = self.path.rpartition("/")[2]
        if name == "latest":
            return _TYPES[".txt"]
        return _TYPES.get(os.path.splitext(name)[1], "application/octet-stream")

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes, those that are there."""
        if self.file is not None:
            return os.pread(self.file.fileno(), stop - start, start)
        return self.folder.read_range(self.path, start, stop)

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()


class RemoteSizes:
    """Sizes of files behind URLs, each asked for once: files of a checkpoint do not change. Usable from any thread."""

    def __init__(self) -> None:
        self._sizes: Cache[tuple[str, str, str], int] = Cache(_MOST_SIZES)

    def open(self, place: Place) -> Opened:
        """Return the file at a place behind a URL; raises FileNotFoundError, or IsFolderError."""
        folder = place.folder
        if place.info is None:  # beside checkpoints files change, and nothing says when
            return Opened(folder=folder, path=place.path, size=_size(folder, place.path), etag=None, file=None)
        key = (folder.location, place.info.record.id, place.path)
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes.put(key, _size(folder, place.path))
        return Opened(folder=folder, path=place.path, size=size, etag=f'"{short_digest(*key)}"', file=None)


def _size(folder: Folder, path: str) -> int:
    try:
        return folder.size(path)
    except IsADirectoryError as error:
        raise IsFolderError from error


def open_local(place: Place, start: int = 0) -> Opened:
    """Return the file at a local place; raises CheckpointNotFoundError if there is none, or IsFolderError."""
    descriptor = open_below(place.folder, place.path, is_checkpoint=place.info is not None)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsFolderError
        if not stat.S_ISREG(status.st_mode):
            raise _absent(place.folder, place.path)
        file = cast(BinaryIO, open(descriptor, "rb", buffering=0))  # noqa: SIM115
    except BaseException:
        os.close(descriptor)
        raise
    etag = f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"'
    return Opened(folder=place.folder, path=place.path, size=status.st_size, etag=etag, file=file)


def open_below(folder: Folder, path: str, *, is_checkpoint: bool) -> int:
    """Return a descriptor of the file or folder `path` in a local folder, the folder itself for an empty one.

    No link is followed and no other way leads out, even if something changes on the way; but the folder of a checkpoint
    may be a link to another one beside it. Raises CheckpointNotFoundError if it is missing, or is a link.
    """
    descriptor = -1
    try:
        descriptor = _open_folder(folder, is_checkpoint=is_checkpoint)
        for part in path.split("/") if path else ():
            above = descriptor
            # A pipe would block without O_NONBLOCK.
            descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=above)
            os.close(above)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        if error.errno in _ABSENT:
            raise _absent(folder, path) from error
        raise
    return descriptor


def _open_folder(folder: Folder, *, is_checkpoint: bool) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if not is_checkpoint:  # the settings name it
        return os.open(folder.path, flags)
    above = os.open(folder.path.parent, flags)
    try:
        with contextlib.suppress(OSError):  # most are no link
            return os.open(folder.path.name, flags | os.O_NOFOLLOW, dir_fd=above)
        # Wherever a link leads by now, only files in the folder of checkpoints are opened.
        name = os.path.basename(os.path.realpath(folder.path))
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=above)
    finally:
        os.close(above)


def _absent(folder: Folder, path: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(f"{folder} has no file {path!r}")
