"""The journal of an offloaded optimizer's run: its steps, the tier of its state, warnings. See [Note: the journal] in
`zstore.journal`."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zstore.engine.optim.state import OptimizerState
from zstore.engine.report.placement import parts_of, placed_arrays
from zstore.engine.report.records import JournalFailure, Samples, Warnings, error_text, start_record, uncaught_error
from zstore.engine.report.statistics import link_statistics
from zstore.engine.report.step import Loss, value_of
from zstore.io import LinkStatistics
from zstore.journal import journals, read
from zstore.journal.names import journal_file
from zstore.journal.writer import FileSink, JournalWriter
from zstore.ranks.world import World
from zstore.store import StoreStatistics

_log = logging.getLogger("zstore")


class OptimizerJournal:
    """Records the steps of an optimizer in `folder`, on rank 0. The first failure is a warning; training goes on."""

    def __init__(self, state: OptimizerState, kind: str, folder: Path) -> None:
        self._state = state
        self._kind = kind
        self._folder = folder
        self._world = World.current()
        self._say_failure = JournalFailure()
        self._writer = JournalWriter(self._say_failure)
        self._warnings = Warnings(self._writer)
        self._samples: Samples | None = None
        self._began_at = time.time()
        self._step_ended_s: float | None = None
        self._step = 0
        self._resumes = False
        self._loss: Any = None
        self._tokens: int | None = None
        self._total_steps: int | None = None
        self.enabled = self._world.rank == 0
        """Whether anything is written: not on other ranks, nor after `close`."""
        if self.enabled:
            _log.addFilter(self._warnings)

    def note(self, *, loss: Any = None, tokens: int | None = None, total_steps: int | None = None) -> None:
        """Note what the optimizer cannot know: the loss of the step under way, a tensor or a number; the tokens of a step over
        all ranks, until this is called again; the total steps of the run."""
        self._loss = loss
        self._tokens = self._tokens if tokens is None else tokens
        self._total_steps = self._total_steps if total_steps is None else total_steps

    def resumed(self, step: int) -> None:
        """Go on after a step of an earlier process, in its journal."""
        self._step, self._resumes = step, True

    def step_ended(self, *, began_s: float, lr: Any, grad_norm: torch.Tensor | None, skipped: bool) -> None:
        """Record a step that began at `began_s` of `time.perf_counter`."""
        if not self.enabled:
            return
        now_s = time.perf_counter()
        if self._samples is None:
            self._open()
            self._samples = Samples(self._state.store, self._world.device, self._links, self._step)
        self._step += 1
        record: dict[str, Any] = {
            "kind": "step",
            "at": time.time(),
            "step": self._step,
            "loss": _value(self._loss),
            "lr": float(lr),
            "grad_norm": None if grad_norm is None else _value(grad_norm),
            "tokens": self._tokens,
            "skipped": skipped,
            "step_s": None if self._step_ended_s is None else now_s - self._step_ended_s,
            "optimizer_s": now_s - began_s,
        }
        if now_s >= self._samples.next_s:
            record |= self._samples.take(now_s, self._step)
        self._step_ended_s, self._loss = now_s, None
        self._writer.append(record)

    def _links(self, store: StoreStatistics) -> Mapping[str, LinkStatistics]:
        return link_statistics(self._world, self._state.store, store, {})

    def _open(self) -> None:
        run = uuid.uuid4().hex
        try:
            if self._resumes and journals(self._folder):
                run = next((str(r["run"]) for r in read(self._folder) if r["kind"] == "start"), run)
            sink = FileSink(self._folder / journal_file(run))
        except (OSError, ValueError) as error:
            self._say_failure(f"{type(error).__name__}: {error}")
            return
        arrays = list(placed_arrays(self._state))
        start = start_record(
            self._world,
            at=self._began_at,
            run=run,
            step=self._step,
            total_steps=self._total_steps,
            loop="offloaded",
            parameters=sum(record.numel for record in self._state.records),
            config={"optimizer": self._kind},
        )
        plan = {
            "kind": "plan",
            "at": time.time(),
            "host_budget_bytes": self._state.store.options.host_budget_bytes,
            "device_bytes": None,
            "parts": parts_of(arrays, self._state, None),
            "arrays": arrays,
        }
        self._writer.open(sink, [start, plan])

    def close(self) -> None:
        """Record the end; a second call does nothing."""
        if not self.enabled:
            return
        self.enabled = False
        _log.removeFilter(self._warnings)
        if self._writer.is_open:
            error = uncaught_error()
            end = {"reason": "failed" if error else "done", "problem": error_text(error)}
            self._writer.append({"kind": "end", "at": time.time(), "step": self._step, **end})
        self._writer.close()


def _value(number: Any) -> Loss:
    if isinstance(number, torch.Tensor):
        return value_of(number.detach().float().reshape(()))
    return None if number is None else float(number)
