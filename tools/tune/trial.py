"""One trial: a run of some steps in processes of its own, timed by the journal that it writes.

[Note: how a trial ends]
`zstore.tools.run.remote` starts the ranks of a trial and takes words on stdin. Once the journal has the last step to be timed,
or the time is over, it is told to kill them: a script is not asked to end, for then it might save a checkpoint over the
user's own. A trial that fails, runs out of memory or takes too long is a result like any other.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

from zstore.engine.config.autotuning import AutotuningSection
from zstore.errors import UsageError
from zstore.journal.reader import read

from ..run.job import Job
from ..run.options import RunOptions
from ..run.plan import make_plan
from .options import TuneOptions

_LOOK_S = 0.1
_OUT_OF_MEMORY = re.compile(rb"OutOfMemoryError|MemoryError|BudgetError|out of memory|Cannot allocate memory")
_KILLED = 128 + 9
_LAST_LINES = 8


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The result of a trial."""

    status: str = "ok"
    """"ok", "failed", "out of memory" or "timed out"."""
    step_s: tuple[float, ...] = ()
    """Seconds of each timed step; none of a trial that is not ok."""
    samples: int = 0
    """Of a step, over all ranks."""
    problem: str = ""
    """The end of the output, of a trial that is not ok."""

    @property
    def median_s(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.step_s)

    def __str__(self) -> str:
        if not self.step_s:
            return ": ".join([self.status, *self.problem.splitlines()[-1:]])
        return f"{self.samples / self.median_s:,.2f} samples/s, {self.median_s:.4g} s a step of {self.samples} samples"


def trial_config(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the config of a trial: its journal is in `folder`, snapshots of steps too, and nothing goes to monitors."""
    found = {key: value for key, value in config.items() if key not in ("tensorboard", "csv_monitor", "wandb")}
    own = found["zstore"] = {**(found.get("zstore") or {}), "journal": str(folder / "journal")}
    if own.get("durability_path") is not None:
        own["durability_path"] = str(folder / "steps")
    return found


def run_trial(job: Job, folder: Path, steps: range, timeout_s: float) -> Measured:
    """Run `job`, whose config is in `folder`, and return the times of `steps`."""
    command = [sys.executable, "-u", "-m", "zstore.tools.run.remote"]
    deadline_s = time.monotonic() + timeout_s
    with open(folder / "output.log", "wb") as log:
        # In a session of its own: a Ctrl-C is this process's.
        process = subprocess.Popen(command, stdin=PIPE, stdout=log, stderr=STDOUT, text=True, start_new_session=True)
        try:
            print(job.to_json(), file=process.stdin, flush=True)
            while (found := measured(folder / "journal", steps)) is None and process.returncode is None:
                if time.monotonic() > deadline_s:
                    return Measured(status="timed out", problem=f"{timeout_s:g} s were over")
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
            return found or failed((folder / "output.log").read_bytes(), process.returncode)
        finally:
            process.communicate("kill\n")  # without effect once it has ended


def measured(journal: Path, steps: range) -> Measured | None:
    """Return the times of `steps` in a journal; None if they are not all there."""
    try:
        rows = {one["step"]: one for one in read(journal) if one["kind"] == "step"}
    except FileNotFoundError:
        return None
    first = min(rows, default=1)  # a script may resume a checkpoint
    timed = [rows[first + step - 1] for step in steps if first + step - 1 in rows]
    if len(timed) < len(steps):
        return None
    return Measured(step_s=tuple(row["step_s"] for row in timed), samples=timed[-1]["samples"])


def failed(output: bytes, code: int) -> Measured:
    """Return the result of a trial that printed `output` and ended before it was timed."""
    status = "out of memory" if _OUT_OF_MEMORY.search(output) or code == _KILLED else "failed"
    lines = [line for line in output.decode(errors="replace").splitlines() if "; see its output above" not in line]
    return Measured(status=status, problem="\n".join(lines[-_LAST_LINES:]) or f"it ended with exit code {code}")


def job_of(
    options: TuneOptions, section: AutotuningSection, num_ranks: int, path: Path, config: Mapping[str, Any]
) -> Job:
    """Return the ranks of a trial with `config`, which is in `path`."""
    if options.script:
        script, *words = options.script
        asked = RunOptions(
            script=script,
            args=mapped(replaced_config(words, options.config, path), config, section.arg_mappings or {}),
            nproc=num_ranks,
            as_deepspeed=options.as_deepspeed,
            module=options.module,
            standalone=True,
            shutdown_timeout=0,
        )
        return make_plan(asked, os.environ, lambda: 0).job
    words = ["--config", str(path), "--model", str(options.model), "--seq-len", str(options.seq_len)]
    words += ["--steps", str(section.end_profile_step)]
    words += [] if options.data is None else ["--data", str(options.data)]
    command = (sys.executable, "-u", "-m", "zstore", "train", *words)
    return Job(command=command, num_ranks=num_ranks, shutdown_timeout_s=0)


def replaced_config(words: Sequence[str], config: Path, by: Path) -> list[str]:
    """Return a script's arguments with the path `config` replaced. Raises UsageError if none of them is that path."""
    found = []
    for word in words:
        option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        is_config = bool(value) and Path(value).absolute() == config.absolute()
        found.append(f"{option}{equals}{by}" if is_config else word)
    if found == list(words) and by != config:
        raise UsageError(
            f"the script's arguments do not name {config}: each trial replaces it there, so write for instance "
            f"`-- train.py --deepspeed_config {config}`"
        )
    return found


def mapped(words: Sequence[str], config: Mapping[str, Any], mappings: Mapping[str, str]) -> list[str]:
    """Return a script's arguments, and after them each option of `mappings` with the value of its key in `config`, if it has
    one: the last of an option's values counts."""
    found = list(words)
    for key, option in mappings.items():
        value: Any = config
        for name in key.strip().split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None and not isinstance(value, Mapping):
            found += [option, value if isinstance(value, str) else json.dumps(value)]
    return found
