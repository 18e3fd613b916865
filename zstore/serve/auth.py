"""Who may do what: the token, sessions of browsers, and a route's demands on a request.

[Note: tokens]
Whoever shows the token (`Authorization: Bearer TOKEN`) is authorized. A browser shows it once, to `POST /api/session`, and
gets a cookie whose value is random and known to this process alone. Tokens are compared in constant time, and appear in no
log and no answer. An address that shows many wrong ones is told to wait; the right one is taken at any time, since a token is
too long to be guessed (`zstore.serve.settings`), and others may have the same address.
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

from .cache import Cache
from .settings import Settings

SESSION_S = 7 * 24 * 3600.0
"""How long a browser stays signed in."""
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

    def count(self, address: str, token: bytes) -> None:
        """Record a wrong token."""
        digest = hashlib.sha256(address.encode() + b"\0" + token).digest()
        with self._lock:
            if self._tried.get(digest):
                return
            self._tried.put(digest, True)
            self._left.put(address, (self._now(address) - 1, time.monotonic()))

    def _now(self, address: str) -> float:
        left, at = self._left.get(address) or (float(_TRIES), 0.0)
        return min(float(_TRIES), left + (time.monotonic() - at) * _TRIES_PER_S)


class Permissions:
    """Knows the token and the sessions of browsers. Usable from any thread."""

    def __init__(self, settings: Settings) -> None:
        self._token = None if settings.token is None else settings.token.encode()
        self._sessions: Cache[bytes, float] = Cache(_MOST_SESSIONS)
        """Digest of a cookie's value -> when it ends."""
        self._wrong = WrongTokens()

    @property
    def has_token(self) -> bool:
        """Whether the service has a token at all."""
        return self._token is not None

    def is_token(self, shown: bytes, address: str) -> bool:
        """Return whether `shown` is the token. Raises HTTPException (429) if the address tried too many wrong ones."""
        if self._token is None:
            return False
        # Digests have one length, so that not even the token's leaks.
        if hmac.compare_digest(hashlib.sha256(shown).digest(), hashlib.sha256(self._token).digest()):
            return True
        source = network_of(address)
        if not self._wrong.may_try(source):
            raise HTTPException(429, "too many wrong tokens from this address: wait a second", {"Retry-After": "1"})
        self._wrong.count(source, shown)
        return False

    def begin_session(self) -> str:
        """Return the value of a new session's cookie."""
        value = secrets.token_urlsafe(32)
        self._sessions.put(_digest(value), time.monotonic() + SESSION_S)
        return value

    def is_session(self, value: str) -> bool:
        """Return whether a cookie's value belongs to a session that has not ended."""
        ends_s = self._sessions.get(_digest(value))
        return ends_s is not None and ends_s > time.monotonic()

    def end_session(self, value: str) -> None:
        """End a session."""
        self._sessions.remove(_digest(value))

    def authorized(self, request: Request) -> bool:
        """Return whether a request shows the token, or a session's cookie. Raises HTTPException (429)."""
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.is_token(shown.strip().encode("latin-1"), address_of(request))
        return (value := cookie_of(request)) is not None and self.is_session(value)


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


def is_authorized(request: Request) -> bool:
    """Return whether a request showed the token."""
    return bool(request.scope.get("state", {}).get("authorized", False))


def may_read(request: Request) -> bool:
    """Return whether a request may read: with the token, or if there is none."""
    settings: Settings = request.app.state.service.settings
    return settings.token is None or is_authorized(request)


def require_token(request: Request) -> None:
    """Raise HTTPException (401) unless a request showed the token."""
    if not is_authorized(request):
        raise HTTPException(401, "this needs the token: send `Authorization: Bearer TOKEN`, or sign in", _CHALLENGE)


def require_action(request: Request) -> None:
    """Raise HTTPException unless a request may act: 403 if the service takes no actions, 401 without the token."""
    settings: Settings = request.app.state.service.settings
    if not settings.allow_actions:
        raise HTTPException(403, "this service takes no actions: start it with --allow-actions")
    require_token(request)
