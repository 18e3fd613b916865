"""Learning rate schedules that a config can name, with DeepSpeed's parameters and values.

The engine advances a schedule itself. A `step()` from the training loop, as plain torch loops have it, changes
nothing and is answered once with what to remove.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Literal

import torch

from zstore.errors import UsageError

_log = logging.getLogger("zstore")


class WarmupLR:
    """The learning rate climbs from `warmup_min_lr` to `warmup_max_lr` within `warmup_num_steps`, and stays there.

    After `s + 1` steps it is min + (max - min) * log(s + 1) / log(num_steps) of type "log", and s / num_steps in
    place of the quotient of type "linear"; the first step of training has `warmup_min_lr`. Source:
    deepspeed/runtime/lr_schedules.py.
    `warmup_max_lr` None: each parameter group's own learning rate.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        warmup_min_lr: float = 0.0,
        warmup_max_lr: float | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: Literal["log", "linear"] = "log",
    ) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = -1
        self._min_lr = warmup_min_lr
        self._max_lrs = [
            float(group["lr"]) if warmup_max_lr is None else warmup_max_lr for group in optimizer.param_groups
        ]
        self._num_steps = max(2, warmup_num_steps)
        self._type = warmup_type
        self._warned = False
        self._apply()

    def _apply(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_last_lr(), strict=True):
            group["lr"] = lr

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        share = self._share()
        return [self._min_lr + (most - self._min_lr) * share for most in self._max_lrs]

    def _share(self) -> float:
        step = self.last_batch_iteration
        if step < 0:
            return 0.0
        if step >= self._num_steps:
            return 1.0
        if self._type == "log":
            return 1.0 / math.log(self._num_steps) * math.log(step + 1)
        return step / self._num_steps

    def advance(self) -> None:
        """Go on by one step (the engine's call)."""
        self.last_batch_iteration += 1
        self._apply()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Change nothing: `engine.step()` advances the schedule."""
        if not self._warned:
            self._warned = True
            _log.warning("engine.step() advances the learning rate schedule; remove scheduler.step() from the loop")

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.last_batch_iteration = int(state["last_batch_iteration"])
        self._apply()


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
        if isinstance(self.scheduler, WarmupLR):
            self.scheduler.advance()
            return
        if self._position() != self._seen and not self._warned:
            self._warned = True
            _log.warning(
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
