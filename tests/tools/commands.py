"""Commands and benchmarks as a user starts them."""

import contextlib
import importlib
import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from bench.children import Told
from tests import warm
from zstore.tools import cli


def run(*words: str, env: Mapping[str, str] | None = None, anew: bool = False) -> subprocess.CompletedProcess[str]:
    """`python -m zstore` in a process of its own, without colours."""
    plain = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "160", **(env or {})}
    command = [sys.executable, "-m", "zstore", *words]
    return warm.run(command, capture_output=True, text=True, check=False, env=plain, timeout=100, anew=anew)


def here(*words: object) -> tuple[int, str, str]:
    """Run a command in this process; return its exit code, and what it wrote to stdout and stderr."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["zstore", *map(str, words)])
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def done(line: str) -> None:
    """Run a line of a page, which has to end well."""
    code, _, err = here(*shlex.split(line)[1:])
    assert code == 0, err


def run_here(module: str, spec: dict[str, Any], **how: Any) -> Told:
    """Stand in for `run_child`, without the seconds that a process takes to start."""
    events: list[dict[str, Any]] = []
    contenders = importlib.import_module(module).CONTENDERS
    contenders[spec["contender"]](spec, lambda event, **facts: events.append({"event": event, **facts}))
    plain = json.loads(json.dumps(events))
    return Told(events=plain, error=None, seconds=0.0, memory_limit="none asked for", limited_peak_bytes=None)
