"""The journal of a run, as an engine writes it: steps, saves, loads, warnings. See [Note: the journal] in `zstore.journal`.

[Note: the cost of a step's record]
The training thread makes a dict of numbers that it has at hand. Counters of links and memory are sampled every two seconds
at most, and so seldom that it takes a five-thousandth of the time; the longer a run goes on, the more seldom. On CUDA the
loss goes to host memory behind the computation, and the journal's thread waits for it.
"""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zstore.checkpoint import tag_folder
from zstore.io import LinkStatistics, count_memory_kills, is_url
from zstore.journal.reader import journal_of, read_from
from zstore.journal.writer import JournalWriter
from zstore.ranks.world import World

from ...checkpoint.destinations import Destination, destination_of
from ...config.extra import Extra
from ...config.keys import acting
from ...plan.ladder import advice
from ...report.statistics import link_statistics, memory_now
from ...report.utilisation import PhaseTimes
from .beside import JournalFailure, SaveNotes, Warnings, error_text, number_of, uncaught_error
from .file import Namer, RunFile
from .start import plan_record, start_record

if TYPE_CHECKING:
    from ...checkpoint.load import Restore
    from ...optim.state import OptimizerState
    from ...plan.plan import Plan
    from ...report.progress import RunReport
    from ...training.training import Training

_log = logging.getLogger("zstore")

_SAMPLE_S = 2.0
_SHARE = 5000
"""Sampling links and memory takes less than one part in so many of the time."""
_SAMPLES = 2000
"""They are sampled at most so often in the time that has passed: journals of long runs stay quick to read."""
_TAIL_BYTES = 64 * 1024
"""Bytes at the end of a journal that contain its last line."""


class StepJournal(ABC):
    """Writes the journal of a run over `state`, on rank 0: its start, its steps, warnings, and its end. It fails as monitors
    do: the first failure is a warning, and training goes on."""

    def __init__(self, world: World, state: OptimizerState, *, enabled: bool, step: int = 0) -> None:
        self.enabled = enabled and world.rank == 0
        """Whether anything is written: not on other ranks, nor after `close`."""
        self._world = world
        self._state = state
        # Not a method: the writer's thread has it, and must not hold the model.
        self._say_failure = JournalFailure()
        self.writer = JournalWriter(self._say_failure)
        """Writes its lines."""
        self.started_at = time.time()
        self._tokens: int | None = None
        self._total_steps: int | None = None
        self._reason = "done"
        self._error: str | None = None
        self.saves_s: Callable[[], Mapping[str, float]] = dict
        """Returns the seconds for which saves delayed training, by their kind."""
        self._step_ended_s: float | None = None
        self._began_s = time.perf_counter()
        self._links: Mapping[str, LinkStatistics] = {}
        self._sampled_s: float | None = None
        self._sampled_step = step
        self._next_sample_s = 0.0
        """Time of the next sample, by `time.perf_counter`."""
        self._warnings = Warnings(self.writer)
        if self.enabled:
            _log.addFilter(self._warnings)

    @property
    @abstractmethod
    def _step(self) -> int:
        """Number of the last step."""

    def _record(self, kind: str, **values: Any) -> dict[str, Any]:
        return {"kind": kind, "at": time.time(), "step": self._step, **values}

    def _add(self, kind: str, **values: Any) -> None:
        self.writer.append(self._record(kind, **values))

    def _add_step(self, now_s: float, *, first_s: float | None = None, aside_s: float = 0.0, **values: Any) -> None:
        """Record the step that ended at `now_s` of `time.perf_counter`, after `first_s` if none was before it; `aside_s` of its
        seconds went to something else."""
        step_s = first_s if self._step_ended_s is None else now_s - self._step_ended_s - aside_s
        sample = self._sample(now_s) if now_s >= self._next_sample_s else {}
        self._step_ended_s = now_s
        self._add("step", tokens=self._tokens, step_s=step_s, **values, **sample)

    def _sample(self, now_s: float) -> dict[str, Any]:
        """Return the part of a step's record about links, since the last sample, and memory."""
        statistics = self._state.store.statistics()
        links = link_statistics(self._world, self._state.store, statistics, self.saves_s())
        none = LinkStatistics()
        moved = {name: link.since(self._links.get(name, none)) for name, link in links.items()}
        found = {
            "links": {name: found for name, link in moved.items() if (found := _link_record(link)) is not None},
            "links_s": None if self._sampled_s is None else now_s - self._sampled_s,
            "links_steps": max(1, self._step - self._sampled_step),
            "memory": memory_now(statistics, self._world.device),
        }
        took_s = time.perf_counter() - now_s
        self._links, self._sampled_s, self._sampled_step = links, now_s, self._step
        self._next_sample_s = now_s + max(_SAMPLE_S, _SHARE * took_s, (now_s - self._began_s) / _SAMPLES)
        return found

    def _begin_anew(self) -> None:
        """Count links, and the time of a step, from here on."""
        self._step_ended_s = None
        self._sample(time.perf_counter())
        self._sampled_s, self._next_sample_s = None, 0.0

    def _start(self, run: str, *, step: int, loop: str, config: Any, plan: Plan | None = None) -> list[dict[str, Any]]:
        """Return the first records of a file: of this process and of the run."""
        known = {"at": self.started_at, "run": run, "step": step, "total_steps": self._total_steps, "loop": loop}
        start = start_record(self._world, self._state, known, config)
        return [start, plan_record(self._state, plan, self._world.device)]

    def close(self) -> None:
        """Write the end; a second call does nothing."""
        if not self.enabled:
            return
        self.enabled = False
        _log.removeFilter(self._warnings)
        if self.writer.is_open:
            uncaught = uncaught_error() if self._reason == "done" else None
            reason = "failed" if uncaught else self._reason
            self._add("end", reason=reason, problem=error_text(uncaught) or self._error)
        self.writer.close()


def _link_record(link: LinkStatistics) -> dict[str, Any] | None:
    """Return the record of a link; None if it was not used."""
    stall_s = {cause: round(seconds, 6) for cause, seconds in link.stall_s.items() if seconds > 0}
    if not link.operations and not stall_s:
        return None
    return {"bytes": link.bytes, "busy_s": round(link.busy_s, 6), "stall_s": stall_s}


class RunJournal(StepJournal, Extra):
    """Writes an engine's journal, on rank 0; on others, and if the config wants none, every call does nothing."""

    acts_frozen = True  # to say that there is none

    def __init__(self, engine: Any, chosen: Path | Literal["auto", False]) -> None:
        # Not the engine, which ends when nothing else holds it.
        self._training: Training = engine.training_state
        training = self._training
        self._times: PhaseTimes = engine.times
        self._report: RunReport = engine.report
        self._aside_s = self._report.aside_s
        self._said_flops = False
        self._first_step = training.counters.global_steps
        self.acts = not training.config.frozen and chosen is not False
        super().__init__(training.world, training.state, enabled=self.acts, step=self._first_step)
        place, namer = (Destination(chosen), Namer.CONFIG) if isinstance(chosen, Path) else (None, Namer.NOBODY)
        self.file = RunFile(writer=self.writer, failed=self._say_failure, place=place, namer=namer)
        self._last_times = PhaseTimes()
        self._loop = "engine"
        self.saves_s = engine.saves_s
        if self.enabled:
            self._report.want()
            for line in training.config.report():  # they were logged before there was a journal
                self._warnings.note(f"{training.config.source}: {line}", self.started_at)

    @property
    def _step(self) -> int:
        return self._training.counters.global_steps

    # -- from training loops ----------------------------------------------------------------------------------------

    def note(self, *, tokens: int | None = None, total_steps: int | None = None, loop: str | None = None) -> None:
        """Take facts that the engine cannot know: the tokens of a step over all ranks, from the current one until the next
        call; the steps that the run is to have; whose loop it is ("train", "trainer", ...)."""
        self._tokens = self._tokens if tokens is None else tokens
        self._report.utilisation.tokens = self._tokens
        self._total_steps = self._total_steps if total_steps is None else total_steps
        self._loop = loop or self._loop

    # -- from the engine --------------------------------------------------------------------------------------------

    def step_ended(self) -> None:
        if not self.enabled:
            return
        training, report = self._training, self._report
        now_s = time.perf_counter()
        aside_s, self._aside_s = report.aside_s - self._aside_s, report.aside_s
        times = replace(self._times)
        spent, self._last_times = times - self._last_times, times
        self._add_step(
            now_s,
            first_s=spent.forward_s + spent.backward_s + spent.optimizer_s,
            aside_s=aside_s,
            loss=report.loss,
            lr=float(training.optimizer.param_groups[0]["lr"]),
            grad_norm=training.norm,
            samples=training.accumulation.batch.train_batch_size,
            skipped=not training.was_applied,
            forward_s=spent.forward_s,
            backward_s=spent.backward_s,
            optimizer_s=spent.optimizer_s,
            mfu=report.utilisation.last,
            **self._new_flops(),
        )
        self._open()

    def _new_flops(self) -> dict[str, Any]:
        """Return the numbers behind `mfu`, for the first step that knows them."""
        known = None if self._said_flops else self._report.utilisation.now()
        if known is None:
            return {}
        self._said_flops = True
        step_flops = known.step_flops * self._training.world.world_size
        return {"flops": {"step_flops": step_flops, "peak_flops": known.peak_flops}}

    def saves_in(self, folder: str) -> None:
        if self.enabled:
            drives = self._state.store.options.all_paths
            self._name(destination_of(folder, self._training.config, drives), Namer.RUN)

    def save_begins(self, tag: str, destination: Destination) -> SaveNotes | None:
        if not self.enabled:
            return None
        location = destination.location_of(tag_folder(tag))
        base = {"kind": "save", "step": self._step, "tag": tag, "location": location}
        return SaveNotes(self.writer, base, partial(self._save_began, destination), self.file.send)

    def _save_began(self, place: Destination) -> None:
        """Note the place of a save that has begun well: the journal is there from now on at the latest."""
        self._name(place, Namer.RUN)
        self._open()

    def loaded(self, path: str, load: Restore, elapsed_s: float) -> None:
        if not self.enabled or load.report is None:
            return
        if self.file.current is None and self._step_ended_s is None:
            self._first_step = self._step
        self._report.utilisation.begin_anew()
        self._last_times = replace(self._times)
        self._begin_anew()  # the bytes of the load belong to no step
        read_bytes = load.report.read_bytes
        self._add("load", tag=load.tag, location=path, elapsed_s=elapsed_s, read_bytes=read_bytes)
        above = os.path.dirname(path)
        # The checkpoint of another run, from which this one begins, is no place for its journal.
        if load.resumes and not is_url(path) and os.access(above, os.W_OK):
            if self.file.current is None:
                self._tell_of_kill(Path(above))
            self._name(Destination(Path(above)), Namer.GUESS)

    def _tell_of_kill(self, folder: Path) -> None:
        """Report if the process before was killed: its journal in `folder` has no end."""
        try:
            file = journal_of(folder, self._training.run_id)
            records, _ = read_from(folder, file, max(0, (folder / file).stat().st_size - _TAIL_BYTES))
        except OSError:
            return
        if not records or records[-1]["kind"] == "end":
            return
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(records[-1].get("at", 0)))
        kills = count_memory_kills()
        told = ""
        if kills != 0:
            counted = "" if kills is None else f" (the kernel has killed {kills} process(es) of this machine for that)"
            told = f". If memory ran out{counted}, {advice(self._training.config, self._training.world)}"
        _log.warning(
            "the process that trained this run before wrote its last line into the journal at %s, and no end: it was killed, "
            "unless it still runs%s",
            at,
            told,
        )

    def logged(self, values: Mapping[str, Any]) -> None:
        """Record numbers of the loop's own after the last step; see `Engine.log`."""
        found = {name: value for name, given in values.items() if (value := number_of(given)) is not None}
        if self.enabled and found:
            self._add("metrics", values=found)

    def stops(self, error: BaseException) -> None:
        self._reason = "stopped" if isinstance(error, SystemExit | KeyboardInterrupt) else "failed"
        self._error = None if isinstance(error, SystemExit) else error_text(error)

    # -- the file ---------------------------------------------------------------------------------------------------

    def _name(self, place: Destination, namer: Namer) -> None:
        if namer > self.file.namer:
            self.file.name(place, namer, self._record("end", reason="done"))

    def _open(self) -> None:
        """Open the file of the run, if its folder is known by now."""
        file, training = self.file, self._training
        if not self.enabled or (file.current is not None and file.current.run_id == training.run_id):
            return
        if file.current is not None:  # another run's checkpoint was loaded
            self._add("end", reason="stopped")
            file.close()
            self._first_step = self._step

        def first() -> list[dict[str, Any]]:
            config = acting(training.config.settings)
            return self._start(
                training.run_id, step=self._first_step, loop=self._loop, config=config, plan=training.plan
            )

        file.open(training.run_id, first)

    def close(self) -> None:
        if self.enabled:
            super().close()
            self.file.send()
            self.file.close()
