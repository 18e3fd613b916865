"""`zstore tune`: runs each choice that fits by the plan for some steps, in the order of the plan's estimates.

[Note: the search]
First the config as it is; then stages, offload and micro-batches, until there are `tuner_num_trials`, or
`tuner_early_stopping` in a row are no better than the best. A trial's figure is the median of its timed steps; a trial
must be 2 % better than the config as it is to replace it.

[Note: how a trial ends]
Once its journal has the last step to be timed, or the time is over, its ranks are killed: a script is not asked to end, for
then it might save a checkpoint over the user's own. A trial that fails is a result like any other.
"""

from __future__ import annotations

import json as json_module
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Annotated, Any

import typer

from zstore.engine.config.config import load_config, read_config
from zstore.engine.config.sections import AutotuningSection, ModelInfoSection
from zstore.errors import ConfigError, UsageError
from zstore.journal.reader import read

from .options import Json, size_option
from .plan.choices import Costs, all_choices, weigh, weigh_given
from .plan.job import Choice, PlannedJob, make_job
from .plan.machine import own_gpus
from .plan.options import PlanOptions
from .printing import cell, make_console, make_table, print_json
from .run.job import RunJob
from .run.options import RunOptions
from .run.plan import make_plan

CONTEXT_SETTINGS = {"token_normalize_func": lambda name: name.replace("_", "-")}

EPILOG = """
\b
Examples:
  zstore tune --config ds.json --model gpt-small               # for zstore train
  zstore tune --config ds.json --as-deepspeed --model ./Llama-3.2-1B -- train.py --deepspeed ds.json
"""

COLUMNS = ("trial", "result", "beside the start")
_CLEARLY = 1.02
_OUT_OF_MEMORY = re.compile(rb"OutOfMemoryError|MemoryError|BudgetError|out of memory|Cannot allocate memory")


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options on the command line. None: not given."""

    config: Annotated[
        Path,
        typer.Option(help="Configuration to start from; its section autotuning says how.", exists=True, dir_okay=False),
    ]
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- SCRIPT ARGS...]",
            help="Script to tune for, started as by `zstore run`; its arguments name the configuration.",
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="gpt-tiny, gpt-small or gpt-base; or a transformers config.json or model folder (extra hf). Trained by "
            "`zstore train`; with a script, for the plan alone (or give the section's model_info)."
        ),
    ] = None
    seq_len: Annotated[int, typer.Option(help="Tokens in a sample.", min=2, metavar="N")] = 128
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", "--nproc-per-node", help="Ranks of each trial (default: GPUs, or 1).", min=1),
    ] = None
    memory: Annotated[int | None, size_option("Host memory (default: this machine's).")] = None
    as_deepspeed: Annotated[
        bool, typer.Option("--as-deepspeed", help="Answer `import deepspeed` in the script with zstore.")
    ] = False
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as for `python -m`.")] = False
    trial_timeout: Annotated[float, typer.Option(help="Seconds that one trial may take.", min=1, metavar="S")] = 600.0

    def __post_init__(self) -> None:
        """Refuse options that name nothing to run."""
        if not self.script and self.model is None:
            raise UsageError("say what to tune for: --model M, or a script after --")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The result of a trial."""

    status: str = "ok"
    step_s: tuple[float, ...] = ()
    """Seconds of each timed step; none of a trial that is not ok."""
    samples: int = 0
    """Of a step, over all ranks."""
    problem: str = ""
    """The end of the output, of a trial that is not ok."""

    def __str__(self) -> str:
        if not self.step_s:
            return ": ".join([self.status, *self.problem.splitlines()[-1:]])
        seconds = statistics.median(self.step_s)
        return f"{self.samples / seconds:,.2f} samples/s, {seconds:.4g} s a step of {self.samples} samples"


def trial_config(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the config of a trial: its journal is in `folder`, snapshots of steps too, and nothing goes to monitors."""
    found = {key: value for key, value in config.items() if key not in ("tensorboard", "csv_monitor", "wandb")}
    own = found["zstore"] = {**(found.get("zstore") or {}), "journal": str(folder / "journal")}
    if own.get("durability_path") is not None:
        own["durability_path"] = str(folder / "steps")
    return found


def run_trial(job: RunJob, folder: Path, steps: range, timeout_s: float) -> Measured:
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
                    process.wait(0.1)
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
    status = "out of memory" if _OUT_OF_MEMORY.search(output) or code == 128 + 9 else "failed"
    lines = [line for line in output.decode(errors="replace").splitlines() if "see its output above" not in line]
    return Measured(status=status, problem="\n".join(lines[-8:]) or f"it ended with exit code {code}")


def job_of(
    options: TuneOptions, section: AutotuningSection, num_ranks: int, path: Path, config: Mapping[str, Any]
) -> RunJob:
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
    command = (sys.executable, "-u", "-m", "zstore", "train", *words)
    return RunJob(command=command, num_ranks=num_ranks, shutdown_timeout_s=0)


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
            found += [option, value if isinstance(value, str) else json_module.dumps(value)]
    return found


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
        if (giver := settings.batch_section) is not None:
            raise ConfigError(f"{options.config}: {giver} gives the batch sizes, which tune searches: disable it")
        self._num_ranks = options.nproc or max(1, own_gpus()[0])
        self._job = _plan_job(options, section.model_info, self._num_ranks)
        self._is_open = "train_micro_batch_size_per_gpu" in self._job.answers
        """Whether the config leaves the batch size open."""
        self.folder = Path(section.results_dir)
        self.trials: list[Trial] = []
        self.left_out: list[Costs] = []
        """Choices that do not fit by the plan."""

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
        return (1 if self.section.metric == "latency" else one.found.samples) / statistics.median(one.found.step_s)

    def _candidates(self, start: Choice) -> list[Costs]:
        """Return the choices that fit, the best by the plan first; the others go to `left_out`."""
        tiers = {"none", *(["cpu"] if self._job.machine.gpus else []), start.optimizer, start.parameters}
        found: list[Costs] = []
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

    def _estimate(self, one: Costs) -> tuple[float, ...]:
        """Return the plan's seconds and bytes to and from the drive for a sample, and whatever else makes one slower."""
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


def _plan_job(options: TuneOptions, info: ModelInfoSection, num_ranks: int) -> PlannedJob:
    """Return the job to plan for. Raises UsageError if the shape of the model is not known."""
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
    path.write_text(json_module.dumps(config, indent=2) + "\n", encoding="utf-8")


def _is_larger(choice: Choice, other: Trial) -> bool:
    """Return whether another trial ran out of memory with an even smaller micro-batch."""
    same = replace(choice, micro_batch=other.choice.micro_batch) == other.choice
    return same and other.found.status == "out of memory" and choice.micro_batch > other.choice.micro_batch


def _name(choice: Choice) -> str:
    """Return a short name of a choice, as `z3-cpu-none-mbs4`."""
    tiers = "" if choice.optimizer == choice.parameters == "none" else f"-{choice.optimizer}-{choice.parameters}"
    return f"z{choice.stage}{tiers}-mbs{choice.micro_batch}"


def tune_command(options: TuneOptions, json: Json = False) -> int:
    """Run the trials and write the best config with the table of trials; 0, or 1 if no trial was ok."""
    search = Search(options, lambda line: print(line, file=sys.stderr, flush=True))
    best = search.run()
    search.write(best)
    if json:
        trials = [dict(zip(COLUMNS, row, strict=True)) for row in search.rows()]
        print_json({"best": None if best is None else best.name, "trials": trials})
    else:
        table = make_table(COLUMNS, (), f"trials by {search.section.metric}, the best first")
        for row in search.rows():
            table.add_row(*map(cell, row))
        make_console().print(table)
    if best is None:
        print(f"zstore: no trial went well; the last one:\n{search.trials[-1].found.problem}", file=sys.stderr)
        return 1
    if not json:
        make_console().print(f"the best is {best.name}\n{search.folder / 'ds_config_optimal.json'}", soft_wrap=True)
    return 0
