"""Reports on training: log lines, values for the monitors, and the journal of steps, saves and loads. See
[Note: the journal] in `zstore.journal`.

[Note: the journal's folder]
The folder is set by the config, `note_save_folder`, a load that resumes or the first save; until then records are buffered.
The first step or save after that opens the file, so a process that only loads leaves none. A run that saves to a URL writes
the journal to its local upload folder and uploads it with each save and at the end; `zstore serve` gets lines as written.
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

from ..config.keys import active_values
from .monitors import Monitors
from .statistics import PhaseTimes, StepUtilisation, cuda_peak_bytes, link_statistics, placed_arrays

if TYPE_CHECKING:
    from ..training.training import Training

_log = logging.getLogger("zstore")

_METRICS = "Train/Samples/"
_PROBLEM = "the run's journal cannot be written, and lines may be missing; training continues: %s"
_SAMPLE_S = 2.0
"""Minimum time between two samples of links and memory."""

Loss = float | None | Callable[[], float]
"""A loss, None if unknown, or a function that waits for it."""


def _loss_value(loss: torch.Tensor | None) -> Loss:
    """Return a loss as a number if it is in host memory, else a function, callable on any thread, that waits for its copy."""
    if loss is None or loss.device.type != "cuda":
        return None if loss is None else float(loss)
    host_loss = torch.empty((), dtype=torch.float32, pin_memory=True)
    host_loss.copy_(loss.reshape(()), non_blocking=True)
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(loss.device))

    def wait() -> float:
        event.synchronize()
        return float(host_loss)

    return wait


class RunReport:
    """Reports losses and steps as configured. See [Note: metrics].

    The loss is copied from the device only once per reported step.
    """

    def __init__(self, training: Training, monitors: Monitors) -> None:
        settings, world = training.config.settings, training.world
        self._training = training
        self.times = PhaseTimes()
        syncs = settings.wall_clock_breakdown and world.device.type == "cuda"
        self.wait: Callable[[], object] = partial(torch.cuda.synchronize, world.device) if syncs else lambda: None
        """Waits for the device before and after a phase, at the cost of overlap."""
        self.monitors = monitors
        self._has_monitors = bool(monitors)
        self.utilisation = StepUtilisation(training)
        self.journal = RunJournal(training, self.utilisation)
        self._print_interval = settings.steps_per_print
        reports = self._print_interval > 0 or self._has_monitors or self.journal.enabled
        self.enabled = self.utilisation.should_count = reports and world.rank == 0 and not training.config.frozen
        """Whether steps are reported."""
        self._losses: list[torch.Tensor] = []
        self._losses_are_parts = False
        """Whether the losses are divided by the number of micro-batches."""
        losses = self._loss_to_send = list[torch.Tensor]()  # the step's loss, if known, until it is sent
        world.messages["loss"] = lambda: float(losses.pop()) if losses else None  # without a reference to this object
        self._last_step = PhaseTimes()
        self._last_line = training.counters.global_steps, training.samples, PhaseTimes()
        self._line_s = time.perf_counter()
        if settings.dump_state and world.rank == 0:
            config = json.dumps(active_values(settings), indent=2)
            _log.info("state at startup:\n%s\n%s", config, _memory_line(training))

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the duration of the block to a phase."""
        self.wait()
        start = time.perf_counter()
        try:
            yield
            self.wait()
        finally:
            setattr(self.times, phase, getattr(self.times, phase) + time.perf_counter() - start)

    @contextlib.contextmanager
    def time_forward(self) -> Iterator[None]:
        """Time a training forward, and count its operations once. A forward with the model in eval mode and without gradients
        is an evaluation, and is not timed."""
        trains = self._training.model.training or torch.is_grad_enabled()
        self.utilisation.begin_forward(trains=trains)
        counting = self.utilisation.counting() if self.utilisation.should_count else contextlib.nullcontext()
        with counting, self.timed("forward_s") if trains else contextlib.nullcontext():
            yield

    def add_loss(self, loss: torch.Tensor, *, is_part: bool = False) -> None:
        """Add the loss of a micro-batch before its backward; `is_part` if it is divided by the accumulation steps."""
        # The accumulation counter would be wrong here: zero_grad() drops the gradients but does not reset it.
        if self._training.gradients.step.backwards == 0:
            self._losses.clear()
        self._losses.append(loss.detach())
        self._losses_are_parts = is_part

    def _take_loss(self) -> torch.Tensor | None:
        """Return the step's loss, one element on its device; None if unknown."""
        losses, self._losses = self._losses, []
        if len(losses) <= 1:
            return losses[0] if losses else None
        stacked = torch.stack([loss.float().reshape(()) for loss in losses])
        return stacked.sum() if self._losses_are_parts else stacked.mean()

    def begin_step(self) -> None:
        """Send the step's loss with its first message, by which time the device has computed it (all ranks, if several)."""
        self._loss_to_send[:] = [] if (loss := self._take_loss()) is None else [loss]
        self._training.world.received["loss"] = []

    def end_step(self) -> None:
        """Report an optimizer step, taken or skipped."""
        self.utilisation.end_step()
        should_print = self._print_interval > 0 and self._training.counters.global_steps % self._print_interval == 0
        # Take the loss now, since the next step's may follow.
        local_loss, losses = self._take_loss(), self._training.world.received.get("loss", [])
        loss = sum(losses) / len(losses) if losses else _loss_value(local_loss)
        times = replace(self.times)
        durations, self._last_step = times - self._last_step, times
        if self._has_monitors or should_print:
            loss = number = loss() if callable(loss) else loss
            if self._has_monitors:
                self._write(number, durations)
            if should_print:
                self._print(number, times)
        self.journal.end_step(loss, durations)

    def _write(self, loss: float | None, durations: PhaseTimes) -> None:
        training = self._training
        metrics = {
            "train_loss": loss,
            "lr": float(training.optimizer.param_groups[0]["lr"]),
            "loss_scale": training.scaler.scale if training.config.precision == "fp16" else None,
            "grad_norm": training.norm,
            "elapsed_time_ms_forward": durations.forward_s * 1e3,
            "elapsed_time_ms_backward": durations.backward_s * 1e3,
            "elapsed_time_ms_step": durations.optimizer_s * 1e3,
            "mfu": self.utilisation.last,
        }
        values = {_METRICS + name: value for name, value in metrics.items() if value is not None}
        self.monitors.write(values, training.samples)

    def _print(self, loss: float | None, times: PhaseTimes) -> None:
        training, settings = self._training, self._training.config.settings
        (last_step, last_samples, last_times), now_s = self._last_line, time.perf_counter()
        step = training.counters.global_steps
        self._last_line = step, training.samples, times
        elapsed_s, self._line_s = now_s - self._line_s, now_s
        rates = ", ".join(f"{group['lr']:.3g}" for group in training.optimizer.param_groups)
        loss_text = "" if loss is None else f"loss {loss:.4f}, "
        skipped = training.counters.skipped_steps
        lines = [f"{loss_text}lr {rates}, gradient norm {training.norm:.4g}, skipped {skipped}"]
        steps = step - last_step  # a load may have moved the count either way
        if settings.wall_clock_breakdown and steps > 0:
            phases = zip(("forward", "backward", "step"), vars(times - last_times).values(), strict=True)
            means = ", ".join(f"{name} {1e3 * seconds / steps:.1f} ms" for name, seconds in phases)
            lines.append(f"{means}, mean of {steps} steps")
        if settings.timers.throughput.enabled and steps > 0:
            lines.append(f"{(training.samples - last_samples) / elapsed_s:.4g} samples/s, mean of {steps} steps")
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
    """An engine's journal, written by rank 0. On other ranks, and if the config disables it, every call does nothing.

    The first failure is logged as a warning; training continues.
    """

    def __init__(self, training: Training, utilisation: StepUtilisation) -> None:
        setting = training.config.zstore.journal
        self.enabled = training.world.rank == 0 and not training.config.frozen and setting is not False
        """Whether anything is written; false after `close`."""
        self.writer = JournalWriter(partial(_log.warning, _PROBLEM))
        self.save_stall_s: Callable[[], Mapping[str, float]] = dict
        """Returns the seconds by which saves delayed training, by kind."""
        self._training, self._utilisation = training, utilisation
        self._folder = setting if isinstance(setting, Path) else None
        self._remote: UploadPlace | None = None
        self._is_final = self._folder is not None
        """Whether the folder is final; a folder set by a load is not."""
        self._run_id: str | None = None
        """The run ID of the open file."""
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
        """Set values that the engine cannot know: the tokens per step over all ranks, from the current step until the next
        call, and the planned steps of the run."""
        self._utilisation.tokens = self._utilisation.tokens if tokens is None else tokens
        self._total_steps = self._total_steps if total_steps is None else total_steps

    def log_metrics(self, values: Mapping[str, Any]) -> None:
        """Record the training loop's own metrics for the last step; see `Engine.log`."""
        metrics = {f"metric/{name}": value for name, raw in values.items() if (value := _to_float(raw)) is not None}
        if metrics:
            self._add("metrics", **metrics)

    def end_step(self, loss: float | Callable[[], float] | None, durations: PhaseTimes) -> None:
        """Record a completed step, with the durations of its phases."""
        if not self.enabled:
            return
        training, tokens, now_s = self._training, self._utilisation.tokens, time.perf_counter()
        step_s = self._utilisation.step_s or durations.forward_s + durations.backward_s + durations.optimizer_s
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
            **vars(durations),
            mfu=self._utilisation.last,
            **(self._sample(now_s) if now_s >= self._next_sample_s else {}),
        )
        self._open()

    def _sample(self, now_s: float) -> dict[str, float]:
        """Return memory use, and the mean link rates and stalls per step since the last sample."""
        store = self._training.state.store
        statistics = store.statistics()
        links = link_statistics(self._training.world, store, statistics, self.save_stall_s())
        elapsed_s, steps = now_s - self._sampled_s, max(1, self._step - self._sampled_step)
        sample, stalls = dict[str, float](), dict[str, float]()
        for name, link in links.items():
            delta = link.since(self._links.get(name, LinkStatistics()))
            if delta.bytes:
                sample[f"rate/{name}"] = delta.bytes / elapsed_s
            for cause, seconds in delta.stall_s.items():
                stalls[f"stall/{cause}"] = stalls.get(f"stall/{cause}", 0.0) + seconds / steps
        self._links, self._sampled_s, self._sampled_step = links, now_s, self._step
        self._next_sample_s = now_s + _SAMPLE_S
        sample |= {f"memory/{tier}": getattr(statistics, f"{tier}_bytes") for tier in ("device", "host", "disk")}
        sample |= {"memory/buffers": statistics.pool_bytes, "memory/process": resident_bytes()}
        sample["memory/cuda"] = cuda_peak_bytes(self._training.world.device)
        return sample | stalls | {"stall_s": sum(stalls.values())}

    def begin_save(
        self, tag: str, folder: Path, remote: UploadPlace | None
    ) -> Callable[[SaveHandle | SaveSummary | BaseException], None]:
        """Return a function to call, on any thread, with the save's handle once it has started, then its summary or error."""
        location = str(folder / tag_folder(tag)) if remote is None else remote.location_of(tag_folder(tag))
        common, start_s = {"step": self._step, "tag": tag, "location": location}, time.perf_counter()
        handles: list[SaveHandle] = []

        def stall_s() -> float:
            """Return the seconds by which training was delayed, until now if it still is, since the commit may come first."""
            return (handles[0].stall_s if handles else 0.0) or time.perf_counter() - start_s

        def record(event: SaveHandle | SaveSummary | BaseException) -> None:
            if isinstance(event, SaveHandle):
                handles.append(event)
                self.set_save_folder(folder, remote)
                self._open()
            elif isinstance(event, BaseException):
                self._add("save", **common, state="failed", problem=_error_text(event))
            else:
                state = "committed" if event.url is None else "uploaded"
                sizes = {
                    f"{how}_bytes": getattr(event, f"all_{how}_bytes") for how in ("linked", "written", "uploaded")
                }
                self._add("save", **common, state=state, stall_s=stall_s, elapsed_s=event.elapsed_s, **sizes)
                self._send()

        return record

    def record_load(self, path: str, tag: str, elapsed_s: float, read_bytes: int, *, resumes: bool) -> None:
        """Record that a checkpoint was loaded, to resume its run or to start a new one."""
        if self._run_id is None and self._utilisation.step_s is None:
            self._first_step = self._step
        self._utilisation.reset()
        if not self.enabled:
            return
        self._add("load", tag=tag, location=path, elapsed_s=elapsed_s, read_bytes=read_bytes)
        self._sample(time.perf_counter())  # excludes the load's bytes from the next step
        self._next_sample_s = 0.0
        parent = os.path.dirname(path)
        if resumes and not is_url(path) and os.access(parent, os.W_OK):
            self.set_save_folder(Path(parent), None, is_final=False)

    def record_stop(self, error: BaseException) -> None:
        """Record why the engine is about to be closed: an error, or a request to stop (SystemExit)."""
        self._reason = "stopped" if isinstance(error, SystemExit | KeyboardInterrupt) else "failed"
        self._problem = "" if isinstance(error, SystemExit) else _error_text(error)

    def set_save_folder(self, folder: Path, remote: UploadPlace | None, *, is_final: bool = True) -> None:
        """Set the folder of the run's checkpoints, and the URL to which they are uploaded, unless a final folder is set. See
        [Note: the journal's folder]. If a training loop creates one folder per save, the parent is used; Lightning's folders
        `*.ckpt` are ignored, since callers list their parent."""
        if not self.enabled or self._is_final or folder.suffix == ".ckpt":
            return
        journal_folder = folder.parent if LOOPS_FOLDER.fullmatch(folder.name) else folder
        if journal_folder != self._folder:
            self._end("done")
        self._folder, self._remote, self._is_final = journal_folder, remote, is_final

    def _open(self) -> None:
        """Open the run's file if its folder is known."""
        training = self._training
        if not self.enabled or self._folder is None or self._run_id == training.run_id:
            return
        if self._run_id is not None:  # a different run's checkpoint was loaded
            self._end("stopped")
            self._first_step = self._step
        path = self._folder / journal_file(training.run_id)
        try:
            file = JournalFile(path)
        except OSError as error:
            self.writer.fail(_error_text(error))
            return
        self._run_id = training.run_id
        previous_records = decode_lines(file.tail)
        if previous_records and previous_records[-1]["kind"] != "end":
            _log.warning(
                "the journal does not record the end of this run's previous process: it was killed, or is still running. If "
                "memory ran out, `zstore plan --config` shows what to change"
            )
        if self._remote is not None and self._remote.is_service:
            self._tail = JournalTail(path, self._remote, self._run_id, file.begin_bytes, failed=self.writer.fail)
        listeners = () if self._tail is None else (self._tail.send,)
        self.writer.open(file, [self._start_record(), _memory_record(training)], *listeners)

    def _start_record(self) -> dict[str, Any]:
        training = self._training
        return {
            "kind": "start",
            "at": self._started_at,
            "version": 1,
            "run": training.run_id,
            "step": self._first_step,
            "total_steps": self._total_steps,
            "config": active_values(training.config.settings),
            "world_size": training.world.world_size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "versions": {"zstore": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }

    def _send(self) -> None:
        """Upload the whole file to the URL that the run saves to, unless it is a service."""
        remote, file = self._remote, self.writer.file
        if remote is None or remote.is_service or file is None:
            return
        self.writer.flush()
        try:
            folder = remote.open(PATIENT)
            if isinstance(folder, BucketFolder):
                folder.send(file.path, file.path.name)
        except Exception as error:
            self.writer.fail(f"it was not uploaded to {remote}: {_error_text(error)}")

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
        # The uncaught error, if the interpreter exits because of one.
        last_error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        uncaught = None if self._reason != "done" or threading.main_thread().is_alive() else last_error
        self._end("failed" if uncaught else self._reason, _error_text(uncaught) if uncaught else self._problem)
        self.enabled = False


def _memory_record(training: Training) -> dict[str, Any]:
    """Return a record of this rank's bytes between steps, and the planned bytes of gradients."""
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
        "arrays": [array for array in arrays if array[3] > 0],
    }


def _to_float(value: Any) -> float | None:
    """Return a number or one-element tensor as a float; None for anything else."""
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        return None if isinstance(value, bool | str | bytes) else float(value)
    return None


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]
