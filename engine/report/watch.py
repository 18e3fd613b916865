"""When a run's operations are counted for its utilisation: in the first micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from .operations import CAN_LEAVE_COMPILED, OperationCounter, is_compiled
from .utilisation import StepUtilisation

if TYPE_CHECKING:
    from ..training import Training


class ComputationWatch:
    """Wraps each forward, backward and update of an engine until its operations are counted; then `is_done`.

    Nothing is counted without gradients, nor on other ranks than 0. See [Note: utilisation] in `utilisation`.
    """

    def __init__(self, training: Training, utilisation: StepUtilisation) -> None:
        self._training = training
        self.utilisation = utilisation
        self._counter: OperationCounter | None = None
        self.is_done = training.world.rank != 0 or training.config.frozen or not CAN_LEAVE_COMPILED

    @contextmanager
    def around(self, phase: str, timed: AbstractContextManager[None]) -> Iterator[None]:
        """Wrap a phase, as `PhaseTimes` names it, which `timed` wraps too."""
        if phase == "forward_s" and torch.is_grad_enabled():
            if not self._training.accumulation.is_new:
                self._end()  # after a backward that the engine did not start
            self._begin()
        with nullcontext() if self._counter is None or phase == "optimizer_s" else self._counter, timed:
            yield
        if phase == "backward_s":
            self._end()

    def _begin(self) -> None:
        if not self.is_done and self._counter is None:
            training = self._training
            self.is_done = training.compiled is not None or any(map(is_compiled, training.model.modules()))
            self._counter = None if self.is_done else OperationCounter()

    def _end(self) -> None:
        counter, self._counter = self._counter, None
        if counter is not None:
            self.is_done = True
            self.utilisation.counted(counter.counted)

    def step_ended(self) -> None:
        """Note that an optimizer step ended, perhaps after a backward that the engine did not start."""
        self._end()
