"""Checks before every route: whom the service answers, the limits of requests, and the headers of every answer.

[Note: browsers]
A page of another site can make a browser send requests here. So the `Host` must be a name of this service (else a name that is
made to lead here would pass for it), requests that another site's page made are refused except for links, nothing is shared
across origins, and requests that change anything come from the service's own page, or from no browser.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
import time
from functools import cache, lru_cache
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..audit import record
from ..auth import address_of, require_token, token_of
from ..replies import problem
from ..service import EventStreams, Service
from ..settings import Settings

_log = logging.getLogger("zstore.serve")

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Headers of every answer."""
_RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
MOST_BODY_BYTES = 1024 * 1024
"""Most bytes of a request with JSON."""
MOST_URL_BYTES = 8192
MOST_PARAMETERS = 64
MOST_SEGMENTS = 64
STREAMING = "/api/uploads"
"""Requests below it bring data, whose limits their routes know."""

_SAFE = frozenset({"GET", "HEAD"})
_OPEN = re.compile(r"/|/[^/]+|/run/.*|/assets/.*|/api/session", re.DOTALL)
"""Paths that need no token: the page's shell, `/<run>`, which leads to it, `/healthz`, and `/api`."""


class Guard:
    """Middleware around all routes: checks requests, and gives every answer its headers.

    An exception that no handler knows becomes 500 without detail, and is logged with method and path.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, self._service.streams)
        request = Request(scope, receive)
        metrics, began_s = self._service.metrics, time.perf_counter()
        metrics.under_way += 1
        try:
            body = _Body(receive, None if scope["path"].startswith(STREAMING) else MOST_BODY_BYTES)
            try:
                self._check(request)
                await self._app(scope, body.receive, answer.send)
            except HTTPException as error:
                if answer.started:
                    raise
                await problem(error.status_code, error.detail, dict(error.headers or {}))(scope, receive, answer.send)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            if not (self._service.streams.are_closed and answer.started):
                raise
            await answer.send({"type": "http.response.body", "body": b"", "more_body": False})
        except Exception:
            _log.exception("%s %r failed", scope["method"], scope["path"])
            if not answer.started:
                await problem(500, "the service failed; its log says why")(scope, receive, answer.send)
        finally:
            metrics.under_way -= 1
            metrics.ended(scope, answer.status, answer.sent_bytes, time.perf_counter() - began_s)
            _audit(request, answer.status)

    def _check(self, request: Request) -> None:
        settings = self._service.settings
        check_url(request)
        check_host(request, settings)
        check_origin(request)
        check_body(request)
        state = request.scope.setdefault("state", {})
        state["token"] = self._service.access.of_request(request)
        if not _OPEN.fullmatch(request.scope["path"]):
            require_token(request)


def _audit(request: Request, status: int) -> None:
    """Note a request in the audit log if its route has said what it does."""
    state, token = request.scope.get("state", {}), token_of(request)
    if "audit" in state:
        run = request.path_params.get("run") or state.get("run", "")
        name, path = "" if token is None else token.name, request.scope["path"]
        record(what=state["audit"], token=name, address=address_of(request), run=run, path=path, outcome=status)


class _Answer:
    """Gives an answer its headers, and notes one without an end of its own."""

    def __init__(self, send: Send, streams: EventStreams) -> None:
        self._send = send
        self._streams = streams
        self._task = asyncio.current_task()  # the sender may be a separate task
        self.started = False
        self.status = 499
        """Of the answer; if there was none, since the client went away."""
        self.sent_bytes = 0

    async def send(self, message: Message) -> None:
        self.sent_bytes += len(message.get("body", b"")) + message.get("count", 0)
        if message["type"] == "http.response.start":
            self.started, self.status = True, message["status"]
            own = message.get("headers", ())
            names = dict(own)
            message = {**message, "headers": [*own, *(one for one in _RAW_HEADERS if one[0] not in names)]}
            if names.get(b"content-type", b"").startswith(b"text/event-stream"):
                self._streams.add(self._task)
        await self._send(message)


class _Body:
    """Counts the bytes of a request's body."""

    def __init__(self, receive: Receive, most_bytes: int | None) -> None:
        self._receive = receive
        self._most_bytes = most_bytes
        self._nbytes = 0

    async def receive(self) -> Message:
        message = await self._receive()
        self._nbytes += len(message.get("body", b""))
        if self._most_bytes is not None and self._nbytes > self._most_bytes:
            raise _too_large()
        return message


def _too_large() -> HTTPException:
    return HTTPException(413, f"the body of this request may have {MOST_BODY_BYTES} bytes")


def check_url(request: Request) -> None:
    """Raise HTTPException for a URL that is too long, or has parts that no path of the service has."""
    path, query = request.scope["path"], request.scope["query_string"]
    if len(request.scope["raw_path"]) + len(query) > MOST_URL_BYTES:
        raise HTTPException(414, f"a URL may have {MOST_URL_BYTES} bytes")
    if query.count(b"&") + query.count(b";") >= MOST_PARAMETERS:
        raise HTTPException(400, f"a URL may have {MOST_PARAMETERS} parameters")
    segments = path.replace("\\", "/").split("/")
    if len(segments) > MOST_SEGMENTS:
        raise HTTPException(400, f"a path may have {MOST_SEGMENTS} components")
    first = request.scope["raw_path"].lstrip(b"/").partition(b"/")[0].lower()
    if b"%2f" in first or any(segment in (".", "..") for segment in segments):
        raise HTTPException(404, "there is nothing here")


def check_host(request: Request, settings: Settings) -> None:
    """Raise HTTPException unless the request names this service as its host."""
    named = request.headers.getlist("host")
    if len(named) != 1:
        raise HTTPException(400, "expected one Host header")
    name = host_name(named[0])
    if name is None or not is_own_host(name, settings):
        raise HTTPException(421, "this service is not called so: use its address, or start it with --allow-host NAME")


@lru_cache(256)
def host_name(text: str) -> str | None:
    """Return name or address in `host:port`, in lower case; None if it is none."""
    try:
        parts = urlsplit(f"//{text}")
        _ = parts.port
    except ValueError:
        return None
    if parts.netloc != text or "@" in text or not parts.hostname:
        return None
    return parts.hostname.rstrip(".")


def is_own_host(name: str, settings: Settings) -> bool:
    """Return whether a host of that name is this service.

    Nobody can make an address lead here as a name can, so all are accepted if the service listens on more than this
    machine.
    """
    if name == settings.host.lower() or name in (host.lower().rstrip(".") for host in settings.hosts):
        return True
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback or not settings.is_loopback
    except ValueError:
        return not settings.is_loopback and name in _names_of_machine()


@cache
def _names_of_machine() -> frozenset[str]:
    name = socket.gethostname().lower()
    return frozenset({name, name.partition(".")[0], f"{name.partition('.')[0]}.local", socket.getfqdn().lower()})


def check_origin(request: Request) -> None:
    """Raise HTTPException for a request that a page of another site made, unless it is a link that somebody followed."""
    headers = request.headers
    safe = request.method in _SAFE
    site = headers.get("sec-fetch-site", "none").lower()
    foreign = site not in ("none", "same-origin")
    if safe:
        refused = foreign and headers.get("sec-fetch-mode", "").lower() != "navigate"
    else:
        origin = headers.get("origin")
        refused = foreign or (origin is not None and _netloc(origin) != headers["host"].lower())
    if refused:
        raise HTTPException(403, "requests from pages of other sites are refused")


def _netloc(origin: str) -> str:
    """Return host and port as the Host header has them."""
    try:
        parts = urlsplit(origin.lower())
        return parts.netloc if parts.scheme in ("http", "https") else ""
    except ValueError:
        return ""


def check_body(request: Request) -> None:
    """Raise HTTPException for a body that is too large, or is not JSON; routes of uploads check their own."""
    if request.scope["path"].startswith(STREAMING):
        return
    headers = request.headers
    length = headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit() or int(length) > MOST_BODY_BYTES:
        raise _too_large()
    has_body = int(length) > 0 or "transfer-encoding" in headers
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if has_body and request.method not in _SAFE and kind != "application/json":
        raise HTTPException(415, f"expected Content-Type: application/json, got {kind or 'none'!r}")
