"""Reports of training: lines in the log, values for the monitors, and the journal of steps, saves and loads. See
[Note: the journal] in `zstore.journal`.

[Note: the journal's folder]
The config, `note_save_folder`, a load that resumes or the first save gives it; until then records wait. The first step or
save after that opens the file, so a process that only loads leaves none. A run that saves to a URL writes it into its local
upload folder, and sends it with each save and at the end; to a service of zstore it sends each line as it is written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zstore._version import __version__
from zstore.checkpoint import LOOPS_FOLDER, SaveHandle, SaveSummary, tag_folder
from zstore.errors import format_bytes
from zstore.io import LinkStatistics, is_url, most_resident_bytes, resident_bytes
from zstore.journal import JournalFile, JournalTail, JournalWriter, decode_lines, journal_file
from zstore.remote.bucket import PATIENT, BucketFolder
from zstore.remote.service import UploadPlace

from ..config.keys import acting
from .monitors import Monitors
from .statistics import PhaseTimes, StepUtilisation, cuda_peak_bytes, link_statistics, placed_arrays

if TYPE_CHECKING:
    from ..training.training import Training

_log = logging.getLogger("zstore")

_METRICS = "Train/Samples/"
_PROBLEM = "the run's journal cannot be written, and lines may be missing; training continues: %s"
_SAMPLE_S = 2.0
"""Least time between two samples of links and memory."""

Loss = float | None | Callable[[], float]
"""A loss; None: not known; or a function that waits for it."""


def _value_of(loss: torch.Tensor | None) -> Loss:
    """Return a loss as a number if it is in host memory, else a function, for any thread, that waits for its copy."""
    if loss is None or loss.device.type != "cuda":
        return None if loss is None else float(loss)
    copied = torch.empty((), dtype=torch.float32, pin_memory=True)
    copied.copy_(loss.reshape(()), non_blocking=True)
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(loss.device))

    def wait() -> float:
        event.synchronize()
        return float(copied)

    return wait


class RunReport:
    """Reports losses and steps as configured. See [Note: metrics].

    The loss is copied from the device once in a step that is reported, else never.
    """

    def __init__(self, training: Training, monitors: Monitors) -> None:
        settings, world = training.config.settings, training.world
        self._training = training
        self.times = PhaseTimes()
        waits = settings.wall_clock_breakdown and world.device.type == "cuda"
        self.wait: Callable[[], object] = partial(torch.cuda.synchronize, world.device) if waits else lambda: None
        """Waits for the device at both ends of a phase, which costs overlap."""
        self.monitors = monitors
        self._writes = bool(monitors)
        self.utilisation = StepUtilisation(training)
        self.journal = RunJournal(training, self.utilisation)
        self._every = settings.steps_per_print
        reports = self._every > 0 or self._writes or self.journal.enabled
        self.enabled = self.utilisation.counts = reports and world.rank == 0 and not training.config.frozen
        """Whether steps are reported at all."""
        self._losses: list[torch.Tensor] = []
        self._are_parts = False
        """Whether the losses were divided by the number of micro-batches."""
        losses = self._to_send = list[torch.Tensor]()  # the step's, if known, until it is sent
        world.messages["loss"] = lambda: float(losses.pop()) if losses else None  # without a reference to this object
        self._last_step = PhaseTimes()
        self._last_line = training.counters.global_steps, training.samples, PhaseTimes()
        self._line_s = time.perf_counter()
        if settings.dump_state and world.rank == 0:
            config = json.dumps(acting(settings), indent=2)
            _log.info("state at the start:\n%s\n%s", config, _memory_line(training))

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the block's seconds to a phase's."""
        self.wait()
        start = time.perf_counter()
        try:
            yield
            self.wait()
        finally:
            setattr(self.times, phase, getattr(self.times, phase) + time.perf_counter() - start)

    @contextlib.contextmanager
    def around_forward(self) -> Iterator[None]:
        """Time a forward in training, and count its operations once; not one of an evaluation: in the model's mode for it, and
        without gradients."""
        trains = self._training.model.training or torch.is_grad_enabled()
        self.utilisation.forward_begins(trains=trains)
        counted = self.utilisation.counting() if self.utilisation.counts else contextlib.nullcontext()
        with counted, self.timed("forward_s") if trains else contextlib.nullcontext():
            yield

    def add_loss(self, loss: torch.Tensor, *, is_part: bool = False) -> None:
        """Add the loss of a micro-batch, before its backward; `is_part`: it is divided by the accumulation steps."""
        # Not by the accumulation, which zero_grad() continues without the gradients.
        if self._training.gradients.step.backwards == 0:
            self._losses.clear()
        self._losses.append(loss.detach())
        self._are_parts = is_part

    def _take_loss(self) -> torch.Tensor | None:
        """Return the step's loss, one element on its device; None: not known."""
        losses, self._losses = self._losses, []
        if len(losses) <= 1:
            return losses[0] if losses else None
        stacked = torch.stack([loss.float().reshape(()) for loss in losses])
        return stacked.sum() if self._are_parts else stacked.mean()

    def step_begins(self) -> None:
        """Send the step's loss with its first message; the device has computed it by then (all ranks, if several)."""
        self._to_send[:] = [] if (loss := self._take_loss()) is None else [loss]
        self._training.world.received["loss"] = []

    def step_ended(self) -> None:
        """Report an optimizer step, taken or skipped."""
        self.utilisation.step_ended()
        prints = self._every > 0 and self._training.counters.global_steps % self._every == 0
        # The next step's loss may not be known yet.
        taken, losses = self._take_loss(), self._training.world.received.get("loss", [])
        loss = sum(losses) / len(losses) if losses else _value_of(taken)
        times = replace(self.times)
        spent, self._last_step = times - self._last_step, times
        if self._writes or prints:
            loss = number = loss() if callable(loss) else loss
            if self._writes:
                self._write(number, spent)
            if prints:
                self._print(number, times)
        self.journal.step_ended(loss, spent)

    def _write(self, loss: float | None, spent: PhaseTimes) -> None:
        training = self._training
        found = {
            "train_loss": loss,
            "lr": float(training.optimizer.param_groups[0]["lr"]),
            "loss_scale": training.scaler.scale if training.config.precision == "fp16" else None,
            "grad_norm": training.norm,
            "elapsed_time_ms_forward": spent.forward_s * 1e3,
            "elapsed_time_ms_backward": spent.backward_s * 1e3,
            "elapsed_time_ms_step": spent.optimizer_s * 1e3,
            "mfu": self.utilisation.last,
        }
        values = {_METRICS + name: value for name, value in found.items() if value is not None}
        self.monitors.write(values, training.samples)

    def _print(self, loss: float | None, times: PhaseTimes) -> None:
        training, settings = self._training, self._training.config.settings
        (before, samples, earlier), now_s = self._last_line, time.perf_counter()
        step = training.counters.global_steps
        self._last_line = step, training.samples, times
        passed_s, self._line_s = now_s - self._line_s, now_s
        rates = ", ".join(f"{group['lr']:.3g}" for group in training.optimizer.param_groups)
        known = "" if loss is None else f"loss {loss:.4f}, "
        skipped = training.counters.skipped_steps
        lines = [f"{known}lr {rates}, gradient norm {training.norm:.4g}, skipped {skipped}"]
        steps = step - before  # a load may have moved the count either way
        if settings.wall_clock_breakdown and steps > 0:
            phases = zip(("forward", "backward", "step"), vars(times - earlier).values(), strict=True)
            means = ", ".join(f"{name} {1e3 * seconds / steps:.1f} ms" for name, seconds in phases)
            lines.append(f"{means}, mean of {steps} steps")
        if settings.timers.throughput.enabled and steps > 0:
            lines.append(f"{(training.samples - samples) / passed_s:.4g} samples/s, mean of {steps} steps")
        if settings.memory_breakdown:
            lines.append(_memory_line(training))
        for line in lines:
            _log.info("step %d: %s", step, line)


def _memory_line(training: Training) -> str:
    store, device = training.state.store.statistics(), training.world.device
    sizes = (store.device_bytes, store.host_bytes, store.disk_bytes, store.pool_bytes, store.pool_peak_bytes)
    line = "state on device {}, host {}, disk {}; buffers {}, at most {} in use; peak of the process {}".format(
        *map(format_bytes, (*sizes, most_resident_bytes()))
    )
    return line + (f", of CUDA {format_bytes(nbytes)}" if (nbytes := cuda_peak_bytes(device)) else "")


class RunJournal:
    """An engine's journal, written by rank 0; on other ranks, and if the config turns it off, every call does nothing.

    The first failure is a warning, and training continues.
    """

    def __init__(self, training: Training, utilisation: StepUtilisation) -> None:
        chosen = training.config.zstore.journal
        self.enabled = training.world.rank == 0 and not training.config.frozen and chosen is not False
        """Whether anything is written; false after `close`."""
        self.writer = JournalWriter(partial(_log.warning, _PROBLEM))
        self.saves_s: Callable[[], Mapping[str, float]] = dict
        """Returns the seconds for which saves delayed training, by kind."""
        self._training, self._utilisation = training, utilisation
        self._folder = chosen if isinstance(chosen, Path) else None
        self._remote: UploadPlace | None = None
        self._is_named = self._folder is not None
        """Whether the folder is final; a load's folder is not."""
        self._run_id: str | None = None
        """The run of the open file."""
        self._tail: JournalTail | None = None
        self._total_steps: int | None = None
        self._first_step = self._sampled_step = training.counters.global_steps
        self._started_at = time.time()
        self._sampled_s, self._next_sample_s = time.perf_counter(), 0.0
        self._links: Mapping[str, LinkStatistics] = {}
        self._reason, self._problem = "done", ""

    def _add(self, kind: str, **values: Any) -> None:
        if self.enabled:
            self.writer.append({"kind": kind, "at": time.time(), "step": self._step, **values})

    @property
    def _step(self) -> int:
        return self._training.counters.global_steps

    def note(self, *, tokens: int | None = None, total_steps: int | None = None) -> None:
        """Set values that the engine cannot know: the tokens of a step over all ranks, from the current one until the
        next call, and the planned steps of the run."""
        self._utilisation.tokens = self._utilisation.tokens if tokens is None else tokens
        self._total_steps = self._total_steps if total_steps is None else total_steps

    def logged(self, values: Mapping[str, Any]) -> None:
        """Record the loop's numbers for the last step; see `Engine.log`."""
        found = {f"metric/{name}": value for name, given in values.items() if (value := _number(given)) is not None}
        if found:
            self._add("metrics", **found)

    def step_ended(self, loss: float | Callable[[], float] | None, spent: PhaseTimes) -> None:
        """Record a step at its end, with the seconds of its phases."""
        if not self.enabled:
            return
        training, tokens, now_s = self._training, self._utilisation.tokens, time.perf_counter()
        step_s = self._utilisation.step_s or spent.forward_s + spent.backward_s + spent.optimizer_s
        self._add(
            "step",
            loss=loss,
            lr=float(training.optimizer.param_groups[0]["lr"]),
            grad_norm=training.norm,
            samples=training.accumulation.batch.train_batch_size,
            tokens=tokens,
            tokens_per_s=tokens / step_s if tokens and step_s else None,
            skipped=not training.was_applied,
            step_s=step_s,
            **vars(spent),
            mfu=self._utilisation.last,
            **(self._sample(now_s) if now_s >= self._next_sample_s else {}),
        )
        self._open()

    def _sample(self, now_s: float) -> dict[str, float]:
        """Return memory, rates of the links, and stalls per step: means since the last sample."""
        store = self._training.state.store
        statistics = store.statistics()
        links = link_statistics(self._training.world, store, statistics, self.saves_s())
        passed_s, steps = now_s - self._sampled_s, max(1, self._step - self._sampled_step)
        found, stalls = dict[str, float](), dict[str, float]()
        for name, link in links.items():
            moved = link.since(self._links.get(name, LinkStatistics()))
            if moved.bytes:
                found[f"rate/{name}"] = moved.bytes / passed_s
            for cause, seconds in moved.stall_s.items():
                stalls[f"stall/{cause}"] = stalls.get(f"stall/{cause}", 0.0) + seconds / steps
        self._links, self._sampled_s, self._sampled_step = links, now_s, self._step
        self._next_sample_s = now_s + _SAMPLE_S
        found |= {f"memory/{tier}": getattr(statistics, f"{tier}_bytes") for tier in ("device", "host", "disk")}
        found |= {"memory/buffers": statistics.pool_bytes, "memory/process": resident_bytes()}
        found["memory/cuda"] = cuda_peak_bytes(self._training.world.device)
        return found | stalls | {"stall_s": sum(stalls.values())}

    def save_begins(
        self, tag: str, folder: Path, remote: UploadPlace | None
    ) -> Callable[[SaveHandle | SaveSummary | BaseException], None]:
        """Return a function to call, from any thread, with a save's handle when it has begun, and with its summary or error."""
        location = str(folder / tag_folder(tag)) if remote is None else remote.location_of(tag_folder(tag))
        save, began_s = {"step": self._step, "tag": tag, "location": location}, time.perf_counter()
        handles: list[SaveHandle] = []

        def stall_s() -> float:
            """Return the seconds of delay of training, until now if it lasts: the commit may be earlier."""
            return (handles[0].stall_s if handles else 0.0) or time.perf_counter() - began_s

        def record(event: SaveHandle | SaveSummary | BaseException) -> None:
            if isinstance(event, SaveHandle):
                handles.append(event)
                self.saves_in(folder, remote)
                self._open()
            elif isinstance(event, BaseException):
                self._add("save", **save, state="failed", problem=_text_of(event))
            else:
                state = "committed" if event.url is None else "uploaded"
                moved = {
                    f"{how}_bytes": getattr(event, f"all_{how}_bytes") for how in ("linked", "written", "uploaded")
                }
                self._add("save", **save, state=state, stall_s=stall_s, elapsed_s=event.elapsed_s, **moved)
                self._send()

        return record

    def loaded(self, path: str, tag: str, elapsed_s: float, read_bytes: int, *, resumes: bool) -> None:
        """Record that a checkpoint has been loaded, to resume its run or to start another."""
        if self._run_id is None and self._utilisation.step_s is None:
            self._first_step = self._step
        self._utilisation.reset()
        if not self.enabled:
            return
        self._add("load", tag=tag, location=path, elapsed_s=elapsed_s, read_bytes=read_bytes)
        self._sample(time.perf_counter())  # the bytes of the load belong to no step
        self._next_sample_s = 0.0
        parent = os.path.dirname(path)
        if resumes and not is_url(path) and os.access(parent, os.W_OK):
            self.saves_in(Path(parent), None, is_final=False)

    def stops(self, error: BaseException) -> None:
        """Record why the engine is about to be closed: an error, or, by SystemExit, a request to stop."""
        self._reason = "stopped" if isinstance(error, SystemExit | KeyboardInterrupt) else "failed"
        self._problem = "" if isinstance(error, SystemExit) else _text_of(error)

    def saves_in(self, folder: Path, remote: UploadPlace | None, *, is_final: bool = True) -> None:
        """Set the folder of the run's checkpoints, and the URL that they are uploaded to, unless a final one is set. See
        [Note: the journal's folder]. For a loop with a folder for each save the parent folder is used; Lightning's folders
        `*.ckpt` are ignored, since callers list their parent."""
        if not self.enabled or self._is_named or folder.suffix == ".ckpt":
            return
        chosen = folder.parent if LOOPS_FOLDER.fullmatch(folder.name) else folder
        if chosen != self._folder:
            self._end("done")
        self._folder, self._remote, self._is_named = chosen, remote, is_final

    def _open(self) -> None:
        """Open the file of the run, if its folder is known."""
        training = self._training
        if not self.enabled or self._folder is None or self._run_id == training.run_id:
            return
        if self._run_id is not None:  # another run's checkpoint was loaded
            self._end("stopped")
            self._first_step = self._step
        path = self._folder / journal_file(training.run_id)
        try:
            file = JournalFile(path)
        except OSError as error:
            self.writer.fail(_text_of(error))
            return
        self._run_id = training.run_id
        before = decode_lines(file.tail)
        if before and before[-1]["kind"] != "end":
            _log.warning(
                "the journal has no end of the previous process of this run: it was killed, or is still running. If memory ran "
                "out, `zstore plan --config` shows what to change"
            )
        if self._remote is not None and self._remote.is_service:
            self._tail = JournalTail(path, self._remote, self._run_id, file.begin_bytes, failed=self.writer.fail)
        after = () if self._tail is None else (self._tail.send,)
        self.writer.open(file, [self._start_record(), _memory_record(training)], *after)

    def _start_record(self) -> dict[str, Any]:
        training = self._training
        return {
            "kind": "start",
            "at": self._started_at,
            "version": 1,
            "run": training.run_id,
            "step": self._first_step,
            "total_steps": self._total_steps,
            "config": acting(training.config.settings),
            "world_size": training.world.world_size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "versions": {"zstore": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }

    def _send(self) -> None:
        """Send the whole file to the URL that the run saves to, unless it is a service."""
        remote, file = self._remote, self.writer.file
        if remote is None or remote.is_service or file is None:
            return
        self.writer.flush()
        try:
            folder = remote.open(PATIENT)
            if isinstance(folder, BucketFolder):
                folder.send(file.path, file.path.name)
        except Exception as error:
            self.writer.fail(f"it was not sent to {remote}: {_text_of(error)}")

    def _end(self, reason: str, problem: str = "") -> None:
        """Write the end record and close the file, if one is open."""
        if self._run_id is None:
            return
        self._add("end", reason=reason, problem=problem or None)
        self._send()
        self.writer.close()
        if self._tail is not None:
            self._tail.send(is_end=True)
        self._run_id = self._tail = None

    def close(self) -> None:
        """Write the end record; a second call does nothing."""
        # An uncaught error, if the interpreter ends because of one.
        last: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        uncaught = None if self._reason != "done" or threading.main_thread().is_alive() else last
        self._end("failed" if uncaught else self._reason, _text_of(uncaught) if uncaught else self._problem)
        self.enabled = False


def _memory_record(training: Training) -> dict[str, Any]:
    """Return the record of this rank's bytes between two steps, and of the planned bytes of gradients."""
    device, plan = training.world.device, training.plan
    buffer_bytes = training.state.store.statistics().pool_bytes
    arrays = [*placed_arrays(training), ("transfer buffers", "host", "buffers", buffer_bytes)]
    arrays += [("gradients", tier, "gradients", nbytes) for tier, nbytes in vars(plan.held["gradients"]).items()]
    is_cuda = device.type == "cuda"
    return {
        "kind": "memory",
        "at": time.time(),
        "host_budget_bytes": plan.settings.budget_bytes,
        "device_bytes": torch.cuda.get_device_properties(device).total_memory if is_cuda else None,
        "arrays": [one for one in arrays if one[3] > 0],
    }


def _number(value: Any) -> float | None:
    """Return a number, or a tensor of one element, as a float; None for anything else."""
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        return None if isinstance(value, bool | str | bytes) else float(value)
    return None


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]
