"""Waiting for what another thread, process or machine does."""

import time
from collections.abc import Callable

GUARD_S = 200.0
"""A guard against hangs alone, which no machine is slow enough to meet: less than pytest's own timeout, so that a test fails
by itself and says what did not come."""


def until(ready: Callable[[], object], why: object = "") -> None:
    """Return once `ready()` is true: a wait ends by progress, not by a time. `why` is told where it never comes."""
    end = time.monotonic() + GUARD_S
    while not ready():
        assert time.monotonic() < end, why
        time.sleep(0.005)
