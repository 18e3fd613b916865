"""When a run is profiled: the first micro-batch for its utilisation, and one step that the config names."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from .operations import CAN_LEAVE_COMPILED, OperationCounter
from .profiler import FlopsProfiler, is_compiled, write_text
from .utilisation import StepUtilisation

if TYPE_CHECKING:
    from ...training import Training

_PARTS = {"forward_s": "forward", "backward_s": "backward", "optimizer_s": "step"}

_log = logging.getLogger("zstore")


class ComputationWatch:
    """Wraps each forward, backward and update of an engine for as long as there is something to count; then `is_done`.

    Nothing is counted without gradients, nor on other ranks than 0. See [Note: utilisation] in `utilisation`.
    """

    def __init__(self, training: Training, utilisation: StepUtilisation, *, counts: bool) -> None:
        self._training = training
        self.utilisation = utilisation
        leads = training.world.rank == 0 and not training.config.frozen
        self._section = training.config.settings.flops_profiler
        self._profiles = leads and self._section.enabled
        self._profiler: FlopsProfiler | None = None
        self._counter: OperationCounter | None = None
        self._counts = leads and counts and CAN_LEAVE_COMPILED
        self._seen: set[str] = set()
        """Parts of the profiled micro-batch that ended."""

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to count any more."""
        return not (self._counts or self._profiles)

    @contextmanager
    def around(self, part: str, timed: AbstractContextManager[None]) -> Iterator[None]:
        """Wrap a phase, as `PhaseTimes` names it, which `timed` wraps too."""
        part = _PARTS[part]
        if part == "forward" and torch.is_grad_enabled():
            if not self._training.accumulation.is_new:
                self._end_micro_batch()  # after a backward that the engine did not start
            self._begin()
        with self._counting(part), timed:
            yield
        if part == "backward":
            self._end_micro_batch()

    def _begin(self) -> None:
        if self._profiles and self._profiler is None:
            section, training = self._section, self._training
            if training.counters.global_steps == section.profile_step and training.accumulation.is_new:
                self._seen = set()
                self._profiler = FlopsProfiler(training.model, None, section.recompute_fwd_factor)
                self._profiler.world_size = training.world.world_size
                self._profiler.micro_batch_size = training.accumulation.batch.micro_batch_size
        if self._counts and self._counter is None:
            compiled = self._training.compiled is not None or any(map(is_compiled, self._training.model.modules()))
            self._counts = not compiled
            self._counter = None if compiled else OperationCounter()

    def _counting(self, part: str) -> AbstractContextManager[object]:
        if self._profiler is not None and part not in self._seen:
            return self._profiler.around(part)
        return nullcontext() if self._counter is None or part == "step" else self._counter

    def _end_micro_batch(self) -> None:
        self._end_count()
        self._seen |= {"forward", "backward"}

    def _end_count(self) -> None:
        counter, self._counter = self._counter, None
        if counter is not None:
            self._counts = False
            self.utilisation.counted(counter.counted if self._profiler is None else self._profiler.operations)

    def step_ended(self) -> None:
        """Note that an optimizer step ended; report the profile."""
        self._end_count()  # a backward that the engine did not start
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._profiles = False
        section = self._section
        text = profiler.text(section.profile_step, section.module_depth, detailed=section.detailed)
        write_text(text, section.output_file, lambda found: _log.info("flops_profiler:\n%s", found))
