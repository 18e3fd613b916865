"""Starts one contender in a process of its own, under a memory limit where the system has one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zstore.tools.train import OFFLOAD_ENVIRONMENT

_ROOT = Path(__file__).resolve().parent.parent
_LIMIT_S = 3 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a contender told."""

    built: dict[str, Any] | None
    """Parameters, seconds, peak of the process and versions; None where it did not get so far."""
    steps: list[dict[str, Any]]
    end: dict[str, Any] | None
    error: str | None
    """The last lines that it wrote, where it failed."""
    memory_limit: str
    """How its memory was limited, or why not."""
    limited_peak_bytes: int | None
    """Most bytes charged to the limit, page cache included, where the kernel tells."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a process of its own told, event by event, and how it ended."""

    events: list[dict[str, Any]]
    error: str | None
    """The last lines that it wrote, where it failed."""
    seconds: float
    """From its start to its end."""
    memory_limit: str
    limited_peak_bytes: int | None

    def last(self, event: str) -> dict[str, Any] | None:
        """Return the last event of this kind."""
        return next((each for each in reversed(self.events) if each["event"] == event), None)


def run_contender(spec: dict[str, Any], *, python: str | None = None, memory_limit_bytes: int | None = None) -> Outcome:
    """Run a contender to its end; `spec` is as `bench.contenders` describes it, but for `out`."""
    told = run_child("bench.contenders", spec, python=python, memory_limit_bytes=memory_limit_bytes)
    return Outcome(
        built=told.last("built"),
        steps=[each for each in told.events if each["event"] == "step"],
        end=told.last("end"),
        error=told.error,
        memory_limit=told.memory_limit,
        limited_peak_bytes=told.limited_peak_bytes,
    )


def run_child(
    module: str, spec: dict[str, Any], *, python: str | None = None, memory_limit_bytes: int | None = None
) -> Told:
    """Run the function `run` of a module in a process of its own; it finds `spec`, with the file `out` for its events, as
    JSON on the command line."""
    command = [python or sys.executable, "-c", f"from {module} import run; run()"]
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    # What `zstore train` sets for state on disk, for every contender. DeepSpeed looks for ninja on the path.
    environment = os.environ | {"PYTHONPATH": path, "DS_ACCELERATOR": "cpu"} | OFFLOAD_ENVIRONMENT
    if python is not None:
        environment["PATH"] = os.pathsep.join([str(Path(python).absolute().parent), environment.get("PATH", "")])
    with tempfile.TemporaryDirectory(prefix="zstore-bench-") as name, limited_memory(memory_limit_bytes) as limit:
        out = Path(name) / "events"
        out.touch()
        started = time.perf_counter()
        done = subprocess.run(
            [*limit.prefix, *command, json.dumps({**spec, "out": str(out)})],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env=environment,
            timeout=_LIMIT_S,
        )
        seconds = time.perf_counter() - started
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-12:])
        return Told(
            events=[json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()],
            error=f"exit status {done.returncode}: {tail}" if done.returncode else None,
            seconds=seconds,
            memory_limit=limit.how,
            limited_peak_bytes=limit.peak_bytes(),
        )


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """What goes before a command to limit its memory."""

    prefix: Sequence[str] = ()
    how: str
    group: Path | None = None
    """The control group, where it is ours."""

    def peak_bytes(self) -> int | None:
        """Return the most bytes that were charged to the group; None where the kernel does not tell."""
        files = [] if self.group is None else [self.group / n for n in ("memory.peak", "memory.max_usage_in_bytes")]
        found = next((path for path in files if path.exists()), None)
        return None if found is None else int(found.read_text())


@contextmanager
def limited_memory(nbytes: int | None) -> Iterator[MemoryLimit]:
    """Give a limit of `nbytes` on all memory of a command, page cache included, by a scope of systemd or a control group
    of our own below the one that we are in; where neither can be had, one that limits nothing and says why."""
    if nbytes is None:
        yield MemoryLimit(how="none asked for")
        return
    scope = ["systemd-run", "--scope", "--quiet", *([] if os.geteuid() == 0 else ["--user"])]
    scope += ["-p", f"MemoryMax={nbytes}", "-p", "MemorySwapMax=0"]
    if shutil.which("systemd-run"):
        tried = subprocess.run([*scope, "true"], capture_output=True, text=True, check=False)
        if tried.returncode == 0:
            yield MemoryLimit(prefix=scope, how="systemd-run --scope")
            return
        why = f"systemd-run: {tried.stderr.strip()}"
    else:
        why = "systemd-run is not installed"
    try:
        group = _make_group(nbytes)
    except OSError as error:
        yield MemoryLimit(how=f"not limited ({why}; control group: {error})")
        return
    try:
        enter = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group)]
        yield MemoryLimit(prefix=enter, how="control group", group=group)
    finally:
        group.rmdir()


def _make_group(nbytes: int) -> Path:
    """Return a new control group with a limit on its memory. Raises OSError where this process may not make one."""
    parent, limits = _controller()
    group = parent / f"zstore-bench-{os.getpid()}"
    group.mkdir()
    try:
        for name, value in limits.items():
            if (group / name).exists():  # of swap only where the kernel counts it
                (group / name).write_text(str(nbytes if value is None else value), encoding="utf-8")
    except OSError:
        group.rmdir()
        raise
    return group


def _controller() -> tuple[Path, dict[str, int | None]]:
    """Return the control group that we are in and which files limit memory, in order; None stands for the limit."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()]
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    own = next((path for _, controllers, path in lines if "memory" in controllers.split(",")), None)
    mount = next((fields[1] for fields in mounts if fields[2] == "cgroup" and "memory" in fields[3].split(",")), None)
    if own is not None and mount is not None:
        return Path(mount) / own.lstrip("/"), {"memory.limit_in_bytes": None, "memory.memsw.limit_in_bytes": None}
    own = next((path for number, _, path in lines if number == "0"), None)
    mount = next((fields[1] for fields in mounts if fields[2] == "cgroup2"), None)
    if own is None or mount is None:
        raise OSError("there are no control groups of memory")
    parent = Path(mount) / own.lstrip("/")
    if "memory" not in (parent / "cgroup.controllers").read_text(encoding="utf-8").split():
        raise OSError(f"{parent} does not control memory")
    if "memory" not in (parent / "cgroup.subtree_control").read_text(encoding="utf-8").split():
        (parent / "cgroup.subtree_control").write_text("+memory", encoding="utf-8")
    return parent, {"memory.max": None, "memory.swap.max": 0}
