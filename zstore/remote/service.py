"""The HTTP connection to `zstore serve`, for all that reads from it and sends to it.

[Note: who sees the token]
It is sent to a server only after that said, asked without it, that it is a service of zstore; never across a redirect, for
none is followed with it. Messages name the server and its answer, and no header.
"""

from __future__ import annotations

import base64
import copy
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import IO, Any, NoReturn, TypeVar

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, MaxRetryError, NewConnectionError, SSLError

from .._version import __version__
from ..checkpoint.folder import NetworkTraffic
from ..errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    DiskFullError,
    StorageError,
    UsageError,
    ZstoreError,
)
from .retries import Retries
from .service_url import ServiceUrl

T = TypeVar("T")
Body = bytes | IO[bytes] | Iterable[bytes]
Answer = urllib3.BaseHTTPResponse

TOKEN_VARIABLE = "ZSTORE_TOKEN"
WHERE_TOKENS_GO = f'storage_options={{"token": "..."}}, --storage-option token=..., or the variable {TOKEN_VARIABLE}'
_OPTIONS = ("token", "ca_certs")
_MOST_CONNECTIONS = 32
"""Connections that are kept open; more are made if more threads ask."""
_CONNECT_S = 10.0
_READ_S = 120.0
"""Longest silence of a server."""
_MOST_PROBLEM_BYTES = 64 * 1024
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that another try may not meet."""
_REFUSALS: dict[int, type[ZstoreError]] = {
    **dict.fromkeys((400, 403, 405), UsageError),
    **dict.fromkeys((404, 410), CheckpointNotFoundError),
    409: CheckpointExistsError,
    422: CheckpointError,
    507: DiskFullError,
}


class ServiceBusyError(OSError):
    """A service could not answer now, and may be asked again."""


class ServiceConnection:
    """A connection to the service at `base`, kept open between requests. Usable from any thread.

    `token` is that of the service; `user` a name and password for a proxy before it. `ca_certs` is a file of
    certificates (PEM) to trust instead of the system's. Raises UsageError for values that are not possible.
    """

    def __init__(
        self,
        base: str,
        *,
        token: str | None = None,
        user: tuple[str, str] | None = None,
        ca_certs: str | None = None,
        retries: Retries | None = None,
    ) -> None:
        self.base = base
        self.retries = retries or Retries()
        self.traffic = NetworkTraffic()
        self.has_token = token is not None
        authorization = _bearer(token) if token is not None else _basic(user) if user is not None else None
        self.headers: dict[str, str] = {} if authorization is None else {"Authorization": authorization}
        """Headers of every request: they hold the token."""
        self.ca_certs = ca_certs
        if user is not None and token is not None:
            raise UsageError(
                f"{base}: the URL has a user and there is a token: a request has room for one, leave one out"
            )
        if ca_certs is not None and not os.path.isfile(ca_certs):
            raise UsageError(f"the storage option ca_certs names {ca_certs!r}: expected a file of certificates")
        self._pool = urllib3.PoolManager(
            maxsize=_MOST_CONNECTIONS,
            retries=False,
            timeout=urllib3.Timeout(connect=_CONNECT_S, read=_READ_S),
            headers={"User-Agent": f"zstore/{__version__}"},
            ca_certs=ca_certs,
        )

    @classmethod
    def find(
        cls, url: str, storage_options: Mapping[str, Any] | None = None, *, retries: Retries | None = None
    ) -> tuple[ServiceConnection, ServiceUrl] | None:
        """Return the connection to the service that a URL names, and what it means there; None if another server answers.

        `storage_options`: `token` (else the variable ZSTORE_TOKEN) and `ca_certs`. Raises UsageError for options that make no
        sense, StorageError if nobody answers.
        """
        options = dict(storage_options or {})
        for name in _OPTIONS:
            if not isinstance(options.get(name), str | os.PathLike | None):
                raise UsageError(f'the storage option {name} must be text: write {name}="..." with the quotes')
        ca_certs = None if options.get("ca_certs") is None else os.fspath(options["ca_certs"])
        readings = ServiceUrl.readings(url)
        made = ((place, cls(place.base, user=place.user, ca_certs=ca_certs, retries=retries)) for place in readings)
        place = next((place for place, connection in made if connection._is_service()), None)
        if place is None:
            return None
        if unknown := sorted(options.keys() - set(_OPTIONS)):
            raise UsageError(
                f"{place.base} is a service of zstore: expected the storage options {', '.join(_OPTIONS)}, got {unknown}"
            )
        token = options.get("token")
        if token is None and place.user is None:
            token = os.environ.get(TOKEN_VARIABLE) or None
        return cls(place.base, token=token, user=place.user, ca_certs=ca_certs, retries=retries), place

    def with_retries(self, retries: Retries) -> ServiceConnection:
        """Return the same connection with other retries."""
        other = copy.copy(self)
        other.retries = retries
        return other

    def _is_service(self) -> bool:
        """Ask who is there, without the token. Raises UsageError if a service answers at another address."""

        def ask() -> tuple[str, bytes]:
            with self._send("GET", "/api", None, self.headers, None, follow=True) as answer:
                if answer.status in _PASSING - {500}:
                    raise ServiceBusyError(f"the answer was {answer.status}")
                if answer.status == 421 and (problem := _problem(answer)):
                    raise UsageError(f"{self.base}: {problem}")
                there = answer.geturl() or ""
                return there, answer.read(_MOST_PROBLEM_BYTES) if answer.status == 200 else b""

        there, data = self.retries.run(ask, "reach the server", self.base)
        try:
            document = json.loads(data)
        except ValueError:
            return False
        if not isinstance(document, dict) or document.get("service") != "zstore":
            return False
        if "://" in there and (base := there.removesuffix("/api")) != self.base:
            raise UsageError(f"the service of {self.base} is at {base}: name that in the URL")
        return True

    # -- requests ---------------------------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        *,
        body: Body | None = None,
        headers: Mapping[str, str] | None = None,
        stream: bool = False,
        accept: Collection[int] = (),
        timeout_s: float | None = None,
    ) -> Answer:
        """Return the answer to one try of a request; `path` begins with `/` and is encoded, with its query.

        With `stream` the answer's body is read by the caller, who closes the answer (`with`); else it is `answer.data`. Raises
        the errors of `refuse` for statuses from 300 on that are not in `accept`, and an error that `Retries` tries again for a
        connection that fails. A `body` that is a file or an iterator has its length in `headers`, otherwise it goes in chunks.
        """
        answer = self._send(method, path, body, {**self.headers, **(headers or {})}, timeout_s)
        try:
            if answer.status >= 300 and answer.status not in accept:
                refuse(answer.status, _problem(answer), path=f"{self.base}{path}", has_token=self.has_token)
            if not stream:
                answer.read(cache_content=True)
        except BaseException:
            answer.close()
            raise
        if not stream:
            answer.release_conn()
        return answer

    def _send(
        self,
        method: str,
        path: str,
        body: Body | None,
        headers: Mapping[str, str],
        timeout_s: float | None,
        *,
        follow: bool = False,
    ) -> Answer:
        timeout = urllib3.Timeout(connect=_CONNECT_S, read=timeout_s or _READ_S)
        try:
            return self._pool.request(
                method,
                f"{self.base}{path}",
                body=body,
                headers={"User-Agent": f"zstore/{__version__}", **headers},
                preload_content=False,
                redirect=follow,
                retries=urllib3.Retry(total=None, connect=0, read=0, status=0, other=0, redirect=5)
                if follow
                else False,
                timeout=timeout,
            )
        except HTTPError as error:
            cause = error.reason if isinstance(error, MaxRetryError) else error
            if isinstance(cause, SSLError) and "WRONG_VERSION_NUMBER" in str(cause):
                raise UsageError(
                    f"{self.base} does not speak TLS: if it is a service without a certificate, write http:// in place of https://"
                ) from error
            if isinstance(cause, SSLError):
                raise UsageError(
                    f"{self.base} cannot be trusted: {cause}; name a file of the certificates to trust with "
                    'storage_options={"ca_certs": "FILE"}'
                ) from error
            if isinstance(cause, NewConnectionError | ConnectTimeoutError):
                raise ConnectionError(
                    f"no connection to {self.base}: {cause.__cause__ or 'it takes too long'}"
                ) from error
            raise

    def call(self, operation: Callable[[], T], what: str, path: str) -> T:
        """Return what `operation`, made of `request`s, returns, tried again if it fails; for messages `what` is done, as
        "read", with `path`, a URL. See `Retries.run` for the errors."""
        self.traffic.count(requests=1)
        return self.retries.run(operation, what, path)

    def ask(self, method: str, path: str, document: Any = None, *, timeout_s: float | None = None) -> Any:
        """Return the JSON that answers a request with `document` as its JSON (None: without a body), tried again if that
        fails. Raises CheckpointNotFoundError if the service lacks the resource, StorageError if its answer is not JSON."""
        body = None if document is None else json.dumps(document).encode()
        headers = {"Accept": "application/json"} | ({} if body is None else {"Content-Type": "application/json"})

        def attempt() -> bytes:
            return self.request(method, path, body=body, headers=headers, timeout_s=timeout_s).data

        data = self.call(attempt, f"{method} {path}", self.base)
        self.traffic.count(read_bytes=len(data), written_bytes=len(body or b""))
        try:
            return json.loads(data)
        except ValueError as error:
            raise StorageError(
                f"expected JSON from {method} {path}, got {len(data)} other bytes", path=self.base
            ) from error


def refuse(status: int, problem: str, *, path: str, has_token: bool) -> NoReturn:
    """Raise the error that a status means: one of ours, or ServiceBusyError if the request may be repeated."""
    text = f"{path}: {problem}" if problem else f"{path}: the answer was {status}"
    if status == 401:
        what = "does not accept the token given" if has_token else "needs a token"
        raise UsageError(f"{path.partition('://')[2].partition('/')[0]} {what}: give it by {WHERE_TOKENS_GO}")
    if status in _REFUSALS:
        raise _REFUSALS[status](text)
    if status in _PASSING:
        raise ServiceBusyError(text)
    raise StorageError(text if problem else f"{text}, which zstore does not expect")


def _problem(answer: Answer) -> str:
    """Return the problem that the body of an answer describes."""
    data = answer.read(_MOST_PROBLEM_BYTES)
    answer.close() if answer.headers.get("Content-Length") is None else answer.drain_conn()
    try:
        document = json.loads(data)
    except ValueError:
        return ""
    error = document.get("error") if isinstance(document, dict) else None
    return error if isinstance(error, str) else ""


def _bearer(token: str) -> str:
    if not token.isascii() or not token.isprintable() or " " in token or not token:
        raise UsageError(
            "the token for the service has blanks or characters that are not ASCII: expected it as it was made"
        )
    return f"Bearer {token}"


def _basic(user: tuple[str, str]) -> str:
    return "Basic " + base64.b64encode(":".join(user).encode()).decode("ascii")
