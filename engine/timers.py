"""Time by phase, counted with a context manager."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Timers:
    """Seconds spent in each phase since the engine was made."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    """Backward, with the reduction that goes along with it."""
    optimizer_s: float = 0.0
    """`step()` at the end of an accumulation: reduction, norm, update, gathering of parameters."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Count a block as forward."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.forward_s += time.perf_counter() - start

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Count a block as backward."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.backward_s += time.perf_counter() - start

    @contextmanager
    def optimizer(self) -> Iterator[None]:
        """Count a block as optimizer step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.optimizer_s += time.perf_counter() - start
