"""Servers as processes."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator


@contextlib.contextmanager
def started(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server; yield once it listens, end it after."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 30
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"{command[0]} does not listen on port {port}") from None
                    time.sleep(0.02)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port
