"""Starts one contender in a process of its own, under a memory limit where the system has one."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zstore.tools.train import OFFLOAD_ENVIRONMENT

_ROOT = Path(__file__).resolve().parent.parent
_LIMIT_S = 3 * 3600.0
_LAST_LINES = 12
_GRACE_S = 10.0
"""From being asked to end to being killed."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a process of its own told, event by event, and how it ended."""

    events: list[dict[str, Any]]
    error: str | None
    """The last lines that it wrote, where it failed."""
    seconds: float
    """From its start to its end."""
    memory_limit: str
    """How its memory was limited, or why not."""
    limited_peak_bytes: int | None
    """Most bytes charged to the limit, page cache included, where the kernel tells."""

    def last(self, event: str) -> dict[str, Any] | None:
        """Return the last event of this kind."""
        return next(reversed(self.all(event)), None)

    def all(self, event: str) -> list[dict[str, Any]]:
        """Return the events of this kind, in order."""
        return [each for each in self.events if each["event"] == event]


def run_child(
    module: str, spec: dict[str, Any], *, python: str | None = None, memory_limit_bytes: int | None = None
) -> Told:
    """Run the function `run` of a module in a process of its own; it finds `spec`, with the file `out` for its events, as
    JSON on the command line. It sees a CUDA device where `spec["device"]` is "cuda", and is ended after `spec["limit_s"]`."""
    command = [python or sys.executable, "-c", f"from {module} import run; run()"]
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    # What `zstore train` sets for state on disk, for every contender. DeepSpeed looks for ninja on the path.
    environment = os.environ | {"PYTHONPATH": path} | _environment_of(spec.get("device", "cpu"))
    if python is not None:
        environment["PATH"] = os.pathsep.join([str(Path(python).absolute().parent), environment.get("PATH", "")])
    with tempfile.TemporaryDirectory(prefix="zstore-bench-") as name, limited_memory(memory_limit_bytes) as limit:
        out = Path(name) / "events"
        out.touch()
        started = time.perf_counter()
        arguments = [*limit.prefix, *command, json.dumps({**spec, "out": str(out)})]
        error = run_group(arguments, spec.get("limit_s") or _LIMIT_S, environment)
        return Told(
            # The last line of one that was killed may be cut off.
            events=[json.loads(line) for line in out.read_text(encoding="utf-8").split("\n")[:-1]],
            error=error,
            seconds=time.perf_counter() - started,
            memory_limit=limit.how,
            limited_peak_bytes=limit.peak_bytes(),
        )


def run_group(
    command: Sequence[str], limit_s: float, environment: Mapping[str, str], *, folder: Path | None = None
) -> str | None:
    """Run a command, in `folder`, to its end; return its exit status and last lines where it failed, None where it did not.

    Where it takes longer than `limit_s`, or this process is told to end, it is ended with everything that it started.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, env=environment, cwd=folder, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
            how = f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            end_group(process)
            out, err = process.communicate()
            how = f"not done within {limit_s:g} s"
        except BaseException:
            end_group(process, grace_s=0)
            raise
    lines = (err or out).decode(errors="replace").strip().splitlines()
    return None if how == "exit status 0" else f"{how}: " + "\n".join(lines[-_LAST_LINES:])


def end_group(process: subprocess.Popen[bytes], grace_s: float = _GRACE_S) -> None:
    """End a process that leads a group, and the rest of the group: asked first, so that it removes its files."""
    with contextlib.suppress(ProcessLookupError):
        if grace_s:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        os.killpg(process.pid, signal.SIGKILL)


def _environment_of(device: str) -> dict[str, str]:
    """Return what a child's environment has besides, so that it computes on `device`."""
    if device == "cuda":
        return {"DS_ACCELERATOR": "cuda", **OFFLOAD_ENVIRONMENT}
    return {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", **OFFLOAD_ENVIRONMENT}


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
