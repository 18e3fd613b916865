"""The engine's optimizer and schedule as a loop of Accelerate sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

from zstore.engine.api.engine import Engine
from zstore.errors import UsageError


class EngineOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Takes the engine's step when the loop calls `step()` with gradients to apply.

    Its parameter groups are those of the prepared optimizer: a scheduler on either changes both. `zero_grad()`
    forgets the gradients of an accumulation that no `step()` ended.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False, scaler=None)
        self.engine = engine

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Take the step, except within an accumulation. Raises UsageError for a `closure`."""
        if closure is not None:
            raise UsageError("optimizer.step(closure): the engine has run forward and backward by then; call step()")
        if self.gradient_state.sync_gradients:
            self.engine.set_gradient_accumulation_boundary(True)
            self.engine.step()
            self._is_overflow = not self.engine.was_step_applied()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget gradients that no step took, except within an accumulation."""
        if self.gradient_state.sync_gradients:
            self.forget()

    def forget(self) -> None:
        """Forget gradients that no step took; after a step there are none."""
        training = self.engine.training_state
        if not training.accumulation.is_new:
            training.pending.abandon()
            training.restart_accumulation()

    def load_state_dict(self, state_dict: Any) -> None:
        """Raise UsageError: the state is in the engine's store, and loaded by it."""
        raise UsageError("optimizer.load_state_dict(): load the whole state with accelerator.load_state() instead")


class EngineScheduler(AcceleratedScheduler):  # type: ignore[misc]
    """The schedule of the config, which the engine advances: `step()` does nothing more."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.lr_scheduler, [])
        self._engine = engine
        self._shown = engine.get_lr()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Show the learning rates of the next step from here on."""
        self._shown = self._engine.get_lr()

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the last step, or of the next one once `step()` was called."""
        return list(self._shown)

    def get_lr(self) -> list[float]:
        """Return the same as `get_last_lr`."""
        return self.get_last_lr()
