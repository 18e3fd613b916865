"""The journal of a run, as an engine writes it: steps, saves, loads, warnings. See [Note: the journal] in `zstore.journal`.

[Note: where the journal goes]
It is beside the checkpoints, in the folder that a loop names at its start (`place`), else in that of the first save. A load
that resumes a run names a folder for the time being, if it is writable, and so do snapshots of steps: the first save to
another one takes this process's records along. The file is opened at the first step or save, so that a process that only
loads leaves none. Until then records wait (see `zstore.journal.writer`). Of a run that saves to a URL the journal is in the
local folder that its saves go through, and is sent along with each of them, and at the end; to a service of zstore its
lines are sent about once a second.

[Note: the cost of a step's record]
The training thread makes a dict of numbers that it has at hand. Counters of links and memory are sampled every two seconds
at most, and so seldom that it takes a five-thousandth of the time; the longer a run goes on, the more seldom. On CUDA the
loss goes to host memory behind the computation, and the journal's thread waits for it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zstore.io import count_memory_kills
from zstore.journal.names import CHECKPOINT_FOLDER, journal_file
from zstore.journal.reader import journal_of, read_from
from zstore.journal.requests import request
from zstore.journal.writer import FileSink
from zstore.remote.journal_tail import JournalTail
from zstore.remote.service_upload import ServicePlace

from ..config.keys import acting
from ..plan.rungs import advice
from .placement import plan_record
from .records import Loss, SaveNotes, StepJournal, error_text, number_of
from .utilisation import PhaseTimes

if TYPE_CHECKING:
    from zstore.remote.upload import UploadPlace

    from ..training import Training
    from .utilisation import StepUtilisation

_log = logging.getLogger("zstore")

_TAIL_BYTES = 64 * 1024
"""Bytes at the end of a journal that contain its last line."""


@dataclass(frozen=True)
class JournalPlace:
    """A local folder that journals are in, and the URL that they are sent to besides."""

    folder: Path
    remote: UploadPlace | None = None


def _run_folder(folder: Path) -> Path:
    return folder.parent if CHECKPOINT_FOLDER.fullmatch(folder.name) else folder


class RunJournal(StepJournal):
    """Writes an engine's journal, on rank 0; on others, and if the config wants none, every call does nothing."""

    def __init__(self, training: Training, times: PhaseTimes, utilisation: StepUtilisation) -> None:
        self._training = training
        self._times = times
        self._utilisation = utilisation
        self._said_flops: tuple[Any, ...] = ()
        chosen = training.config.own.journal
        self._first_step = training.counters.global_steps
        wanted = not training.config.frozen and chosen is not False
        super().__init__(training.world, training.state, enabled=wanted, step=self._first_step)
        self._place: JournalPlace | None = JournalPlace(chosen) if isinstance(chosen, Path) else None
        self._is_certain = self._place is not None
        self._sink: FileSink | None = None
        self._tail: JournalTail | None = None
        """Sends the file to a service, if the run saves to one."""
        self._run_id = training.run_id
        self._last_times = PhaseTimes()
        self._loop = "engine"
        if self.enabled:
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
        self._utilisation.tokens(self._tokens)
        self._total_steps = self._total_steps if total_steps is None else total_steps
        self._loop = loop or self._loop

    def place(self, place: JournalPlace, *, certain: bool = True) -> None:
        """Name the folder of checkpoints; the first certain one counts, unless the config names one. See [Note: where the
        journal goes]."""
        if not self.enabled or self._is_certain or (self._place is not None and not certain):
            return
        before, self._place, self._is_certain = self._place, place, certain
        if before is not None and before != place and self._sink is not None:
            self._move(self._sink)

    def follow(self, folder: Path | None) -> None:
        """Have the journal in `folder` from now on and in no other, unless the config names one: its file moves along.
        None: records wait until there is a folder."""
        if not self.enabled or isinstance(self._training.config.own.journal, Path):
            return
        former = self._sink
        self._place, self._is_certain = None if folder is None else JournalPlace(folder), True
        if former is None or former.path.parent == folder:
            return
        self._close_file()
        if self._place is None:
            return
        try:
            os.replace(former.path, self._place.folder / former.path.name)
        except OSError as error:
            self._say_failure(f"{type(error).__name__}: {error}")
        self._sink = self._opened(self._place)
        if self._sink is not None:
            self.writer.open(self._sink)

    @property
    def open_at(self) -> tuple[Path, str] | None:
        """The local folder of the run, and its id; None if the journal is not open. The journal is in that folder, or in a
        loop's checkpoint in it."""
        if self._sink is None:
            return None
        return _run_folder(self._sink.path.parent), self._run_id

    # -- from the engine --------------------------------------------------------------------------------------------

    def step_ended(self, loss: Loss) -> None:
        """Record the step that has just ended."""
        training = self._training
        now_s = time.perf_counter()
        times = replace(self._times)
        spent, self._last_times = times - self._last_times, times
        self._add_step(
            now_s,
            first_s=spent.forward_s + spent.backward_s + spent.optimizer_s,
            loss=loss,
            lr=float(training.optimizer.param_groups[0]["lr"]),
            grad_norm=training.norm,
            samples=training.accumulation.batch.train_batch_size,
            skipped=not training.was_applied,
            forward_s=spent.forward_s,
            backward_s=spent.backward_s,
            optimizer_s=spent.optimizer_s,
            mfu=self._utilisation.last,
            **self._new_flops(),
        )
        if self._sink is None or self._run_id != training.run_id:
            self._open()

    def _new_flops(self) -> dict[str, Any]:
        """Return the numbers behind `mfu` and their sources, for the first step that knows them, and when they change."""
        known = self._utilisation.now()
        if known is None or (known.source, known.peak_flops) == self._said_flops:
            return {}
        self._said_flops = known.source, known.peak_flops
        flops = known.step_flops * self._training.world.world_size
        peak = {"peak_flops": known.peak_flops, "peak_source": known.peak_source}
        return {"flops": {"step_flops": flops, "source": known.source} | peak}

    def save_begins(self, tag: str, location: str) -> SaveNotes | None:
        """Record the start of a save; return the notes to which its progress is told; None if nothing is written."""
        if not self.enabled:
            return None
        base = {"kind": "save", "step": self._step, "tag": tag, "location": location}
        notes = SaveNotes(self.writer, base, self._send)
        notes.add(state="begun")
        return notes

    def save_began(self, place: JournalPlace) -> None:
        """Note the place of a save that has begun well: the journal is there from now on at the latest."""
        self.place(place)
        self._open()

    def loaded(self, location: str, tag: str, elapsed_s: float, read_bytes: int) -> None:
        """Record a load."""
        if not self.enabled:
            return
        if self._sink is None and self._step_ended_s is None:
            self._first_step = self._step
        self._utilisation.begin_anew()
        self._last_times = replace(self._times)
        self._begin_anew()  # the bytes of the load belong to no step
        self._add("load", tag=tag, location=location, elapsed_s=elapsed_s, read_bytes=read_bytes)

    def resumed(self, folder: Path) -> None:
        """Take the run's journal to be in `folder`, if it goes on from a checkpoint; report if the process before was
        killed: its journal has no end."""
        if self._sink is None:
            self._tell_of_kill(folder)
        self.place(JournalPlace(folder), certain=False)

    def _tell_of_kill(self, folder: Path) -> None:
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

    def evaluated(self, loss: float, perplexity: float, samples: int) -> None:
        """Record an evaluation after the last step: the mean loss of so many samples over all ranks."""
        if self.enabled:
            self._add("eval", loss=loss, perplexity=perplexity, samples=samples)

    def logged(self, values: Mapping[str, Any]) -> None:
        """Record numbers of the loop's own after the last step; see `Engine.log`."""
        found = {name: value for name, given in values.items() if (value := number_of(given)) is not None}
        if self.enabled and found:
            self._add("metrics", values=found)

    def leave_out(self, seconds: float) -> None:
        """Let so many seconds before now be no part of the step under way."""
        if self._step_ended_s is not None:
            self._step_ended_s += seconds

    def acted(self, action: str, request_id: str, problem: str | None = None) -> None:
        """Record that a request was carried out, or why it was not."""
        if self.enabled:
            record = {"kind": "action", "at": time.time(), "action": action, "id": request_id}
            self.writer.append(record | ({} if problem is None else {"problem": problem}))

    def stops(self, reason: str, error: BaseException | None = None) -> None:
        """Set the reason for the run's end: "done" (by default), "stopped" or "failed", and the error behind it."""
        self._reason, self._error = reason, error_text(error)

    # -- the file ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Open the file of the run, if it is known by now."""
        run_id = self._training.run_id
        if not self.enabled or (self._sink is not None and run_id == self._run_id):
            return
        steps_folder = self._training.config.step_folder
        if self._place is None and steps_folder is not None:
            self._place = JournalPlace(steps_folder)
        if self._place is None:
            return
        if self._sink is not None:  # another run's checkpoint was loaded
            self._add("end", reason="stopped")
            self._close_file()
            self._first_step = self._step
        self._run_id = run_id
        sink = self._opened(self._place)
        if sink is not None:
            self._sink = sink
            training = self._training
            config = acting(training.config.settings)
            start = self._start_record(run_id, step=self._first_step, loop=self._loop, config=config)
            self.writer.open(sink, [start, plan_record(training.state, training.plan, training.world.device)])

    def _opened(self, place: JournalPlace) -> FileSink | None:
        try:
            path = place.folder / journal_file(self._run_id)
            run = _run_folder(place.folder)
            if run.is_dir() and not path.exists() and (former := run / journal_of(run, self._run_id)).exists():
                os.replace(former, path)  # of a run that was resumed, in one of its checkpoints
            sink = FileSink(path)
            if isinstance(place.remote, ServicePlace):
                self._tail = JournalTail(
                    sink.path,
                    place.remote,
                    self._run_id,
                    sink.begin_bytes,
                    failed=self._say_failure,
                    asked=partial(request, place.folder, self._run_id),
                )
            return sink
        except OSError as error:
            self._say_failure(f"{type(error).__name__}: {error}")
            return None

    def _move(self, former: FileSink) -> None:
        """Go on in another folder, with the records of this process. See [Note: where the journal goes]."""
        self.writer.flush()
        try:
            with open(former.path, "rb") as file:
                file.seek(former.begin_bytes)
                lines = file.read()
        except OSError:
            lines = b""
        self._add("end", reason="done")
        self._close_file()
        self._sink = None if self._place is None else self._opened(self._place)
        if self._sink is None:
            return
        try:
            self._sink.append(lines)
        except OSError as error:
            self._say_failure(f"{type(error).__name__}: {error}")
        self.writer.open(self._sink)

    def _close_file(self) -> None:
        self.writer.close_sink()
        self._sink = None
        self._close_tail()

    def _close_tail(self) -> None:
        tail, self._tail = self._tail, None
        if tail is not None:
            tail.close()

    def _send(self) -> None:
        """Send the journal as it is to the URL that the run saves to."""
        place, sink = self._place, self._sink
        if place is None or place.remote is None or sink is None or isinstance(place.remote, ServicePlace):
            return
        self.writer.flush()
        try:
            place.remote.send(sink.path, sink.path.name, lambda _: None)
        except Exception as error:
            self._say_failure(f"it was not sent to {place.remote}: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Write the end; a second call does nothing."""
        if not self.enabled:
            return
        super().close()
        self._send()
        self._sink = None
        self._close_tail()
