"""The search: trials in order, those that were run before taken from their records, and the best few repeated.

[Note: the search]
First the config as it is, then the candidates of stages, offload and micro-batches, until there are `tuner_num_trials` or
`tuner_early_stopping` in a row are no better than the best; unless it is to be fast, then the variants of the best. After a
trial without enough memory larger micro-batches of the same stage and offload are left out. A run's figure is the median of
its timed steps. What else goes on at a machine makes a run slower and never faster, so the best three and the config as it is
are run again, in turn, and of each the fastest run counts. Where that is not 2 % better than the config as it is, this one is
the best.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..run.job import Job
from .space import Candidate, first_candidates, refinements, spaces
from .task import Task
from .trial import Measured, run_trial, trial_config, write_json

START = "start"
"""Name of the trial of the config as it is."""
_FINALISTS = 3
_CLEARLY = 1.02

Say = Callable[[str], None]
RunTrial = Callable[[Job, Mapping[str, Any], Path, range, float], Measured]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A candidate and the results of its runs."""

    candidate: Candidate
    runs: tuple[Measured, ...]
    """The first, and those that repeat it."""
    by: str
    """The metric."""

    @property
    def status(self) -> str:
        """That of the first run."""
        return self.runs[0].status

    @property
    def metric(self) -> float | None:
        """Of the fastest run, the larger the better; None: the first run is not ok."""
        return None if self.status != "ok" else max(one.metric(self.by) for one in self.runs if one.status == "ok")

    @property
    def is_ok(self) -> bool:
        """Whether it was timed."""
        return self.status == "ok"

    @property
    def fastest(self) -> Measured:
        """The fastest run of one that is ok."""
        return min((one for one in self.runs if one.status == "ok"), key=lambda one: one.median_s)


@dataclass
class Search:
    """The trials of one task, in `folder`."""

    task: Task
    folder: Path
    say: Say
    trials: list[Trial] = field(default_factory=list)
    left_out: list[Candidate] = field(default_factory=list)
    """What does not fit by the plan."""
    num_run: int = 0
    """Trials that were run, and not taken from a record."""
    run_one: RunTrial = run_trial
    """Runs a trial; a seam for tests."""

    def run(self) -> Trial | None:
        """Run the trials; return the best, None where none is ok. Raises KeyboardInterrupt with the records kept."""
        task = self.task
        if task.section.overwrite and self.folder.is_dir():
            for old in self.folder.iterdir():
                if (old / "ds_config.json").is_file():
                    shutil.rmtree(old)
        start = start_candidate(task)
        self._try(start)
        found = first_candidates(
            task.base,
            task.batch,
            task.section,
            spaces(task.num_ranks, on_gpu=task.on_gpu, has_drive=task.nvme_path is not None),
            num_ranks=task.num_ranks,
            job=task.plan_job,
            nvme_path=task.nvme_path or "",
        )
        self.left_out = [one for one in found if one.lacking]
        self._try_all(one for one in found if not one.lacking and not _same(one, start))
        best = self.best()
        if best is not None and not task.section.fast:
            self._try_all(refinements(best.candidate, task.context))
        self._repeat()
        return self.best()

    def best(self) -> Trial | None:
        """Return the best trial so far; the config as it is, where none is clearly better."""
        found = max((one for one in self.trials if one.is_ok), key=_metric, default=None)
        start = next((one for one in self.trials if one.is_ok and one.candidate.name == START), None)
        if found is None or start is None:
            return found
        better = _metric(found) / _metric(start)
        # Latency is a negative number of seconds.
        return found if (1 / better if self.task.section.metric == "latency" else better) > _CLEARLY else start

    def _try_all(self, candidates: Iterable[Candidate]) -> None:
        section, since_better = self.task.section, 0
        for candidate in candidates:
            if len(self.trials) >= section.tuner_num_trials or since_better >= section.tuner_early_stopping:
                return
            if self._is_too_large(candidate):
                continue
            before = max((_metric(one) for one in self.trials if one.is_ok), default=None)
            trial = self._try(candidate)
            better = trial.is_ok and (before is None or _metric(trial) > before)
            since_better = 0 if better else since_better + 1

    def _is_too_large(self, candidate: Candidate) -> bool:
        return any(
            one.status == "out of memory"
            and one.candidate.space == candidate.space
            and one.candidate.micro_batch < candidate.micro_batch
            for one in self.trials
        )

    def _try(self, candidate: Candidate) -> Trial:
        trial = Trial(candidate=candidate, runs=(self._measured(candidate, 0),), by=self.task.section.metric)
        self.trials.append(trial)
        return trial

    def _repeat(self) -> None:
        """Run the best few again, in turn."""
        order = sorted(
            (at for at, one in enumerate(self.trials) if one.is_ok), key=lambda at: -_metric(self.trials[at])
        )
        chosen = order[:_FINALISTS] + [at for at in order[_FINALISTS:] if self.trials[at].candidate.name == START]
        for number in range(1, 1 + (self.task.options.repeats if chosen[1:] else 0)):
            for at in chosen:
                trial = self.trials[at]
                again = self._measured(trial.candidate, number)
                self.trials[at] = replace(trial, runs=(*trial.runs, again))

    def _measured(self, candidate: Candidate, number: int) -> Measured:
        """Return what the record of this trial says, or run it."""
        task, section = self.task, self.task.section
        digest = task.digest(candidate.config)
        folder = self.folder.absolute() / f"{candidate.name}-{digest}{f'-{number}' if number else ''}"
        record = folder / "result.json"
        if record.is_file():
            found = Measured.from_json(json.loads(record.read_text(encoding="utf-8")))
            self.say(f"{folder.name}: {told(found)} (recorded)")
            return found
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        config: dict[str, Any] = trial_config(candidate.config, folder)
        path = folder / "ds_config.json"
        write_json(path, config)
        steps = range(section.start_profile_step, section.end_profile_step + 1)
        found = self.run_one(task.job(path, config), config, folder, steps, task.options.trial_timeout)
        write_json(record, found.to_json())
        self.num_run += 1
        self.say(f"{folder.name}: {told(found)}")
        return found


def _metric(trial: Trial) -> float:
    return trial.metric or 0.0


def start_candidate(task: Task) -> Candidate:
    """Return the config as it is."""
    return Candidate(
        name=START,
        config={key: value for key, value in task.base.items() if key != "autotuning"},
        space=task.space,
        micro_batch=task.batch.micro_batch,
    )


def _same(candidate: Candidate, start: Candidate) -> bool:
    return candidate.space == start.space and candidate.micro_batch == start.micro_batch


def told(found: Measured) -> str:
    """Return in words what a trial came to."""
    if found.status != "ok":
        last = found.problem.splitlines()[-1:]
        return f"{found.status}{f': {last[0]}' if last else ''}"
    return f"{found.samples / found.median_s:,.2f} samples/s, {found.median_s:.4g} s a step of {found.samples} samples"
