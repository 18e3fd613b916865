"""Who may do what: tokens, sessions of browsers, links, and a route's demands on a request.

[Note: tokens]
Whoever shows a token (`Authorization: Bearer TOKEN`) may do what its role says, to the runs that it is for. A browser shows it
once, to `POST /api/session`, and gets a cookie whose value is random and known to this process alone; it is worth what the
token is worth at the time of each request. The cookie of a link is the link. Tokens are compared in constant time, and appear
in no log and no answer. An address that shows many wrong ones is told to wait; a right one is taken at any time, since a token
is too long to be guessed (`zstore.serve.settings`), and others may have the same address.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import threading
import time

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from .audit import record
from .cache import Cache
from .settings import Settings
from .tokens import Role, Token, Tokens, digest_of, read_link

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


ANYBODY = Token(name="anybody", role=Role.READ, created=0, sha256="0" * 64)
"""Stands for a token in requests to a service that has none."""


class Permissions:
    """Knows tokens, links and the sessions of browsers. Usable from any thread."""

    def __init__(self, settings: Settings) -> None:
        self._tokens = Tokens(settings.tokens)
        self._own: tuple[Token, ...] = ()
        if settings.token is not None:
            sha256 = digest_of(settings.token.encode())
            self._own = (Token(name=OWN_NAME, role=Role.ACT, created=0, sha256=sha256),)
        self.has_token = settings.needs_token
        """Whether the service has tokens at all."""
        self._sessions: Cache[bytes, tuple[float, Token]] = Cache(_MOST_SESSIONS)
        """Digest of a cookie's value -> when it ends, and its token."""
        self._wrong = WrongTokens()

    def of_token(self, shown: bytes, address: str) -> Token | None:
        """Return the token that was shown, None if it is not valid. Raises HTTPException (429) after many wrong ones."""
        token = self._find(digest_of(shown))
        if token is None or token.has_expired:
            self._refuse(shown, address, "" if token is None else token.name)
            return None
        return token

    def current(self, token: Token) -> Token | None:
        """Return a token as it is now; None if it was removed or has expired, or if it is a link and their key was removed."""
        if token is ANYBODY:
            return token
        key = self._tokens.now().link_key
        is_link = key != "" and token.sha256 == digest_of(key.encode())
        found = token if is_link else self._find(token.sha256)
        return None if found is None or found.has_expired else found

    def begin_session(self, token: Token) -> str:
        """Return the value of a new session's cookie."""
        value = secrets.token_urlsafe(32)
        self._sessions.put(_digest(value), (time.monotonic() + SESSION_S, token))
        return value

    def of_cookie(self, value: str) -> Token | None:
        """Return the token that a browser's session began with, or its link; None if that is not valid any more."""
        if "." in value:
            return read_link(self._tokens.now().link_key, value)
        ends_s, token = self._sessions.get(_digest(value)) or (0.0, ANYBODY)
        return self.current(token) if ends_s > time.monotonic() else None

    def end_session(self, value: str) -> None:
        """End a session."""
        self._sessions.remove(_digest(value))

    def of_request(self, request: Request) -> Token | None:
        """Return what a request may do, by its token, its cookie or its link; None: nothing.

        A link's parameter is taken out of the query, and noted in the state if it gives more than the browser's cookie does.
        Raises HTTPException: 429, and 401 for a link that has ended.
        """
        shown_link = _take_link(request)
        if not self.has_token:
            return ANYBODY
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        token = None
        if scheme.lower() == "bearer":
            token = self.of_token(shown.strip().encode("latin-1"), address_of(request))
        elif (value := cookie_of(request)) is not None:
            token = self.of_cookie(value)
        if not shown_link:
            return token
        linked = read_link(self._tokens.now().link_key, shown_link, request.scope["path"])
        if linked is not None and (token is None or not token.sees(linked.runs[0])):
            request.scope["state"]["link"] = shown_link
            return linked
        if token is None:
            self._refuse(shown_link.encode(), address_of(request), "link")
            raise HTTPException(401, "this link has ended, or is for something else: ask whoever sent it for another")
        return token

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


def token_of(request: Request) -> Token | None:
    """Return what a request may do, None if it showed nothing that is valid."""
    token: Token | None = request.scope.get("state", {}).get("token")
    return token


def require_token(request: Request) -> Token:
    """Return what a request may do. Raises HTTPException (401) if that is nothing."""
    token = token_of(request)
    if token is None:
        raise HTTPException(401, "this needs a token: send `Authorization: Bearer TOKEN`, or sign in", _CHALLENGE)
    return token


def require_role(request: Request, role: Role) -> None:
    """Raise HTTPException unless a request may do what needs `role`: 401 without a token, 403 if its role is less, or if the
    service takes no actions."""
    settings: Settings = request.app.state.service.settings
    if not settings.allow_actions:
        raise HTTPException(403, "this service takes no actions: start it with --allow-actions")
    token = require_token(request)
    if not token.may(role):
        raise HTTPException(403, f"this needs a token with the role {role}: the role of {token.name!r} is {token.role}")
