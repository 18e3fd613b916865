"""Who may do what: tokens, sessions of browsers, links, and a route's demands on a request.

[Note: tokens]
Whoever shows a token (`Authorization: Bearer TOKEN`) may do what its role says, to the runs that it is for. A browser shows it
once, to `POST /api/session`, and gets a cookie whose value is random and known to this process alone; it is worth what the
token is worth at the time of each request. The cookie of a link is the link. Tokens are compared in constant time, and appear
in no log and no answer. An address that shows many wrong ones is told to wait; a right one is taken at any time, since a token
is too long to be guessed (`zstore.serve.settings`), and others may have the same address.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import hmac
import ipaddress
import math
import secrets
import threading
import time
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from .audit import record
from .cache import Cache
from .settings import Settings
from .tokens import ROLES, Link, Role, Token, Tokens, digest_of, read_link

SESSION_S = 7 * 24 * 3600.0
"""How long a browser stays signed in."""
OWN_NAME = "ZSTORE_TOKEN"
"""Name of the token that is in no file of tokens."""
_MOST_SESSIONS = 1000
_TRIES = 20
_TRIES_PER_S = 1.0
_MOST_CACHED = 4096
_CHALLENGE = {"WWW-Authenticate": "Bearer"}


class WrongTokens:
    """Counts wrong tokens by address. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: Cache[str, tuple[float, float]] = Cache(_MOST_CACHED)
        """By address: tries left, and the time of that count."""
        self._tried: Cache[bytes, bool] = Cache(_MOST_CACHED)
        """Digests of address and wrong token."""

    def may_try(self, address: str) -> bool:
        """Return whether the address has a try left."""
        with self._lock:
            return self._now(address) >= 1

    def count(self, address: str, token: bytes) -> bool:
        """Record a wrong token; return whether it is new."""
        digest = hashlib.sha256(address.encode() + b"\0" + token).digest()
        with self._lock:
            if self._tried.get(digest):
                return False
            self._tried.put(digest, True)
            self._left.put(address, (self._now(address) - 1, time.monotonic()))
            return True

    def _now(self, address: str) -> float:
        left, at = self._left.get(address) or (float(_TRIES), 0.0)
        return min(float(_TRIES), left + (time.monotonic() - at) * _TRIES_PER_S)


@dataclass(frozen=True, kw_only=True)
class Grant:
    """What a request may do, because of the token or the link that it showed."""

    name: str = ""
    role: Role = "read"
    runs: tuple[str, ...] = ("*",)
    sha256: str = ""
    """Of the token."""
    link: str = ""
    """The link's parameter."""

    def sees(self, run: str) -> bool:
        """Return whether the run of that name is there for it."""
        return any(fnmatch.fnmatchcase(run, pattern) for pattern in self.runs)

    def may(self, role: Role) -> bool:
        """Return whether it may do what needs `role`."""
        return ROLES.index(self.role) >= ROLES.index(role)


ANYBODY = Grant()
"""Of all requests to a service without tokens."""


class Permissions:
    """Knows tokens, links and the sessions of browsers. Usable from any thread."""

    def __init__(self, settings: Settings) -> None:
        self._tokens = Tokens(settings.tokens)
        self._own: tuple[Token, ...] = ()
        if settings.token is not None:
            sha256 = digest_of(settings.token.encode())
            self._own = (Token(name=OWN_NAME, role="act", created=0, sha256=sha256),)
        self.has_token = settings.needs_token
        """Whether the service has tokens at all."""
        self._sessions: Cache[bytes, tuple[float, Grant]] = Cache(_MOST_SESSIONS)
        """Digest of a cookie's value -> when it ends, and what was granted then."""
        self._wrong = WrongTokens()

    def of_token(self, shown: bytes, address: str) -> Grant | None:
        """Return what a token may do, None if it is not one. Raises HTTPException (429) after many wrong ones."""
        token = self._find(digest_of(shown))
        if token is not None and not _ended(token):
            return _grant_of(token)
        self._refuse(shown, address, "" if token is None else token.name)
        return None

    def current(self, grant: Grant) -> Grant | None:
        """Return what a grant is worth now: None if its token was removed, or it or its link has ended."""
        if grant.link:
            link = self._link(grant.link)
            return None if link is None else _grant_of_link(link, grant.link)
        if not grant.sha256:
            return grant
        token = self._find(grant.sha256)
        return None if token is None or _ended(token) else _grant_of(token)

    def begin_session(self, grant: Grant) -> str:
        """Return the value of a new session's cookie."""
        value = secrets.token_urlsafe(32)
        self._sessions.put(_digest(value), (time.monotonic() + SESSION_S, grant))
        return value

    def of_cookie(self, value: str) -> Grant | None:
        """Return what a cookie's value lets its browser do, None if its session or link has ended."""
        ends_s, grant = self._sessions.get(_digest(value)) or (math.inf, Grant(link=value))
        return self.current(grant) if ends_s > time.monotonic() else None

    def end_session(self, value: str) -> None:
        """End a session."""
        self._sessions.remove(_digest(value))

    def of_request(self, request: Request) -> Grant | None:
        """Return what a request may do, by its token, its cookie or its link; None: nothing.

        A link's parameter is taken out of the query, and noted in the state if it grants more than the browser's cookie does.
        Raises HTTPException: 429, and 401 for a link that has ended.
        """
        shown_link = _take_link(request)
        if not self.has_token:
            return ANYBODY
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        grant = None
        if scheme.lower() == "bearer":
            grant = self.of_token(shown.strip().encode("latin-1"), address_of(request))
        elif (value := cookie_of(request)) is not None:
            grant = self.of_cookie(value)
        if not shown_link:
            return grant
        link = self._link(shown_link, request.scope["path"])
        if link is not None and (grant is None or not grant.sees(link.run)):
            request.scope["state"]["link"] = shown_link
            return _grant_of_link(link, shown_link)
        if grant is None:
            self._refuse(shown_link.encode(), address_of(request), "link")
            raise HTTPException(401, "this link has ended, or is for something else: ask whoever sent it for another")
        return grant

    def _link(self, text: str, path: str = "") -> Link | None:
        """Return the link of a text, None if it has ended, or if it is for a file other than that at `path`."""
        link = read_link(self._tokens.now().link_key, text)
        if link is not None and link.weights and path != f"/weights/{link.run}/{link.weights}":
            return None
        return link

    def _find(self, sha256: str) -> Token | None:
        found = None
        for token in (*self._own, *self._tokens.now().tokens):
            if hmac.compare_digest(bytes.fromhex(token.sha256), bytes.fromhex(sha256)):
                found = token
        return found

    def _refuse(self, shown: bytes, address: str, name: str) -> None:
        """Count a wrong token or link, and note it in the audit log if it is new."""
        source = network_of(address)
        if not self._wrong.may_try(source):
            raise HTTPException(429, "too many wrong tokens from this address: wait a second", {"Retry-After": "1"})
        if self._wrong.count(source, shown):
            record(what="refused token", token=name, address=address, outcome="refused")


def _ended(token: Token) -> bool:
    return token.expires is not None and token.expires <= time.time()


def _grant_of(token: Token) -> Grant:
    return Grant(name=token.name, role=token.role, runs=token.runs, sha256=token.sha256)


def _grant_of_link(link: Link, text: str) -> Grant:
    return Grant(name="link", runs=(glob.escape(link.run),), link=text)


def _take_link(request: Request) -> str:
    """Return the link's parameter of a URL, and take it out of the query that routes see."""
    parts = request.scope["query_string"].split(b"&")
    request.scope["query_string"] = b"&".join(part for part in parts if not part.startswith(b"share="))
    return next((part[6:].decode("ascii", "replace") for part in parts if part.startswith(b"share=")), "")


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode("utf-8", "replace")).digest()


def network_of(address: str) -> str:
    """Return the part of an address that counts as one source: of IPv6 the network, since a machine has all its addresses."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return address if parsed.version == 4 else str(ipaddress.ip_network((parsed, 64), strict=False))


def address_of(request: Request) -> str:
    """Return the address that a request came from."""
    return request.client.host if request.client else ""


def cookie_name(request: Request) -> str:
    """Return the name of the session's cookie: cookies of one host are shared by its ports."""
    server = request.scope.get("server") or ("", 0)
    return f"zstore-session-{server[1]}"


def cookie_of(request: Request) -> str | None:
    """Return the value of the session's cookie, None if there is none."""
    return request.cookies.get(cookie_name(request))


def set_cookie(request: Request, answer: Response, value: str) -> None:
    """Have the browser keep a session's value, or a link, and show it from now on."""
    secure = request.scope["scheme"] == "https"
    name, seconds = cookie_name(request), int(SESSION_S)
    answer.set_cookie(name, value, max_age=seconds, secure=secure, httponly=True, samesite="strict")


def grant_of(request: Request) -> Grant | None:
    """Return what a request may do, None if it showed nothing that is valid."""
    grant: Grant | None = request.scope.get("state", {}).get("grant")
    return grant


def is_authorized(request: Request) -> bool:
    """Return whether a request showed a token or a link."""
    return grant_of(request) not in (None, ANYBODY)


def require_token(request: Request) -> Grant:
    """Return what a request may do. Raises HTTPException (401) if that is nothing."""
    grant = grant_of(request)
    if grant is None:
        raise HTTPException(401, "this needs a token: send `Authorization: Bearer TOKEN`, or sign in", _CHALLENGE)
    return grant


def require_role(request: Request, role: Role) -> None:
    """Raise HTTPException unless a request may do what needs `role`: 401 without a token, 403 if its role is less, or if the
    service takes no actions."""
    settings: Settings = request.app.state.service.settings
    if not settings.allow_actions:
        raise HTTPException(403, "this service takes no actions: start it with --allow-actions")
    grant = require_token(request)
    if not grant.may(role):
        raise HTTPException(403, f"this needs a token with the role {role}: the role of {grant.name!r} is {grant.role}")
