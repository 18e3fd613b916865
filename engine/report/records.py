"""The loss and the times of a step, and the journal of a run's steps, in so far as those of engines and of optimizers are
alike."""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from zstore._version import __version__
from zstore.checkpoint import SaveSummary
from zstore.io import LinkStatistics
from zstore.journal.names import pid_namespace
from zstore.journal.writer import JournalWriter
from zstore.ranks.world import World

from .memory import memory_now
from .statistics import link_statistics

if TYPE_CHECKING:
    from ..optim.state import OptimizerState

_log = logging.getLogger("zstore")

_SAMPLE_S = 2.0
_SHARE = 5000
"""Sampling links and memory takes less than one part in so many of the time."""
_SAMPLES = 2000
"""They are sampled at most so often in the time that has passed: journals of long runs stay quick to read."""
_PACKAGES = ("transformers", "accelerate", "lightning", "pytorch_lightning", "peft", "trl", "deepspeed")
"""Packages whose versions are recorded if they are in use."""

VERSION = 1
"""Of the journal's format."""


Loss = float | None | Callable[[], float]
"""A loss, None if it is not known, or a function that waits for it."""


class StepLosses:
    """Collects the losses of a step's micro-batches on this rank."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._are_parts = False

    def add(self, loss: torch.Tensor, *, is_new: bool, is_part: bool) -> None:
        """Note the loss of a micro-batch, with which `is_new` begins a step; one that `is_part` of the step's was divided by
        the number of micro-batches."""
        if is_new:
            self._losses.clear()
        self._losses.append(loss.detach())
        self._are_parts = is_part

    def take(self) -> torch.Tensor | None:
        """Return the step's loss, one element, on its device, and forget it; None if it is not known."""
        losses, self._losses = self._losses, []
        if not losses:
            return None
        if len(losses) == 1:
            return losses[0]
        stacked = torch.stack([loss.float().reshape(()) for loss in losses])
        return stacked.sum() if self._are_parts else stacked.mean()


def value_of(loss: torch.Tensor | None) -> Loss:
    """Return a loss as a number: at once if it is in host memory, else a function that waits for the copy, which any thread
    may call. The calling thread does not wait."""
    if loss is None:
        return None
    if loss.device.type != "cuda":
        return float(loss)
    here = torch.empty((), dtype=torch.float32, pin_memory=True)
    here.copy_(loss.reshape(()), non_blocking=True)
    arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(loss.device))

    def wait() -> float:
        arrived.synchronize()
        return float(here)

    return wait


def number_of(value: Any) -> float | None:
    """Return a number of a loop's as a float: of a tensor of one element its value; None if it is none."""
    if isinstance(value, bool | str | bytes) or (isinstance(value, torch.Tensor) and value.numel() != 1):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _versions() -> dict[str, str]:
    found = {"zstore": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found


def _uncaught_error() -> BaseException | None:
    """Return the error that nobody caught, if the interpreter ends because of one."""
    found: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return None if threading.main_thread().is_alive() else found


def error_text(error: BaseException | None) -> str | None:
    """Return the first 2,000 characters of an error for people."""
    return None if error is None else f"{type(error).__name__}: {error}"[:2000]


class JournalFailure:
    """Says once that the journal cannot be written."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, text: str) -> None:
        """Warn of a failure, if it is the first."""
        if not self._said:
            self._said = True
            _log.warning("the run's journal cannot be written, and lines may be missing; training goes on: %s", text)


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
        self._warnings = _Warnings(self.writer)
        if self.enabled:
            _log.addFilter(self._warnings)

    @property
    @abstractmethod
    def _step(self) -> int:
        """Number of the last step."""

    def _add(self, kind: str, **values: Any) -> None:
        self.writer.append({"kind": kind, "at": time.time(), "step": self._step, **values})

    def _add_step(self, now_s: float, *, first_s: float | None = None, **values: Any) -> None:
        """Record the step that ended at `now_s` of `time.perf_counter`, after `first_s` if none was before it."""
        step_s = first_s if self._step_ended_s is None else now_s - self._step_ended_s
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

    def _start_record(self, run: str, *, step: int, loop: str, config: Any) -> dict[str, Any]:
        device = self._world.device
        return {
            "kind": "start",
            "version": VERSION,
            "at": self.started_at,
            "run": run,
            "step": step,
            "total_steps": self._total_steps,
            "loop": loop,
            "parameters": sum(record.numel for record in self._state.records),
            "config": config,
            "world_size": self._world.world_size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "pid_namespace": pid_namespace(),
            "versions": _versions(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        }

    def close(self) -> None:
        """Write the end; a second call does nothing."""
        if not self.enabled:
            return
        self.enabled = False
        _log.removeFilter(self._warnings)
        if self.writer.is_open:
            uncaught = _uncaught_error() if self._reason == "done" else None
            reason = "failed" if uncaught else self._reason
            self._add("end", reason=reason, problem=error_text(uncaught) or self._error)
        self.writer.close()


def _link_record(link: LinkStatistics) -> dict[str, Any] | None:
    """Return the record of a link; None if it was not used."""
    stall_s = {cause: round(seconds, 6) for cause, seconds in link.stall_s.items() if seconds > 0}
    if not link.operations and not stall_s:
        return None
    return {"bytes": link.bytes, "busy_s": round(link.busy_s, 6), "stall_s": stall_s}


class _Warnings(logging.Filter):
    """Sees the warnings of a logger on their way. Not a handler, with which nothing would be shown any more if nobody
    configured logging."""

    def __init__(self, writer: JournalWriter) -> None:
        super().__init__()
        self._writer = writer

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        if record.levelno >= logging.WARNING:
            self.note(record.getMessage(), record.created)
        return True

    def note(self, text: str, at: float) -> None:
        """Record a warning."""
        self._writer.append({"kind": "warning", "at": at, "text": text})


class SaveNotes:
    """The progress of one save, reported from any thread."""

    def __init__(self, writer: JournalWriter, base: Mapping[str, Any], when_uploaded: Callable[[], None]) -> None:
        self._writer = writer
        self._base = base
        self._when_uploaded = when_uploaded
        self._has_failed = False
        self._began = time.perf_counter()
        self.stall_s: float | None = None
        """Seconds for which the save delayed training; set when they are known."""

    def add(self, **values: Any) -> None:
        """Record a state of the save."""
        self._writer.append({**self._base, "at": time.time(), **values})

    def __call__(self, outcome: SaveSummary | BaseException) -> None:
        """Record the result, or the error; see `SaveRequest.told`."""
        if isinstance(outcome, BaseException):
            if not self._has_failed:
                self._has_failed = True
                self.add(state="failed", problem=f"{type(outcome).__name__}: {outcome}")
            return
        done = {
            # Often known only once the save was committed, when the line is written.
            "stall_s": self._stall_s,
            "elapsed_s": outcome.elapsed_s,
            "linked_bytes": outcome.all_linked_bytes,
            "written_bytes": outcome.all_written_bytes,
        }
        if outcome.url is None:
            self.add(state="committed", **done)
            return
        self.add(state="uploaded", **done | {"location": outcome.url, "uploaded_bytes": outcome.all_uploaded_bytes})
        self._when_uploaded()

    def _stall_s(self) -> float:
        """Return for how long training was delayed; so far, if it still is."""
        return time.perf_counter() - self._began if self.stall_s is None else self.stall_s
