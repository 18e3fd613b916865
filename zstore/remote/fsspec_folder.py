"""A folder behind a URL, through fsspec: small files, ranges of large ones, and the operations of an upload.

[Note: requests]
Each operation is a request of tens of milliseconds, so many run at a time and none is made that another answers. One that
fails is tried again (`Retries`). Listings are never taken from fsspec's cache: other machines write there too.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.folder import Entries, NetworkTraffic
from ..errors import UsageError
from ..io.pool import LastingExecutor
from .retries import Retries
from .send import send_file
from .url import shown
from .url_folder import UrlFolder

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

_NUM_LOOKUPS = 4
"""Most hosts that are looked up at a time."""


class RemoteFolder(UrlFolder):
    """The folder `root` of the fsspec file system `fs`, which people call `url`."""

    def __init__(self, fs: Any, root: str, url: str, retries: Retries, traffic: NetworkTraffic | None = None) -> None:
        super().__init__(url, url.rpartition("/")[2], traffic)
        self.fs = fs
        self.root = root
        self.retries = retries

    @property
    def parent(self) -> RemoteFolder:
        return self._at(self.root.rpartition("/")[0], self.location.rpartition("/")[0])

    def child(self, name: str) -> RemoteFolder:
        return self._at(f"{self.root}/{name}", f"{self.location}/{name}")

    def _at(self, root: str, url: str) -> RemoteFolder:
        return RemoteFolder(self.fs, root, url, self.retries, self.traffic)

    def with_retries(self, retries: Retries) -> RemoteFolder:
        """Return the same folder with other retries."""
        return RemoteFolder(self.fs, self.root, self.location, retries, self.traffic)

    def _inner(self, file: str) -> str:
        return f"{self.root}/{file}"

    def _run(self, operation: Callable[[], Any], what: str, file: str = "", *, listing: str | None = None) -> Any:
        """Return what `operation` returns, tried again if it fails; fsspec forgets the folder `listing` before."""

        def attempt() -> Any:
            if listing is not None:
                self.fs.invalidate_cache(listing)
            return operation()

        self.traffic.count(requests=1)
        return self.retries.run(attempt, what, f"{self.location}/{file}" if file else self.location)

    # -- reading ----------------------------------------------------------------------------------------------------

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
        """Return those of the folder itself if `top` is empty."""
        inner = self._inner(top) if top else self.root
        try:
            found = self._run(lambda: self.fs.find(inner, detail=True), "list the folder", top, listing=inner)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        start = len(self.root.rstrip("/")) + 1
        return {str(name)[start:]: int(entry["size"] or 0) for name, entry in found.items()}

    # -- writing ----------------------------------------------------------------------------------------------------

    def write_small(self, file: str, data: bytes, *, is_new: bool = False) -> None:
        """Write a file that is whole or not there. Raises FileExistsError if it is there and has other bytes, with `is_new`:
        one request decides that, if the storage has conditional writes."""
        inner = self._inner(file)

        def write() -> None:
            self._make_parent(inner)
            self.fs.pipe_file(inner, data, **({"mode": "create"} if is_new else {}))

        try:
            self._run(write, "write", file)
        except OSError:
            # A request whose answer was lost may have written it: only the bytes tell.
            if not is_new or not self.has(file):
                raise
            if self.read_range(file, 0, len(data) + 1) != data:
                raise FileExistsError(f"{self.location_of(file)} is there already") from None
        self.traffic.count(written_bytes=len(data))

    def send(self, source: Path, file: str, advance: Callable[[int], None]) -> int:
        """Copy a local file to `file` in bounded memory and return its bytes.

        `advance` is told bytes as they are sent, less than none if a try begins anew; an error that it raises ends the copy.
        """
        inner = self._inner(file)

        def send() -> int:
            self._make_parent(inner)
            return send_file(self.fs, source, inner, advance)

        nbytes: int = self._run(send, f"upload {source}", file)
        self.traffic.count(written_bytes=nbytes)
        return nbytes

    def _make_parent(self, inner: str) -> None:
        protocols = self.fs.protocol if isinstance(self.fs.protocol, (tuple, list)) else (self.fs.protocol,)
        # Object stores have keys, no folders; asked to make one they may make a bucket.
        if not _WITHOUT_FOLDERS.intersection(protocols):
            self.fs.makedirs(inner.rpartition("/")[0], exist_ok=True)

    def remove(self, file: str) -> None:
        """Remove a file; a missing one is not an error."""
        inner = self._inner(file)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self._run(lambda: self.fs.rm_file(inner), "remove", file)

    def remove_tree(self, name: str) -> None:
        """Remove all files below the folder `name` in it; a missing one is not an error."""
        inner = self._inner(name)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self._run(lambda: self.fs.rm(inner, recursive=True), "remove the folder", name, listing=inner)


_WITHOUT_FOLDERS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "memory"})


def open_fsspec_folder(
    url: str, storage_options: Mapping[str, Any] | None = None, *, retries: Retries | None = None
) -> RemoteFolder:
    """Return the folder at `url`; `storage_options` are those of the fsspec file system. No request is made.

    Raises UsageError if no file system is known or installed for the URL, or it does not take the options.
    """
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
    return RemoteFolder(fs, str(root).rstrip("/"), shown(url), retries or Retries())


@cache
def _keep_lookups(loop: AbstractEventLoop) -> None:
    """Let the loop of a file system look up hosts until an upload is complete. See [Note: endings]."""
    loop.set_default_executor(LastingExecutor(_NUM_LOOKUPS, "zstore-lookup"))
