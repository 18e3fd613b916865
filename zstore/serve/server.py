"""Running the service: sockets, TLS, and a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from ..errors import UsageError
from .app import make_app
from .guard.connections import ConnectionLimits
from .guard.tls import make_context
from .service import Service
from .settings import Settings

_GRACE_S = 3
"""How long requests may take to end once the service is to."""
_BACKLOG = 2048
_M_ARENA_MAX = -8
_LIMITS = ConnectionLimits()


def run(settings: Settings, announce: Callable[[str], None] = lambda _: None) -> None:
    """Serve until SIGINT or SIGTERM ends it; `announce` is told the URL once it listens.

    Raises UsageError for an address that cannot be listened on, or TLS files that are not right.
    """
    _allow_many_files()
    _share_heaps()
    server = make_server(settings)
    with listen(settings) as listening:
        announce(url_of(settings, listening))
        server.run(sockets=[listening])


class Server(uvicorn.Server):
    """A server that ends answers that would go on forever."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End live pages at once, others in a few seconds."""
        self._service.streams.close()
        log = logging.getLogger("uvicorn.error")
        level = log.level
        log.setLevel(logging.CRITICAL)  # it tells of each request that was cut off, with its traceback
        try:
            await super().shutdown(sockets)
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            await asyncio.sleep(0)
        finally:
            log.setLevel(level)


def make_server(settings: Settings, limits: ConnectionLimits = _LIMITS) -> Server:
    """Return the server, which serves once it runs."""
    app: Starlette = make_app(settings)
    config = uvicorn.Config(
        app,
        http=limits.protocol(settings.trusted_proxies),
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        ws="none",
        lifespan="auto",
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=int(limits.idle_s),
        timeout_graceful_shutdown=_GRACE_S,
    )
    config.load()
    if settings.tls_certificate is not None and settings.tls_key is not None:
        config.ssl = make_context(settings.tls_certificate, settings.tls_key)
    return Server(config, app.state.service)


def listen(settings: Settings) -> socket.socket:
    """Return the socket that listens. Raises UsageError that says why it cannot."""
    host, port = settings.host, settings.port
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except socket.gaierror as error:
        raise UsageError(f"{host!r} is no address of this machine: {error.strerror}") from error
    except OSError as error:
        advice = "choose another with --port, or 0 for a free one"
        raise UsageError(f"cannot listen on {host}, port {port}: {os.strerror(error.errno or 0)}; {advice}") from error


def url_of(settings: Settings, listening: socket.socket) -> str:
    """Return the URL of the service, without a `/` at its end."""
    scheme = "http" if settings.tls_certificate is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{listening.getsockname()[1]}"


def _allow_many_files() -> None:
    """Raise the limit of open files as far as it goes: a client takes two."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))


def _share_heaps() -> None:
    """Let all threads share two heaps of glibc's: with one each they keep half as much memory again."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 2)


@contextlib.contextmanager
def serving(settings: Settings, limits: ConnectionLimits = _LIMITS) -> Iterator[str]:
    """Serve from a thread for the length of a `with` block; yields the base URL, without a `/` at its end."""
    server = make_server(settings, limits)
    with listen(settings) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="zstore-serve", daemon=True)
        thread.start()
        try:
            yield url_of(settings, listening)
        finally:
            server.should_exit = True
            thread.join()
