"""Commands and benchmarks as a user starts them."""

import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from bench.children import Told
from tests import warm


def run(*words: str, env: Mapping[str, str] | None = None, anew: bool = False) -> subprocess.CompletedProcess[str]:
    """`python -m zstore` in a process of its own, without colours."""
    plain = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "160", **(env or {})}
    command = [sys.executable, "-m", "zstore", *words]
    return warm.run(command, capture_output=True, text=True, check=False, env=plain, timeout=100, anew=anew)


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def run_here(module: str, spec: dict[str, Any], **how: Any) -> Told:
    """Stand in for `run_child`, without the seconds that a process takes to start."""
    events: list[dict[str, Any]] = []
    contenders = importlib.import_module(module).CONTENDERS
    contenders[spec["contender"]](spec, lambda event, **facts: events.append({"event": event, **facts}))
    plain = json.loads(json.dumps(events))
    return Told(events=plain, error=None, seconds=0.0, memory_limit="none asked for", limited_peak_bytes=None)
