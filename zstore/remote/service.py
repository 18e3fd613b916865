"""`zstore serve` over HTTP: the connection, and the folder of a run that is read through it; and opening any URL.

[Note: URLs of a service]
`http://host:port/<run>` is a run, `http://host:port/<run>/<checkpoint>` a checkpoint of it, each part percent-encoded. A proxy
may serve it below a path, which a URL does not distinguish from a run, so `open_folder` asks the server.

[Note: who sees the token]
The token is sent to a server only after it has answered, without the token, that it is a service of zstore; no redirect is
followed. Messages name the server and its answer, and no header.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urlsplit

import urllib3
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError, SSLError

from .._version import __version__
from ..checkpoint.folder import Entries, NetworkTraffic
from ..checkpoint.layout import RECORD_FILE
from ..errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    DiskFullError,
    StorageError,
    UsageError,
    ZstoreError,
    shown,
)
from .bucket import BucketFolder, Retries, UrlFolder, open_bucket

T = TypeVar("T")

TOKEN_VARIABLE = "ZSTORE_TOKEN"
_TOKEN_ADVICE = f'storage_options={{"token": "..."}}, --storage-option token=..., or the variable {TOKEN_VARIABLE}'
_MAX_CONNECTIONS = 32
"""Connections kept open; more are opened if more threads need them."""
_MAX_PROBLEM_BYTES = 64 * 1024
"""Bytes read of an answer that identifies the server, or describes a problem."""
_CONNECT_S = 10.0
_READ_S = 120.0
"""Longest silence of a server."""
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that are retried."""
_REFUSALS: dict[int, type[ZstoreError]] = {
    **dict.fromkeys((400, 403, 405, 413), UsageError),
    **dict.fromkeys((404, 410), CheckpointNotFoundError),
    409: CheckpointExistsError,
    422: CheckpointError,
    507: DiskFullError,
}


class ServiceBusyError(OSError):
    """A service could not answer now; the request may be repeated."""


class ServiceAnswer(NamedTuple):
    """An answer; `data` is the requested part of its body."""

    status: int
    headers: Mapping[str, str]
    data: bytes


class ServiceConnection:
    """A connection to the service at `base`, with its `token`, kept open between requests. Usable from any thread."""

    def __init__(self, base: str, *, token: str | None = None, retries: Retries | None = None) -> None:
        self.base = base
        self.retries = retries or Retries()
        self.traffic = NetworkTraffic()
        self.headers = {"User-Agent": f"zstore/{__version__}"}
        """Headers of every request, with the token."""
        if token is not None:
            if not token.isascii() or not token.isprintable() or " " in token or not token:
                raise UsageError(
                    "the token for the service has blanks or characters that are not ASCII: expected it as it was made"
                )
            self.headers["Authorization"] = f"Bearer {token}"
        self._pool = urllib3.PoolManager(maxsize=_MAX_CONNECTIONS, retries=False)

    def is_service(self) -> bool:
        """Return whether the server is a service of zstore. Raises UsageError if it redirects, or refuses the host name."""
        accepted = frozenset(range(300, 600)) - _TRANSIENT | {500}
        ask = partial(self.request, "GET", "/api", accept=accepted, max_bytes=_MAX_PROBLEM_BYTES)
        answer = self.call(ask, "reach the server", self.base)
        address = answer.headers.get("Location", "")
        if 300 <= answer.status < 400 and address.endswith("/api"):
            raise UsageError(f"{self.base} leads to {address.removesuffix('/api')}: name that in the URL")
        if answer.status == 421 and (problem := _text_of_problem(answer.data)):
            raise UsageError(f"{self.base}: {problem}")
        with contextlib.suppress(ValueError):
            document = json.loads(answer.data)
            return isinstance(document, dict) and document.get("service") == "zstore"
        return False

    def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        accept: Collection[int] = (),
        timeout_s: float = _READ_S,
        max_bytes: int | None = None,
    ) -> ServiceAnswer:
        """Return the answer to one try of a request; `path` begins with `/` and is encoded, with its query.

        Raises the error of a status from 300 on that is not in `accept`, and an error that `Retries` retries if the connection
        fails. A `body` of several parts has its length in `headers`. At most `max_bytes` of an answer are read.
        """
        url, timeout = f"{self.base}{path}", urllib3.Timeout(connect=_CONNECT_S, read=timeout_s)
        headers = {**self.headers, **(headers or {})}
        try:
            with self._pool.request(
                method, url, body=body, headers=headers, redirect=False, timeout=timeout, preload_content=False
            ) as response:
                limit = max_bytes if response.status < 300 else _MAX_PROBLEM_BYTES
                data = response.read(None if response.status == 206 else limit)  # 206: the range asked for
        except SSLError as error:
            raise UsageError(
                f"{self.base} does not speak TLS, or cannot be trusted: {error}. If it is a service without a certificate, "
                "write http:// in place of https://; for one of your own, name a file of it in SSL_CERT_FILE"
            ) from error
        except (NewConnectionError, ConnectTimeoutError) as error:
            raise ConnectionError(f"no connection to {self.base}: {error.__cause__ or 'it takes too long'}") from error
        answer = ServiceAnswer(response.status, response.headers, data)
        if answer.status >= 300 and answer.status not in accept:
            raise _refusal(answer, url, has_token="Authorization" in self.headers)
        return answer

    def call(self, operation: Callable[[], T], what: str, path: str) -> T:
        """Return the result of `operation`, made of `request`s, retried if it fails. Messages name `what` it does,
        as "read", and the URL `path`. Raises as `Retries.run` does."""
        self.traffic.count(requests=1)
        return self.retries.run(operation, what, path)

    def ask(self, method: str, path: str, document: Any = None, *, timeout_s: float = _READ_S) -> Any:
        """Return the JSON answer to a request with `document` as JSON (bytes: sent unchanged; None: no body), retried if it
        fails. Raises CheckpointNotFoundError if the service lacks the resource, StorageError for no JSON."""
        body = document if document is None or isinstance(document, bytes) else json.dumps(document).encode()
        headers = {"Accept": "application/json"} | ({} if body is None else {"Content-Type": "application/json"})
        attempt = partial(self.request, method, path, body=body, headers=headers, timeout_s=timeout_s)
        data = self.call(attempt, f"{method} {path}", self.base).data
        self.traffic.count(read_bytes=len(data))
        try:
            return json.loads(data)
        except ValueError as error:
            text = f"expected JSON from {method} {path}, got {len(data)} other bytes"
            raise StorageError(text, path=self.base) from error


def _refusal(answer: ServiceAnswer, url: str, *, has_token: bool) -> Exception:
    """Return the error of an answer's status: one of zstore's, or ServiceBusyError if the request may be repeated."""
    problem = _text_of_problem(answer.data)
    text = f"{url}: {problem or f'the answer was {answer.status}'}"
    if answer.status == 401:
        what = "does not accept the token given" if has_token else "needs a token"
        return UsageError(f"{url.partition('://')[2].partition('/')[0]} {what}: give it by {_TOKEN_ADVICE}")
    if answer.status in _TRANSIENT:
        return ServiceBusyError(text)
    return _REFUSALS.get(answer.status, StorageError)(text)


def _text_of_problem(data: bytes) -> str:
    """Return the problem described by the body of an answer; empty if there is none."""
    with contextlib.suppress(ValueError):
        document = json.loads(data)
        error = document.get("error") if isinstance(document, dict) else None
        return error if isinstance(error, str) else ""
    return ""


class ServiceFolder(UrlFolder):
    """The folder at `inside`, as `run/checkpoint`, of the service of `connection`. Only uploads write to it."""

    def __init__(self, connection: ServiceConnection, inside: str) -> None:
        super().__init__(f"{connection.base}/{quote_path(inside)}".rstrip("/"), connection.traffic)
        self.name = inside.rpartition("/")[2]
        self.connection = connection
        self.run, _, self.folder = inside.partition("/")
        """The run, and the folder in it, empty for its own."""
        self._inside = inside

    @property
    def parent(self) -> ServiceFolder:
        """The parent of a run's folder has no entries."""
        return ServiceFolder(self.connection, self._inside.rpartition("/")[0])

    def child(self, name: str) -> ServiceFolder:
        return ServiceFolder(self.connection, f"{self._inside}/{name}" if self._inside else name)

    def location_of(self, file: str) -> str:
        return f"{self.location}/{quote_path(file)}"

    def file_at(self, location: str) -> str:
        return unquote(super().file_at(location))

    def path_of(self, file: str) -> str:
        """Return the encoded path of a file or folder in it: `/zarr/<run>/...`."""
        return "/zarr/" + quote_path("/".join(part for part in (self._inside, file) if part))

    def read_range(self, file: str, start: int, stop: int) -> bytes:
        if stop <= start:
            return b""
        if not self.folder and file == RECORD_FILE:  # `RUN@TAG` has one, which changes whenever the tag moves
            raise FileNotFoundError(f"{self.location} is a run and no checkpoint")
        data = self.connection.call(lambda: self._read(file, start, stop), "read", self.location_of(file))
        self.traffic.count(read_bytes=len(data))
        return data

    def _read(self, file: str, start: int, stop: int) -> bytes:
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        answer = self.connection.request("GET", self.path_of(file), headers=headers, accept=(307, 416), max_bytes=stop)
        self._check_file(answer, file)
        if answer.status == 416:  # the file is shorter
            return b""
        return answer.data if answer.status == 206 else answer.data[start:stop]

    def _check_file(self, answer: ServiceAnswer, file: str) -> None:
        """Raise IsADirectoryError if the service redirects to a folder's listing."""
        if answer.status == 307:
            raise IsADirectoryError(f"{self.location_of(file)} is a folder")

    def size(self, file: str) -> int:
        def ask() -> int:
            answer = self.connection.request("HEAD", self.path_of(file), accept=(307,))
            self._check_file(answer, file)
            return int(answer.headers["Content-Length"])

        return self.connection.call(ask, "get the size", self.location_of(file))

    def entries(self) -> Entries:
        """Return its folders and files. Raises CheckpointNotFoundError, with the known runs, for an unknown run."""
        if not self.run:
            raise FileNotFoundError(f"{self.location} is no folder: name one of its runs")
        listing = self._list("", "")
        return Entries(tuple(listing["folders"]), tuple(file["name"] for file in listing["files"]))

    def sizes(self, top: str) -> dict[str, int | None]:
        try:
            files = self._list(top, "?recursive=1")["files"]
        except FileNotFoundError:
            return {}
        return {f"{top}/{file['name']}" if top else file["name"]: file["size"] for file in files}

    def _list(self, folder: str, query: str) -> Any:
        """Return the service's listing: `folders`, and `files` with `name` and `size`."""
        path = f"{self.path_of(folder)}/{query}"
        try:
            listing = self.connection.ask("GET", path)
        except CheckpointNotFoundError as error:
            if not folder and not self.folder:
                raise
            raise FileNotFoundError(f"{self.location_of(folder) if folder else self.location} is no folder") from error
        with contextlib.suppress(KeyError, TypeError):
            names = [*listing["folders"], *(file["name"] for file in listing["files"])]
            if all(isinstance(name, str) for name in names) and all("size" in file for file in listing["files"]):
                return listing
        text = "expected a list of folders and files, got something else"
        raise StorageError(text, path=f"{self.connection.base}{path}")

    def for_fsspec(self) -> tuple[str, dict[str, Any]]:
        """Return its URL, and the storage options, with the token, for fsspec's `http`."""
        return f"{self.connection.base}{self.path_of('')}", {"headers": dict(self.connection.headers)}


def quote_path(path: str) -> str:
    """Return a path, percent-encoded part by part."""
    return quote(path, safe="/=+@,~")


def parse_url(url: str) -> tuple[str, list[str]]:
    """Return scheme, host and port of a service's URL, and the parts of its path. Raises UsageError if it is not one."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{shown(url)} is not a URL: {error}") from error
    if not host or parts.scheme not in ("http", "https"):
        raise UsageError(f"expected a URL like http://host:8700/RUN, got {shown(url)}")
    if parts.username is not None:
        raise UsageError(f"{shown(url)} has a user: a service takes a token, by {_TOKEN_ADVICE}")
    inside = [unquote(part) for part in parts.path.split("/") if part]
    if any(part in (".", "..") or "/" in part for part in inside):
        raise UsageError(f"{shown(url)} has a part that is `.`, `..` or holds a `/`: name the run and its folder")
    address = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{address}{'' if port is None else f':{port}'}", inside


def open_folder(
    url: str, storage_options: Mapping[str, Any] | None = None, *, retries: Retries | None = None
) -> BucketFolder | ServiceFolder:
    """Return the folder at `url`: one of the service of zstore that answers there, see [Note: URLs of a service];
    otherwise see `open_bucket`. A service's option is `token`, else the variable ZSTORE_TOKEN.

    Raises UsageError if nothing opens the URL or the options are invalid, StorageError if no server answers.
    """
    if not is_http(url):
        return open_bucket(url, storage_options, retries=retries)
    options = dict(storage_options or {})
    token = options.pop("token", None)
    if not isinstance(token, str | None):
        raise UsageError('the storage option token must be text: write token="..." with the quotes')
    address, inside = parse_url(url)
    for num_above in range(len(inside) + 1):
        base = "/".join([address, *map(quote_path, inside[:num_above])])
        if ServiceConnection(base, retries=retries).is_service():
            break
    else:
        return open_bucket(url, storage_options, retries=retries)
    if options:
        raise UsageError(f"{base} is a service of zstore: expected the storage option token, got {sorted(options)}")
    connection = ServiceConnection(base, token=token or os.environ.get(TOKEN_VARIABLE) or None, retries=retries)
    if num_above == len(inside):
        runs = [run["name"] for run in connection.ask("GET", "/api/runs")["runs"]]
        some = ", ".join(f"{base}/{quote_path(run)}" for run in runs[:5]) or "none so far"
        raise UsageError(f"{base} is a service: name one of its runs, as {base}/RUN. It has: {some}")
    return ServiceFolder(connection, "/".join(inside[num_above:]))


def is_http(url: str) -> bool:
    """Return whether `url` is of an HTTP server, which may be a service of zstore."""
    return url.startswith(("http://", "https://"))


class UploadPlace:
    """A folder of checkpoints in a bucket, or a run of a service, that receives uploads. Connects when it is opened. Raises
    UsageError for a URL that nothing opens."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self._url, self._options = url, dict(storage_options or {})
        self._bucket: BucketFolder | None = None
        self.is_service = is_http(url)
        """Whether it must be a run of a service."""
        if self.is_service:
            address, inside = parse_url(url)
            if not inside:
                raise UsageError(f"{address}: checkpoints are uploaded to a run of a service: name it as {address}/RUN")
            self.location = f"{address}/{quote_path('/'.join(inside))}"
        else:
            # Made in this thread: fsspec makes another file system for each thread.
            self._bucket = open_bucket(url, self._options)
            self.location = self._bucket.location

    def location_of(self, file: str) -> str:
        """Return the URL of a file or folder in it."""
        return f"{self.location}/{quote_path(file) if self.is_service else file}"

    def __str__(self) -> str:
        return self.location

    def open(self, retries: Retries) -> BucketFolder | ServiceFolder:
        """Return the folder. Raises UsageError if it takes no uploads, StorageError if no server answers."""
        if self._bucket is not None:
            return self._bucket.with_retries(retries)
        folder = open_folder(self._url, self._options, retries=retries)
        if isinstance(folder, BucketFolder):
            raise UsageError(
                f"{self} is no service of zstore: checkpoints are uploaded to `zstore serve`, or to a storage like s3://bucket/run"
            )
        if folder.folder:
            run = f"{folder.connection.base}/{quote_path(folder.run)}"
            raise UsageError(f"{self}: checkpoints are uploaded to a run of a service: name it as {run}")
        return folder
