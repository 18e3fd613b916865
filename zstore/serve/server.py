"""Running the service with uvicorn."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from ..errors import UsageError
from .app import make_app
from .settings import Settings

_GRACE_S = 3
"""How long requests may take to end once the service is to."""
_BACKLOG = 2048


def run(settings: Settings, announce: Callable[[str], None] = lambda _: None) -> None:
    """Serve until SIGINT or SIGTERM ends it; `announce` is told the URL once it listens.

    Raises UsageError for an address that cannot be listened on.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a client takes two
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    with listen(settings) as listening:
        announce(url_of(settings, listening))
        _server(settings).run(sockets=[listening])


def _server(settings: Settings) -> uvicorn.Server:
    config = uvicorn.Config(
        make_app(settings), ws="none", log_level="error", access_log=False, timeout_graceful_shutdown=_GRACE_S
    )
    return uvicorn.Server(config)


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
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listening.getsockname()[1]}"


@contextlib.contextmanager
def serving(settings: Settings) -> Iterator[str]:
    """Serve from a thread for the length of a `with` block; yields the base URL, without a `/` at its end."""
    server = _server(settings)
    with listen(settings) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="zstore-serve", daemon=True)
        thread.start()
        try:
            yield url_of(settings, listening)
        finally:
            server.should_exit = True
            thread.join()
