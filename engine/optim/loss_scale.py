"""The loss scale of fp16: a fixed one, or one that follows overflows as DeepSpeed's does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from zstore.errors import NonFiniteError

from ..config.sections import Fp16Section

_RULES = ("loss_scale_window", "hysteresis", "min_loss_scale", "consecutive_hysteresis", "raise_error_at_min_scale")


@dataclass(kw_only=True)
class LossScaler:
    """Factor of the loss; `update` after every step. `settings` None: the factor is 1 and never changes.

    A dynamic scale halves at the `hysteresis`-th overflow, and from then on at every one, until the hysteresis
    is restored: as the scale doubles, or with `consecutive_hysteresis` by any step without overflow. It doubles at a
    step without overflow that has a multiple of `loss_scale_window` of them before it since the last overflow. Source of the
    rules: DeepSpeed's DynamicLossScaler (deepspeed/runtime/fp16/loss_scaler.py of 0.19).
    """

    settings: Fp16Section | None
    non_finite: Literal["error", "skip", "apply"]
    """Policy for a step whose gradients are not finite."""
    scale: float = 1.0
    hysteresis_left: int = 1
    """Overflows until the scale halves, that one included."""
    iteration: int = 0
    """Steps seen, skipped ones too."""
    last_overflow: int = -1
    """Iteration of the last overflow."""

    def __post_init__(self) -> None:
        if self.settings is not None:
            self.scale = self.settings.loss_scale or 2.0**self.settings.initial_scale_power
            self.hysteresis_left = self.settings.hysteresis

    def accepts(self, norm: float, step: int, changed: str) -> bool:
        """Return whether step number `step` is taken with gradients of this norm, else it is skipped. Raises NonFiniteError by
        the policy, which says what was `changed`."""
        if math.isfinite(norm) or self.non_finite == "apply":
            return True
        if self.non_finite == "error":
            raise NonFiniteError(
                f"step {step}: the norm of the gradients is {norm}; {changed}. "
                "Look for a loss that is NaN or infinite, or lower the learning rate; "
                '"zstore": {"non_finite_gradients": "skip"} goes on without such steps'
            )
        return False

    def update(self, overflow: bool) -> None:
        """Take note of a step. Raises NonFiniteError at an overflow with the scale at its minimum, if so set."""
        settings = self.settings
        if settings is None or settings.loss_scale:
            return
        if overflow:
            self._shrink(settings)
            self.last_overflow = self.iteration
        else:
            if settings.consecutive_hysteresis:
                self.hysteresis_left = settings.hysteresis
            stable = self.iteration - self.last_overflow - 1
            if stable > 0 and stable % settings.loss_scale_window == 0:
                self.hysteresis_left = settings.hysteresis
                self.scale *= 2
        self.iteration += 1

    def _shrink(self, settings: Fp16Section) -> None:
        if settings.hysteresis > 1 and self.hysteresis_left > 1:
            self.hysteresis_left -= 1
            return
        if self.scale == settings.min_loss_scale and settings.raise_error_at_min_scale:
            raise NonFiniteError(
                f"the gradients overflow in fp16 although the loss scale is at its minimum of {settings.min_loss_scale}: the "
                "training diverged; lower the learning rate, use bf16, or look for a loss that is NaN"
            )
        self.scale = max(self.scale / 2, settings.min_loss_scale)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "scale": self.scale,
            "hysteresis_left": self.hysteresis_left,
            "iteration": self.iteration,
            "last_overflow": self.last_overflow,
        }

    def rules(self) -> dict[str, Any] | None:
        """Return the settings by which the scale changes, for a checkpoint that other software continues from; None if it
        does not change."""
        if self.settings is None or self.settings.loss_scale:
            return None
        return {name: getattr(self.settings, name) for name in _RULES}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; a fixed scale, or none, stays as configured."""
        if self.settings is None or self.settings.loss_scale:
            return
        self.scale = float(state["scale"])
        self.hysteresis_left = int(state["hysteresis_left"])
        self.iteration = int(state["iteration"])
        self.last_overflow = int(state["last_overflow"])
