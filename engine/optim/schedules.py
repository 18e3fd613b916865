"""The schedule of a run: one that the config names, one of torch's, or none."""

from __future__ import annotations

from typing import Any

import torch

from zstore.errors import UsageError

from ..runtime.messages import warn_once
from .lr_schedules import NamedSchedule


class Schedule:
    """Advances whichever scheduler the engine has, and keeps its state: one of ours, one of torch's, or none."""

    def __init__(self, scheduler: Any | None) -> None:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise UsageError(
                "lr_scheduler: ReduceLROnPlateau needs a metric at each step, which engine.step() does not have; leave it "
                "out of initialize() and step it in the training loop (it may be made from the returned optimizer)"
            )
        self.scheduler = scheduler
        self._seen: object = self._position()
        self._warned = False

    def _position(self) -> object:
        """Return what tells whether somebody else stepped the scheduler."""
        return getattr(self.scheduler, "last_epoch", None)

    def advance(self) -> None:
        """Go on by one step, after the optimizer's."""
        if self.scheduler is None:
            return
        if isinstance(self.scheduler, NamedSchedule):
            self.scheduler.advance()
            return
        if self._position() != self._seen and not self._warned:
            self._warned = True
            warn_once(
                "the scheduler given to initialize() was also stepped elsewhere, so it runs too fast: engine.step() steps "
                "it; remove scheduler.step() from the loop"
            )
        self.scheduler.step()
        self._seen = self._position()

    def state(self) -> dict[str, Any] | None:
        """Return what a checkpoint keeps; None where there is no scheduler."""
        state: dict[str, Any] | None = None if self.scheduler is None else self.scheduler.state_dict()
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state)
            self._seen = self._position()
