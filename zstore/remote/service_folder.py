"""A folder of a run that a service of zstore serves, read by ranges."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

from ..checkpoint.folder import Entries
from ..checkpoint.names import RECORD_FILE
from ..errors import CheckpointNotFoundError, StorageError, UsageError
from .retries import Retries
from .service import Answer, ServiceConnection
from .service_url import ServiceUrl, quote_path
from .url_folder import UrlFolder


class ServiceFolder(UrlFolder):
    """The folder `url` of a run, through `connection`. It is written by uploads alone."""

    def __init__(self, connection: ServiceConnection, url: ServiceUrl) -> None:
        super().__init__(url.text, (url.folder or url.run).rpartition("/")[2], connection.traffic)
        self.connection = connection
        self.url = url

    @property
    def parent(self) -> ServiceFolder:
        """Above a run's folder is one in which nothing is seen."""
        return ServiceFolder(self.connection, self.url.above)

    def child(self, name: str) -> ServiceFolder:
        return ServiceFolder(self.connection, self.url.child(name))

    def location_of(self, file: str) -> str:
        return f"{self.location}/{quote_path(file)}"

    def file_at(self, location: str) -> str:
        return unquote(super().file_at(location))

    def read_range(self, file: str, start: int, stop: int) -> bytes:
        if stop <= start:
            return b""
        if not self.url.folder and file == RECORD_FILE:  # `RUN@TAG` has one, which is another's whenever the tag moves
            raise FileNotFoundError(f"{self.location} is a run and no checkpoint")
        location = self.location_of(file)
        data = self.connection.call(lambda: self._read(file, start, stop), "read", location)
        self.traffic.count(read_bytes=len(data))
        return data

    def _read(self, file: str, start: int, stop: int) -> bytes:
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        path = self.url.file(file)
        with self.connection.request("GET", path, headers=headers, stream=True, accept=(307, 416)) as answer:
            if answer.status == 206:
                return answer.read()
            self._check_file(answer, file)
            if answer.status == 416:  # it ends before
                answer.drain_conn()
                return b""
            return answer.read(stop)[start:]

    def _check_file(self, answer: Answer, file: str) -> None:
        """Raise IsADirectoryError if the service leads to a folder's listing."""
        if answer.status == 307:
            raise IsADirectoryError(f"{self.location_of(file)} is a folder")

    def size(self, file: str) -> int:
        def ask() -> str | None:
            answer = self.connection.request("HEAD", self.url.file(file), accept=(307,))
            self._check_file(answer, file)
            return answer.headers.get("Content-Length")

        found = self.connection.call(ask, "get the size", self.location_of(file))
        if found is None or not found.isdecimal():
            raise StorageError("the service did not say how large the file is", path=self.location_of(file))
        return int(found)

    def entries(self) -> Entries:
        """Return its folders and files. Raises CheckpointNotFoundError, with the runs that are there, for a run that is not."""
        if not self.url.run:
            raise FileNotFoundError(f"{self.location} is no folder: name one of its runs")
        listing = self._list("", "")
        return Entries(tuple(listing["folders"]), tuple(file["name"] for file in listing["files"]))

    def sizes(self, top: str) -> dict[str, int | None]:
        """Return those of the folder itself if `top` is empty."""
        try:
            files = self._list(top, "?recursive=1")["files"]
        except FileNotFoundError:
            return {}
        return {f"{top}/{file['name']}" if top else file["name"]: file["size"] for file in files}

    def _list(self, folder: str, query: str) -> dict[str, Any]:
        """Return the service's listing: `folders`, and `files` with `name` and `size`."""
        path = self.url.file(folder) + f"/{query}"
        try:
            listing = self.connection.ask("GET", path)
        except CheckpointNotFoundError as error:
            if not folder and not self.url.folder:
                raise
            raise FileNotFoundError(f"{self.location_of(folder) if folder else self.location} is no folder") from error
        with contextlib.suppress(KeyError, TypeError):
            names = [*listing["folders"], *(file["name"] for file in listing["files"])]
            if all(isinstance(name, str) for name in names) and all("size" in file for file in listing["files"]):
                found: dict[str, Any] = listing
                return found
        raise StorageError("expected a list of folders and files, got something else", path=f"{self.url.base}{path}")

    def for_fsspec(self) -> tuple[str, dict[str, Any]]:
        """Return its URL, and the storage options with which fsspec's `http` reads from there: they hold the token."""
        options: dict[str, Any] = {"headers": dict(self.connection.headers)}
        if self.connection.ca_certs is not None:
            options["ssl"] = ssl.create_default_context(cafile=self.connection.ca_certs)
        return f"{self.url.base}{self.url.file('')}", options

    def write_small(self, file: str, data: bytes) -> None:
        """See `Folder.write_small`. Beside a run's checkpoints a service takes a model's config and tokenizer, else nothing:
        raises UsageError."""
        if self.url.run and not self.url.folder and "/" not in file:
            path = f"/api/runs/{quote(self.url.run, safe='')}/companions/{quote(file, safe='')}"
            self.connection.call(
                lambda: self.connection.request("PUT", path, body=data), "write", self.location_of(file)
            )
            return
        raise UsageError(
            f"{self.location_of(file)} cannot be written: a service takes checkpoints, and no single files"
        )

    def with_retries(self, retries: Retries) -> ServiceFolder:
        """Return the same folder with other retries."""
        return ServiceFolder(self.connection.with_retries(retries), self.url)


def open_service_folder(
    url: str, storage_options: Mapping[str, Any] | None = None, *, retries: Retries | None = None
) -> ServiceFolder | None:
    """Return the folder behind the URL of a service; None if another server answers.

    Raises UsageError for a URL that names no run, and see `ServiceConnection.find`.
    """
    found = ServiceConnection.find(url, storage_options, retries=retries)
    if found is None:
        return None
    connection, place = found
    if not place.run:
        runs = [run["name"] for run in connection.ask("GET", "/api/runs")["runs"]]
        some = ", ".join(f"{place.base}/{quote_path(run)}" for run in runs[:5]) or "none so far"
        raise UsageError(f"{place.base} is a service: name one of its runs, as {place.base}/RUN. It has: {some}")
    return ServiceFolder(connection, place)
