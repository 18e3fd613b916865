"""The profile of one step (`flops_profiler`)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ...config.extra import Extra
from ...training.training import Training
from .profiler import FlopsProfiler, write_text
from .section import FlopsProfilerSection

_PARTS = {"forward_s": "forward", "backward_s": "backward", "optimizer_s": "step"}

_log = logging.getLogger("zstore")


class StepProfile(Extra):
    """Profiles the first micro-batch of the step that the config names, on rank 0."""

    def __init__(self, engine: Any, section: FlopsProfilerSection) -> None:
        self._training: Training = engine.training_state
        self._section = section
        self._is_ahead = self._training.world.rank == 0
        self._profiler: FlopsProfiler | None = None
        self._seen: set[str] = set()
        """Parts of the profiled micro-batch that ended."""

    def around(self, phase: str, timed: AbstractContextManager[None]) -> AbstractContextManager[None]:
        return self._around(_PARTS[phase], timed) if self._is_ahead else timed

    @contextmanager
    def _around(self, part: str, timed: AbstractContextManager[None]) -> Iterator[None]:
        is_new = self._training.accumulation.is_new
        if part == "forward" and torch.is_grad_enabled():
            if not is_new:  # after a backward that the engine did not start
                self._seen |= {"forward", "backward"}
            elif self._profiler is None and self._training.counters.global_steps == self._section.profile_step:
                self._begin()
        profiler = None if part in self._seen else self._profiler
        with nullcontext() if profiler is None else profiler.around(part), timed:
            yield
        if part == "backward":
            self._seen |= {"forward", "backward"}

    def _begin(self) -> None:
        training = self._training
        self._seen = set()
        self._profiler = FlopsProfiler(training.model, None, self._section.recompute_fwd_factor)
        self._profiler.world_size = training.world.world_size
        self._profiler.micro_batch_size = training.accumulation.batch.micro_batch_size

    def step_ended(self) -> None:
        """Report the profile of the step, if it is the one to profile."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            self._is_ahead, section = False, self._section
            text = profiler.text(section.profile_step, section.module_depth, detailed=section.detailed)
            write_text(text, section.output_file, lambda found: _log.info("flops_profiler:\n%s", found))
