"""Time by phase, which the engine counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    @contextmanager
    def timing(self, phase: str, wait: Callable[[], object] | None) -> Iterator[None]:
        """Add the block's seconds to those of a phase, by its field's name; `wait` is called at both ends, to wait for the
        device."""
        if wait is not None:
            wait()
        start = time.perf_counter()
        try:
            yield
            if wait is not None:
                wait()
        finally:
            setattr(self, phase, getattr(self, phase) + time.perf_counter() - start)

    def __sub__(self, other: PhaseTimes) -> PhaseTimes:
        return PhaseTimes(
            forward_s=self.forward_s - other.forward_s,
            backward_s=self.backward_s - other.backward_s,
            optimizer_s=self.optimizer_s - other.optimizer_s,
        )
