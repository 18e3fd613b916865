"""Time by phase, which the engine counts."""

from __future__ import annotations

from dataclasses import dataclass


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
