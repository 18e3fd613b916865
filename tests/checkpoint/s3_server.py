"""A real S3 protocol server on loopback, moto's, in a process of its own (extra `test`)."""

import contextlib
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """Start a server and yield the storage options that reach it; stop it at the end of the block."""
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield {"key": "testing", "secret": "testing", "client_kwargs": {"endpoint_url": _address(process)}}
        finally:
            process.kill()


def _address(process: subprocess.Popen[str]) -> str:
    if process.stderr is None:
        raise RuntimeError("the server was started without a pipe")
    said: list[str] = []
    for line in process.stderr:
        said.append(line)
        if found := re.search(r"Running on (http://\S+)", line):
            # It logs each request: a pipe that nobody reads would stop it.
            threading.Thread(target=deque, args=(process.stderr, 0), daemon=True).start()
            return found[1]
    raise RuntimeError(f"the server ended before it listened:\n{''.join(said)}")
