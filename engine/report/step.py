"""What is known of a step: its loss, out of those of its micro-batches, and the time by phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

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


@dataclass(kw_only=True)
class PhaseTimes:
    """Seconds spent in each phase.

    On a device that computes behind the host a phase is the host's time alone, but with `wall_clock_breakdown`.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    """Backward, with the reduction that goes along with it."""
    optimizer_s: float = 0.0
    """`step()` at the end of an accumulation: reduction, norm, update, gathering of parameters."""

    def __sub__(self, other: PhaseTimes) -> PhaseTimes:
        return PhaseTimes(
            forward_s=self.forward_s - other.forward_s,
            backward_s=self.backward_s - other.backward_s,
            optimizer_s=self.optimizer_s - other.optimizer_s,
        )
