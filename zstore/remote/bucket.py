"""Folders behind URLs: small files, read concurrently, and ranges of large ones; and folders of buckets, through fsspec, with
the operations of an upload.

[Note: requests]
Each operation is a request of tens of milliseconds, so many run concurrently, and none is redundant. A failed request
is retried (`Retries`). Listings are never taken from fsspec's cache: other machines write there too.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..checkpoint.folder import Entries, Folder, NetworkTraffic
from ..checkpoint.format import MAX_JSON_BYTES
from ..errors import CorruptionError, StorageError, UsageError, ZstoreError, shown, storage_error
from ..format.arrays import Bytes
from ..format.shardfile import ScatteredMemory
from ..io.files import Files, OpenFile
from ..io.machine import ShutdownSafeExecutor, Workers
from ..io.shards import IoResources

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop


T = TypeVar("T")

MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""Errors of a file that is missing, or is a folder."""
_FINAL = (FileExistsError, PermissionError, NotImplementedError, ImportError, TypeError, AttributeError, MemoryError)
"""Errors that a retry would meet again. Any other is retried: file systems raise errors of many packages."""


@dataclass(frozen=True, kw_only=True)
class Retries:
    """How often a request is tried, and the pauses in between, doubled each time."""

    attempts: int = 6
    first_pause_s: float = 0.2
    max_pause_s: float = 20.0
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Once set, a failure is final and pauses end."""

    def run(self, operation: Callable[[], T], what: str, url: str) -> T:
        """Return what `operation` returns, retried if it fails. Errors of a missing file and zstore's errors are raised at
        once; after the last try StorageError with `what`, `url` and the last failure."""
        pause_s = self.first_pause_s
        attempt = 0
        while True:
            attempt += 1
            try:
                return operation()
            except (*MISSING, ZstoreError):
                raise
            except Exception as error:
                if attempt >= self.attempts or isinstance(error, _FINAL) or self.cancelled.is_set():
                    tries = "once" if attempt == 1 else f"{attempt} times"
                    raise StorageError(
                        f"cannot {what} (tried {tries}): {type(error).__name__}: {error}", path=url
                    ) from error
            self.cancelled.wait(pause_s)
            pause_s = min(2 * pause_s, self.max_pause_s)


PATIENT = Retries(attempts=10)
"""For requests that delay nothing, such as uploads in the background: over a minute."""


PART_BYTES = 8 * 1024 * 1024
"""Bytes of a part; a file that is not larger takes one request."""
_MAX_PARTS = 9000
"""S3 accepts 10,000: larger files have larger parts."""
_NUM_SMALL = 16
"""Small files read concurrently."""
_NUM_LOOKUPS = 4
"""Maximum number of concurrent host lookups."""
_WITHOUT_FOLDERS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "memory"})


class UrlFolder(Folder):
    """A folder with the URL `location`."""

    is_local = False
    traffic: NetworkTraffic

    def __init__(self, location: str, traffic: NetworkTraffic | None = None) -> None:
        super().__init__(location, location.rpartition("/")[2])
        self.traffic = traffic or NetworkTraffic()

    @property
    def path(self) -> Path:
        raise UsageError(f"{self.location} is behind a URL and has no path on this machine: read it through its reader")

    def location_of(self, file: str) -> str:
        return f"{self.location}/{file}"

    def file_at(self, location: str) -> str:
        """Return the file in it whose `location_of` is `location`."""
        return location[len(self.location) + 1 :]

    def read_small(self, file: str, max_bytes: int = MAX_JSON_BYTES) -> bytes:
        data = self.read_range(file, 0, max_bytes + 1)
        if len(data) > max_bytes:
            raise CorruptionError(
                f"{self.location_of(file)} has more than {max_bytes} bytes: it is not a checkpoint file"
            )
        return data

    def check_file(self, file: str) -> None:
        """Do nothing: a URL has no links."""

    def read_all(self, files: Sequence[str]) -> list[bytes | Exception]:
        """Read them, many concurrently."""
        if len(files) < 2:
            return super().read_all(files)
        with Workers(min(_NUM_SMALL, len(files)), "zstore-remote") as workers:
            return workers.run([partial(self.try_read, file) for file in files])

    def has(self, file: str) -> bool:
        try:
            self.size(file)
        except MISSING:
            return False
        return True

    def resources(self, res: IoResources) -> IoResources:
        return replace(res, files=_UrlFiles(self))


class _UrlFiles(Files):
    """Reads ranges of the files of `folder`, named by their URLs; writes nothing."""

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
        """Read with one request."""
        try:
            data = self._folder.read_range(self._folder.file_at(file.path), offset, offset + out.size)
        except MISSING as error:
            raise storage_error(error, "cannot read", path=file.path, offset=offset, nbytes=out.size) from error
        if len(data) != out.size:
            text = f"expected {out.size} bytes, got {len(data)}: the file is shorter"
            raise StorageError(text, path=file.path, offset=offset, nbytes=out.size)
        if isinstance(out, ScatteredMemory):
            out.fill(data)
        else:
            out[:] = np.frombuffer(data, dtype=np.uint8)

    def size(self, path: str | Path) -> int:
        return self._folder.size(self._folder.file_at(os.fspath(path)))


class BucketFolder(UrlFolder):
    """The folder `root` of the fsspec file system `fs`; its URL is `url`."""

    def __init__(self, fs: Any, root: str, url: str, retries: Retries, traffic: NetworkTraffic | None = None) -> None:
        super().__init__(url, traffic)
        self.fs = fs
        self.root = root
        self.retries = retries

    @property
    def parent(self) -> BucketFolder:
        return self._at(self.root.rpartition("/")[0], self.location.rpartition("/")[0])

    def child(self, name: str) -> BucketFolder:
        return self._at(f"{self.root}/{name}", f"{self.location}/{name}")

    def _at(self, root: str, url: str) -> BucketFolder:
        return BucketFolder(self.fs, root, url, self.retries, self.traffic)

    def with_retries(self, retries: Retries) -> BucketFolder:
        """Return the same folder with other retries."""
        return BucketFolder(self.fs, self.root, self.location, retries, self.traffic)

    def _inner(self, file: str) -> str:
        return f"{self.root}/{file}" if file else self.root

    def _run(self, operation: Callable[[], Any], what: str, file: str = "", *, listing: str | None = None) -> Any:
        def attempt() -> Any:
            if listing is not None:
                self.fs.invalidate_cache(listing)
            return operation()

        self.traffic.count(requests=1)
        return self.retries.run(attempt, what, self.location_of(file) if file else self.location)

    def read_range(self, file: str, start: int, stop: int) -> bytes:
        inner = self._inner(file)
        data: bytes = self._run(lambda: self.fs.cat_file(inner, start=start, end=stop), "read", file)
        self.traffic.count(read_bytes=len(data))
        return data

    def size(self, file: str) -> int:
        inner = self._inner(file)
        listing = inner.rpartition("/")[0]
        found = self._run(lambda: self.fs.info(inner), "get the size", file, listing=listing)
        if found.get("type") == "directory":
            raise IsADirectoryError(f"{self.location_of(file)} is a folder")
        return int(found["size"] or 0)

    def entries(self) -> Entries:
        found = self._run(lambda: self.fs.ls(self.root, detail=True), "list the folder", listing=self.root)
        folders: list[str] = []
        files: list[str] = []
        for entry in found:
            name = str(entry["name"]).rstrip("/")
            if name == self.root.rstrip("/"):
                if entry["type"] == "file":
                    raise NotADirectoryError(f"{self.location} is a file")
                continue  # some stores list a folder in itself
            (folders if entry["type"] == "directory" else files).append(name.rpartition("/")[2])
        return Entries(tuple(folders), tuple(files))

    def sizes(self, top: str) -> dict[str, int | None]:
        """Return the sizes of all its files if `top` is empty."""
        inner = self._inner(top)
        try:
            found = self._run(lambda: self.fs.find(inner, detail=True), "list the folder", top, listing=inner)
        except MISSING:
            return {}
        start = len(self.root.rstrip("/")) + 1
        return {str(name)[start:]: int(entry["size"] or 0) for name, entry in found.items()}

    def write_small(self, file: str, data: bytes, *, is_new: bool = False) -> None:
        """Write a file as a whole. With `is_new`, raises FileExistsError if it exists with other bytes, decided by one request
        if the storage has conditional writes."""
        inner = self._inner(file)

        def write() -> None:
            self._make_parent(inner)
            self.fs.pipe_file(inner, data, **({"mode": "create"} if is_new else {}))

        try:
            self._run(write, "write", file)
        except OSError:
            # A request whose answer was lost may have written it: compare the bytes.
            if not is_new or not self.has(file):
                raise
            if self.read_range(file, 0, len(data) + 1) != data:
                raise FileExistsError(f"{self.location_of(file)} already exists") from None

    def send(self, source: Path, file: str, check: Callable[[], None] = lambda: None) -> int:
        """Copy a local file to `file` in bounded memory and return its bytes; after a failure `file` does not exist. `check` is
        called before each part, and may raise to stop it."""
        inner, size = self._inner(file), os.stat(source).st_size

        def send() -> None:
            self._make_parent(inner)
            with source.open("rb", buffering=0) as data:
                if size <= PART_BYTES:
                    self.fs.pipe_file(inner, data.read())
                else:
                    self._send_parts(data, inner, part_bytes(size), check)
                if sys.platform == "linux":  # it is not read again, and training needs the memory
                    os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        self._run(send, f"upload {source}", file)
        return size

    def _send_parts(self, data: IO[bytes], inner: str, nbytes: int, check: Callable[[], None]) -> None:
        out = self.fs.open(inner, "wb", block_size=nbytes)
        try:
            for part in checked_parts(data, nbytes, check):
                out.write(part)
            out.close()
        except BaseException:
            with contextlib.suppress(Exception):
                out.discard()
            # Otherwise garbage collection would complete the incomplete upload.
            with contextlib.suppress(Exception):
                out.closed = True
            raise

    def _make_parent(self, inner: str) -> None:
        protocols = self.fs.protocol if isinstance(self.fs.protocol, (tuple, list)) else (self.fs.protocol,)
        # Object stores have no folders, and might make a bucket.
        if not _WITHOUT_FOLDERS.intersection(protocols):
            self.fs.makedirs(inner.rpartition("/")[0], exist_ok=True)

    def remove(self, file: str) -> None:
        """Remove a file; a missing one is not an error."""
        inner = self._inner(file)
        with contextlib.suppress(*MISSING):
            self._run(lambda: self.fs.rm_file(inner), "remove", file)

    def remove_tree(self, name: str) -> None:
        """Remove all files below the folder `name` in it; a missing folder is not an error."""
        inner = self._inner(name)
        with contextlib.suppress(*MISSING):
            self._run(lambda: self.fs.rm(inner, recursive=True), "remove the folder", name, listing=inner)


def open_bucket(
    url: str, storage_options: Mapping[str, Any] | None = None, *, retries: Retries | None = None
) -> BucketFolder:
    """Return the folder at `url`; `storage_options` are options of the fsspec file system. No request is made. Raises
    UsageError if no file system is known or installed for the URL, or it rejects the options."""
    import fsspec

    url = re.sub(r"(?<![:/])/+\Z", "", url)
    try:
        fs, root = fsspec.core.url_to_fs(url, **(storage_options or {}))
    except ImportError as error:
        advice = "install zstore[s3]" if url.startswith(("s3:", "s3a:")) else "install the package that it names"
        raise UsageError(f"{shown(url)}: {error}; {advice}") from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{shown(url)} cannot be opened with the storage options given: {error}") from error
    if getattr(fs, "async_impl", False):
        _keep_lookups(fs.loop)
    return BucketFolder(fs, str(root).rstrip("/"), shown(url), retries or Retries())


@cache
def _keep_lookups(loop: AbstractEventLoop) -> None:
    """Let the loop of a file system look up hosts until uploads are complete. See [Note: endings]."""
    loop.set_default_executor(ShutdownSafeExecutor(_NUM_LOOKUPS, "zstore-lookup"))


def checked_parts(data: IO[bytes], nbytes: int, check: Callable[[], None]) -> Iterator[bytes]:
    """Yield the bytes of a file in parts of `nbytes`; `check` is called before each, and may raise."""
    while part := data.read(nbytes):
        check()
        yield part


def part_bytes(size: int) -> int:
    """Return the bytes of a part of a file of `size` bytes."""
    return max(PART_BYTES, -(-size // _MAX_PARTS))
