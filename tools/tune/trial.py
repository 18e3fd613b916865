"""One trial: a run of some steps in processes of its own, timed by the journal that it writes.

[Note: how a trial ends]
`zstore.tools.run.remote` starts the ranks of a trial and takes words on stdin. Once the journal has the last step to be timed,
or the time is over, it is told to kill them: a script is not asked to end, for then it might save a checkpoint over the
user's own. A trial that fails, runs out of memory or takes too long is a result like any other.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zstore.journal.reader import read

from ..run.job import Job

_LOOK_S = 0.1
_LAUNCHERS = re.compile(r"zstore: rank \d+ on .*; see its output above$")
_OUT_OF_MEMORY = re.compile(rb"OutOfMemoryError|MemoryError|BudgetError|out of memory|Cannot allocate memory")
_KILLED = 128 + 9
_LAST_LINES = 8
"""Of a failed trial's output that are kept with its result."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The result of a trial."""

    status: str
    """"ok", "failed", "out of memory" or "timed out"."""
    step_s: tuple[float, ...] = ()
    """Seconds of each timed step."""
    samples: int = 0
    """Of a step, over all ranks."""
    tokens: int | None = None
    parameters: int = 0
    problem: str = ""
    """The end of the output, of a trial that is not ok."""

    @property
    def median_s(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.step_s)

    def metric(self, name: str) -> float:
        """Return samples a second, operations a second, or the negative of seconds a step: the larger the better."""
        if name == "latency":
            return -self.median_s
        units = self.samples if name == "throughput" else 6 * self.parameters * (self.tokens or self.samples)
        return units / self.median_s

    def to_json(self) -> dict[str, Any]:
        """Return this as JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measured:
        """Return what `to_json` gave."""
        return cls(**{**data, "step_s": tuple(data["step_s"])})


def trial_config(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the config of a trial: its journal is in `folder`, state on a drive in a folder of its own there, snapshots of
    steps too, and nothing goes to monitors."""
    found = copy.deepcopy(dict(config))
    own = found["zstore"] = {**(found.get("zstore") or {}), "journal": str(folder / "journal")}
    if own.get("durability_path") is not None:
        own["durability_path"] = str(folder / "steps")
    for name in ("tensorboard", "csv_monitor", "wandb"):
        found.pop(name, None)
    for section in _offloads(found):
        paths = section["nvme_path"]
        section["nvme_path"] = (
            [_inner(path, folder) for path in paths] if isinstance(paths, list) else _inner(paths, folder)
        )
    return found


def _offloads(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    zero = config.get("zero_optimization")
    for key in ("offload_optimizer", "offload_param"):
        section = zero.get(key) if isinstance(zero, dict) else None
        if isinstance(section, dict) and section.get("nvme_path"):
            yield section


def _inner(path: str, folder: Path) -> str:
    return str(Path(path) / f"zstore-tune-{folder.name}")


@contextmanager
def _folders(config: Mapping[str, Any]) -> Iterator[None]:
    """Have the trial's folders on drives within the block."""
    sections = list(_offloads(config))
    every = [
        path
        for one in sections
        for path in ([one["nvme_path"]] if isinstance(one["nvme_path"], str) else one["nvme_path"])
    ]
    try:
        for path in every:
            Path(path).mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in every:
            shutil.rmtree(path, ignore_errors=True)


def run_trial(job: Job, config: Mapping[str, Any], folder: Path, steps: range, timeout_s: float) -> Measured:
    """Run `job`, whose config stands in `folder`, and return the times of `steps`."""
    with _folders(config), open(folder / "output.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "zstore.tools.run.remote"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is this process's
        )
        try:
            _tell(process, job.to_json())
            return _followed(process, folder, steps, timeout_s)
        finally:
            _tell(process, "kill")
            with suppress(OSError):
                process.communicate()


def _followed(process: subprocess.Popen[bytes], folder: Path, steps: range, timeout_s: float) -> Measured:
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_S)
        found = measured(folder / "journal", steps)
        if found is not None:
            return found
        if process.returncode is not None:
            return _failed(folder, process.returncode)
        if time.monotonic() > deadline:
            return Measured(status="timed out", problem=f"{timeout_s:g} s were over before step {steps.stop - 1}")


def measured(journal: Path, steps: range) -> Measured | None:
    """Return the times of `steps` in a journal; None where they are not all there."""
    try:
        records = read(journal)
    except FileNotFoundError:
        return None
    start: dict[str, Any] = next((one for one in records if one["kind"] == "start"), {})
    rows = {one["step"]: one for one in records if one["kind"] == "step"}
    first = min(rows, default=1)  # a script may resume a checkpoint
    wanted = [rows.get(first + step - 1) for step in steps]
    if None in wanted or not wanted:
        return None
    timed = [row for row in wanted if row is not None]
    return Measured(
        status="ok",
        step_s=tuple(row["step_s"] for row in timed),
        samples=timed[-1]["samples"],
        tokens=timed[-1].get("tokens"),
        parameters=int(start.get("parameters") or 0),
    )


def _failed(folder: Path, code: int) -> Measured:
    output = (folder / "output.log").read_bytes()
    lines = output.decode(errors="replace").strip().splitlines()
    if len(lines) > 1 and _LAUNCHERS.match(lines[-1]):
        del lines[-1]  # what the rank said tells more
    lines = lines[-_LAST_LINES:]
    is_memory = _OUT_OF_MEMORY.search(output) is not None or code == _KILLED
    if not code:
        lines.append("the run ended before the last step to be timed")
    return Measured(status="out of memory" if is_memory else "failed", problem="\n".join(lines))


def _tell(process: subprocess.Popen[bytes], line: str) -> None:
    if process.stdin is not None and process.poll() is None:
        with suppress(OSError):  # it has just ended
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()


def write_json(path: Path, data: Any) -> None:
    """Write `data` so that the file is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)
