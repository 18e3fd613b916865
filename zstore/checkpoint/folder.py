"""The folder that a checkpoint's files are read from, local or at a URL (`zstore.remote`); and its size on disk.

[Note: sizes]
Three sizes describe a checkpoint, with the same names in all commands and docs: its *array data* are the values alone; its
*shard files* add index, checksums and padding; its *size on disk* counts all files, metadata and manifests included, as
`ls -l` shows it. A file with several names (hard links) is *shared*; removing a checkpoint *frees* the files that have no
hard link elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import CorruptionError, storage_error
from ..io.files import UserPath, user_path
from ..io.shards import IoResources
from .format import MAX_JSON_BYTES, MAX_RECORD_BYTES, read_json
from .layout import RECORD_FILE


@dataclass(frozen=True)
class Entries:
    """The direct entries of a folder, by name."""

    folders: tuple[str, ...]
    files: tuple[str, ...]


class NetworkTraffic:
    """Counts traffic over a network. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests = 0
        self.read_bytes = 0

    def count(self, *, requests: int = 0, read_bytes: int = 0) -> None:
        """Add the traffic of an operation."""
        with self._lock:
            self.requests += requests
            self.read_bytes += read_bytes


class Folder(ABC):
    """A folder of files. Paths inside it have `/` between their parts. Usable from any thread."""

    is_local: bool
    """Whether it is on a mounted file system, where operations take microseconds instead of network requests."""

    traffic: NetworkTraffic | None = None
    """Traffic to and from a URL, of this folder and folders derived from it; None: not counted."""

    def __init__(self, location: str, name: str) -> None:
        self.location = location
        """Path or URL, for messages."""
        self.name = name
        """Last component of the location."""

    @property
    @abstractmethod
    def path(self) -> Path:
        """The local folder; raises UsageError if it is not on this machine."""

    @property
    @abstractmethod
    def parent(self) -> Folder:
        """The parent folder."""

    @abstractmethod
    def child(self, name: str) -> Folder:
        """Return the subfolder `name`, which need not exist."""

    @abstractmethod
    def location_of(self, file: str) -> str:
        """Return the path or URL of a file in it, for `resources()` and messages."""

    @abstractmethod
    def read_small(self, file: str, max_bytes: int = MAX_JSON_BYTES) -> bytes:
        """Return a small file's bytes.

        Raises FileNotFoundError or NotADirectoryError if it is missing, CorruptionError if it has more than `max_bytes` (by
        default the limit of JSON files) or is not a regular file.
        """

    @abstractmethod
    def read_range(self, file: str, start: int, stop: int) -> bytes:
        """Return bytes `[start, stop)` of a file, fewer if it ends before. Raises FileNotFoundError if it is missing,
        CorruptionError if it is not a regular file."""

    @abstractmethod
    def size(self, file: str) -> int:
        """Return a file's bytes. Raises as `read_range` does."""

    @abstractmethod
    def check_file(self, file: str) -> None:
        """Raise FileNotFoundError if a local file is missing, CorruptionError if it is not a regular file, or a parent is
        not a folder or is a link. Does nothing at a URL, where there are no links."""

    def read_all(self, files: Sequence[str]) -> list[bytes | Exception]:
        """Return the bytes of each of `files`, or the error of reading it."""
        return [self.try_read(file) for file in files]

    def try_read(self, file: str) -> bytes | Exception:
        """Return a small file's bytes, or the error of reading it."""
        try:
            return self.read_small(file)
        except (OSError, ValueError) as error:
            return error

    def read_records(self, names: Sequence[str]) -> list[bytes | Exception]:
        """Return the commit record in each of the subfolders `names`, or the error of reading it."""
        return self.read_all([f"{name}/{RECORD_FILE}" for name in names])

    @abstractmethod
    def has(self, file: str) -> bool:
        """Return whether the file exists."""

    @abstractmethod
    def entries(self) -> Entries:
        """Return its direct entries; raises FileNotFoundError or NotADirectoryError if it is not a folder."""

    @abstractmethod
    def sizes(self, top: str) -> dict[str, int | None]:
        """Return the size of each file anywhere below the subfolder `top` (empty: the folder itself), by path inside the
        folder; None if it is not a regular file, such as a symbolic link. Empty if `top` does not exist."""

    def sizes_of(self, files: Iterable[str]) -> dict[str, int | None]:
        """Return the size of each of `files` that exists; None if it is not a regular file."""
        requested = set(files)
        tops = {file.split("/")[0] for file in requested}
        return {file: size for top in tops for file, size in self.sizes(top).items() if file in requested}

    @abstractmethod
    def resources(self, res: IoResources) -> IoResources:
        """Return resources like `res` that can read this folder's files by their `location_of`."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folder) and (self.is_local, self.location) == (other.is_local, other.location)

    def __hash__(self) -> int:
        return hash(self.location)

    def __str__(self) -> str:
        return self.location


def links_elsewhere(entry: Path) -> bool:
    """Return whether `entry` is a symbolic link out of its folder."""
    return entry.is_symlink() and os.path.dirname(os.path.realpath(entry)) != os.path.realpath(entry.parent)


class LocalFolder(Folder):
    """A folder on a local file system. Links in it are not followed, but `path` itself may be a link.

    `documents` are the bytes of small files that have already been read, by path; each is returned once.
    """

    is_local = True

    def __init__(self, path: Path, documents: dict[str, bytes] | None = None) -> None:
        super().__init__(str(path), path.name)
        self._path = path
        self._documents = {} if documents is None else documents
        self._checked: set[str] = set()
        """Folders below it that are known not to be links."""

    @property
    def path(self) -> Path:
        return self._path

    @property
    def parent(self) -> Folder:
        return LocalFolder(self._path.parent)

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(self._path / name, self._documents)

    def location_of(self, file: str) -> str:
        return str(self._path / file)

    def read_small(self, file: str, max_bytes: int = MAX_JSON_BYTES) -> bytes:
        data = self._documents.pop(self.location_of(file), None)
        if data is not None and len(data) <= max_bytes:
            return data
        self.check_file(file)
        return read_json(self._path / file, max_bytes)

    def read_range(self, file: str, start: int, stop: int) -> bytes:
        self.check_file(file)
        with open(self._path / file, "rb") as opened:
            opened.seek(start)
            return opened.read(max(0, stop - start))

    def size(self, file: str) -> int:
        self.check_file(file)
        return (self._path / file).stat().st_size

    def check_file(self, file: str) -> None:
        parent, _, _ = file.rpartition("/")
        if parent and parent not in self._checked:
            parts = parent.split("/")
            for depth in range(1, len(parts) + 1):
                self._check("/".join(parts[:depth]), stat.S_ISDIR, "a folder")
            self._checked.add(parent)
        self._check(file, stat.S_ISREG, "a file")

    def _check(self, file: str, is_kind: Callable[[int], bool], expected: str) -> None:
        path = self._path / file
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(f"{path} is missing") from error
        except OSError as error:
            raise storage_error(error, "cannot stat the file", path=str(path)) from error
        if stat.S_ISLNK(mode):
            raise CorruptionError(f"{path} is a symbolic link, expected {expected}: it may lead out of the checkpoint")
        if not is_kind(mode):
            raise CorruptionError(f"{path} is not {expected}: the checkpoint was changed; restore it from another copy")

    def read_records(self, names: Sequence[str]) -> list[bytes | Exception]:
        records: list[bytes | Exception] = []
        for name in names:
            path = self._path / name
            try:
                if links_elsewhere(path) and (path / RECORD_FILE).exists():
                    raise CorruptionError(
                        f"{path} is a symbolic link to {os.path.realpath(path)}, out of the folder of checkpoints: if that is "
                        "intended, name that folder itself"
                    )
                records.append(self.child(name).read_small(RECORD_FILE, MAX_RECORD_BYTES))
            except (OSError, ValueError) as error:
                records.append(error)
        return records

    def has(self, file: str) -> bool:
        return (self._path / file).exists()

    def entries(self) -> Entries:
        folders: list[str] = []
        files: list[str] = []
        with os.scandir(self._path) as entries:
            for entry in entries:
                (folders if entry.is_dir() else files).append(entry.name)
        return Entries(tuple(folders), tuple(files))

    def sizes(self, top: str) -> dict[str, int | None]:
        sizes: dict[str, int | None] = {}
        if (self._path / top).is_symlink():
            return sizes
        for folder, folders, names in os.walk(self._path / top):
            relative = os.path.relpath(folder, self._path).replace(os.sep, "/")
            prefix = "" if relative == "." else f"{relative}/"
            links = (name for name in folders if os.path.islink(os.path.join(folder, name)))
            sizes |= regular_file_sizes(self._path, (f"{prefix}{name}" for name in (*names, *links)))
        return sizes

    def sizes_of(self, files: Iterable[str]) -> dict[str, int | None]:
        return regular_file_sizes(self._path, files)

    def resources(self, res: IoResources) -> IoResources:
        return res


def regular_file_sizes(folder: Path, files: Iterable[str]) -> dict[str, int | None]:
    """Return the size of each of `files` that exists in `folder`, by path inside it; None if it is not a regular file."""
    sizes: dict[str, int | None] = {}
    for file in files:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = os.lstat(folder / file)
            sizes[file] = status.st_size if stat.S_ISREG(status.st_mode) else None
    return sizes


FolderLike = UserPath | Folder
"""A folder, or the path of a local one."""


def folder_at(place: FolderLike) -> Folder:
    """Return `place` itself if it is a folder, else the local folder with that path."""
    return place if isinstance(place, Folder) else LocalFolder(user_path(place))


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint, and its hard links."""

    nbytes: int
    links_inside: int
    """Number of its hard links in the checkpoint."""
    num_links: int
    """Number of all its hard links."""


@dataclass(frozen=True)
class StoredFiles:
    """The files of checkpoints, each once; at a URL, where there are no links, a checkpoint counts as one file."""

    files: Mapping[Hashable, StoredFile]
    """Files by a key that identifies the file, also across checkpoints."""

    @property
    def num_files(self) -> int:
        """Number of file names in the checkpoints."""
        return sum(file.links_inside for file in self.files.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, each once."""
        return sum(file.nbytes for file in self.files.values())

    @property
    def freed_bytes(self) -> int:
        """Bytes that removing the checkpoints frees."""
        return sum(file.nbytes for file in self.files.values() if file.links_inside >= file.num_links)


def stored_files(place: FolderLike) -> StoredFiles:
    """Return the files of the checkpoint in the tag's folder `place`; files removed during the call are skipped."""
    folder = folder_at(place)
    if not folder.is_local:
        sizes = folder.sizes("").values()
        return StoredFiles({folder.location: StoredFile(sum(size or 0 for size in sizes), len(sizes), len(sizes))})
    by_file: dict[Hashable, StoredFile] = {}
    for parent, _, names in os.walk(folder.path):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(parent, name))
                key = status.st_dev, status.st_ino
                links_inside = by_file[key].links_inside + 1 if key in by_file else 1
                by_file[key] = StoredFile(status.st_size, links_inside, status.st_nlink)
    return StoredFiles(by_file)


def shared_bytes(tables: Sequence[StoredFiles]) -> list[int]:
    """Return for each of `tables` the bytes of the files that it shares with others of them."""
    counts = Counter(key for table in tables for key in table.files)
    return [sum(file.nbytes for key, file in table.files.items() if counts[key] > 1) for table in tables]


def joined_files(tables: Iterable[StoredFiles]) -> StoredFiles:
    """Return the files of several checkpoints together; `freed_bytes` of the result is not the sum of theirs."""
    by_file: dict[Hashable, StoredFile] = {}
    for table in tables:
        for key, file in table.files.items():
            links_inside = by_file[key].links_inside if key in by_file else 0
            by_file[key] = replace(file, links_inside=links_inside + file.links_inside)
    return StoredFiles(by_file)
