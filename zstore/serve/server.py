"""Running the service: sockets, TLS, and a clean end."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import uvicorn

from .app import make_app
from .settings import Settings


def run(settings: Settings) -> None:
    """Serve until a signal ends it."""
    make_server(settings).run()


def make_server(settings: Settings) -> uvicorn.Server:
    """Return the server, which listens once it runs."""
    config = uvicorn.Config(
        make_app(settings),
        host=settings.host,
        port=settings.port,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)


@contextlib.contextmanager
def serving(settings: Settings) -> Iterator[str]:
    """Serve from a thread for the length of a `with` block; yields the base URL, without a `/` at its end."""
    server = make_server(settings)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.create_server((settings.host, settings.port), family=family, backlog=2048) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="zstore-serve", daemon=True)
        thread.start()
        scheme = "http" if settings.tls_certificate is None else "https"
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        try:
            yield f"{scheme}://{host}:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
