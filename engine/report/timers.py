"""Time by phase, counted with a context manager."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """Seconds spent in each phase."""

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


class Timers:
    """Times since the engine was made.

    On a device that computes behind the host, a phase is the host's time alone, unless `wait_for_device` is given: it
    is called at both ends of each phase and returns once the device is done, at the price of the overlap.
    """

    def __init__(self, wait_for_device: Callable[[], object] | None = None) -> None:
        self._wait_for_device = wait_for_device
        self._seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}

    @contextmanager
    def phase(self, name: Literal["forward", "backward", "optimizer"]) -> Iterator[None]:
        """Count a block as this phase."""
        self._settle()
        start = time.perf_counter()
        try:
            yield
            self._settle()
        finally:
            self._seconds[name] += time.perf_counter() - start

    def _settle(self) -> None:
        if self._wait_for_device is not None:
            self._wait_for_device()

    def times(self) -> PhaseTimes:
        """Return the times so far."""
        return PhaseTimes(**{f"{name}_s": seconds for name, seconds in self._seconds.items()})
