"""The search of `zstore tune`: what fits by the plan is run for some steps, in the order of the plan's estimates.

[Note: the search]
First the config as it is; then stages, offload and micro-batches, until there are `tuner_num_trials` or
`tuner_early_stopping` in a row are no better than the best. After a trial without enough memory larger micro-batches of the
same stage and offload are left out. A trial's figure is the median of its timed steps; what is not 2 % better than the
config as it is does not replace it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zstore.engine.config.autotuning import ModelInfoSection
from zstore.engine.config.config import load_config, read_config
from zstore.errors import ConfigError

from ..plan.choices import Outcome, all_choices, weigh, weigh_given
from ..plan.job import Choice, Job, make_job
from ..plan.machine import own_gpus
from ..plan.options import PlanOptions
from .options import TuneOptions
from .trial import Measured, job_of, run_trial, trial_config

COLUMNS = ("trial", "result", "beside the start")
_CLEARLY = 1.02


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A config that was run."""

    name: str
    choice: Choice
    config: Mapping[str, Any]
    found: Measured


class Search:
    """The trials of one command. See [Note: the search]. `run_one` runs a trial."""

    def __init__(
        self, options: TuneOptions, say: Callable[[str], None], run_one: Callable[..., Measured] = run_trial
    ) -> None:
        self._options, self._say, self._run_one = options, say, run_one
        self._base = read_config(options.config)
        settings = load_config(self._base, name=str(options.config)).settings
        self.section = section = settings.autotuning
        if section.end_profile_step < section.start_profile_step:
            raise ConfigError(
                f"{options.config}: autotuning.end_profile_step: expected at least start_profile_step "
                f"{section.start_profile_step}, got {section.end_profile_step}"
            )
        if settings.elasticity.enabled:
            raise ConfigError(f"{options.config}: elasticity gives the batch sizes, which are searched for: disable it")
        self._num_ranks = options.nproc or max(1, own_gpus()[0])
        self._job = _plan_job(options, section.model_info, self._num_ranks)
        self._is_open = "train_micro_batch_size_per_gpu" in self._job.answers
        """Whether the config leaves the batch size open."""
        self.folder = Path(section.results_dir)
        self.trials: list[Trial] = []
        self.left_out: list[Outcome] = []
        """What does not fit by the plan."""

    def run(self) -> Trial | None:
        """Run the trials; return the best, None if none is ok."""
        section, since_better, start = self.section, 0, weigh_given(self._job).choice
        best = first = self._try("start", start, self._base)
        for outcome in self._candidates(start):
            if len(self.trials) >= section.tuner_num_trials or since_better >= section.tuner_early_stopping:
                break
            if not any(_is_larger(outcome.choice, one) for one in self.trials):
                trial = self._try(_name(outcome.choice), outcome.choice, outcome.config)
                since_better = 0 if self._score(trial) > self._score(best) else since_better + 1
                best = max(best, trial, key=self._score)
        if not self._score(best):
            return None
        return best if self._score(best) > _CLEARLY * self._score(first) else first

    def _score(self, one: Trial) -> float:
        """Return a figure by the section's metric, the larger the better; 0: the trial is not ok."""
        if not one.found.step_s:
            return 0.0
        return (1 if self.section.metric == "latency" else one.found.samples) / one.found.median_s

    def _candidates(self, start: Choice) -> list[Outcome]:
        """Return what fits, the best by the plan first; what does not is left out."""
        tiers = {"none", *(["cpu"] if self._job.machine.gpus else []), start.optimizer, start.parameters}
        found: list[Outcome] = []
        for space in (one.choice for one in all_choices(self._job)):
            is_usual = space.groups is None and (self._num_ranks > 1 or space.stage in (0, 3))
            if is_usual and {space.optimizer, space.parameters} <= tiers:
                here = [
                    weigh(replace(self._job, micro_batch=self._samples(size)), replace(space, micro_batch=size))
                    for size in self._micro_batches()
                ]
                found += [one for one in here if one.fits][-self.section.num_tuning_micro_batch_sizes :]
                self.left_out += [one for one in here if not one.fits][:1]
        return sorted((one for one in found if one.choice != start), key=self._estimate)

    def _samples(self, micro_batch: int) -> int:
        """Return the samples of a step on one rank: those of the config, or if that leaves them open, as many micro-batches."""
        samples, own = self._job.micro_batch, self._job.base_micro_batch or 1
        return micro_batch * (samples // own) if self._is_open else samples

    def _micro_batches(self) -> list[int]:
        """Return the micro-batches to try, ascending: doublings that the section allows, and the config's own."""
        section, size = self.section, self.section.min_train_micro_batch_size_per_gpu
        found, most = {self._job.base_micro_batch or 1}, section.max_train_batch_size
        while size <= min(section.max_train_micro_batch_size_per_gpu, samples := self._samples(size)):
            if samples % size == 0 and not (self._is_open and most and samples * self._num_ranks > most):
                found.add(size)
            size *= 2
        return sorted(found)

    def _estimate(self, one: Outcome) -> tuple[float, ...]:
        """Return the plan's seconds and bytes to and from the drive for a sample, and what else makes one slower."""
        choice, samples = one.choice, self._samples(one.choice.micro_batch)
        seconds, moved = (one.seconds.in_turn or 0.0) / samples, one.plan.traffic_total.total / samples
        offloads = (choice.optimizer != "none") + (choice.parameters != "none")
        return (round(seconds, 9), moved, offloads, choice.stage, -choice.micro_batch)

    def _try(self, name: str, choice: Choice, config: Mapping[str, Any]) -> Trial:
        section, options = self.section, self._options
        config = {key: value for key, value in config.items() if key != "autotuning"}
        folder = Path(section.exps_dir).absolute() / name
        shutil.rmtree(folder, ignore_errors=True)
        path = folder / "ds_config.json"
        _write(path, trial_config(config, folder))
        job = job_of(options, section, self._num_ranks, path, config)
        steps = range(section.start_profile_step, section.end_profile_step + 1)
        found = self._run_one(job, folder, steps, options.trial_timeout)
        self.trials.append(Trial(name=name, choice=choice, config=config, found=found))
        self._say(f"{name}: {found}")
        return self.trials[-1]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table of trials, the best first, by `COLUMNS`."""
        found: list[tuple[str, ...]] = []
        for one in sorted(self.trials, key=self._score, reverse=True):
            first, score = self._score(self.trials[0]), self._score(one)
            found.append((one.name, str(one.found), f"{score / first:.2f}" if first and score else ""))
        return found + [(_name(one.choice), f"does not fit: {'; '.join(one.lacking)}", "") for one in self.left_out]

    def write(self, best: Trial | None) -> None:
        """Write the table of trials, and if a trial was ok the best config."""
        rows = [COLUMNS, ("---",) * len(COLUMNS), *self.rows()]
        lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in rows]
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "trials.md").write_text("".join(lines), encoding="utf-8")
        if best is not None:
            _write(self.folder / "ds_config_optimal.json", best.config)


def _plan_job(options: TuneOptions, info: ModelInfoSection, num_ranks: int) -> Job:
    """Return what the plan is made for. Raises UsageError if the shape of the model is not known."""
    gpus = own_gpus()[0]
    asked = PlanOptions(
        config=options.config,
        model=options.model,
        params=None if options.model else info.num_params,
        hidden=None if options.model else info.hidden_size,
        layers=None if options.model else info.num_layers,
        gpus=min(gpus, num_ranks),
        memory=options.memory,
        seq_length=options.seq_len,
    )
    job = make_job(asked)
    return job if gpus else replace(job, machine=replace(job.machine, cpu_ranks=num_ranks))


def _write(path: Path, config: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _is_larger(choice: Choice, other: Trial) -> bool:
    """Return whether another trial had not even the memory for a smaller micro-batch."""
    same = replace(choice, micro_batch=other.choice.micro_batch) == other.choice
    return same and other.found.status == "out of memory" and choice.micro_batch > other.choice.micro_batch


def _name(choice: Choice) -> str:
    """Return a short name of a choice, as `z3-cpu-none-mbs4`."""
    tiers = "" if choice.optimizer == choice.parameters == "none" else f"-{choice.optimizer}-{choice.parameters}"
    return f"z{choice.stage}{tiers}-mbs{choice.micro_batch}"
