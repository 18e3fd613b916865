"""Ranks that meet in a shared folder: waiting there for what another rank does."""

from __future__ import annotations

import time
from collections.abc import Callable

MOST_PAUSE_S = 0.1
"""Between two looks at the folder, once the wait has lasted for a while."""
_LEAST_PAUSE_S = 0.001


def wait_until(
    ready: Callable[[], bool],
    *,
    timeout_s: float,
    check: Callable[[], None],
    failure: Callable[[], Exception],
    pause: Callable[[float], object] = time.sleep,
    most_pause_s: float = MOST_PAUSE_S,
) -> None:
    """Return once `ready()` is true; look again after pauses that double from 1 ms to `most_pause_s`.

    `check` is called before each pause and raises where waiting has become pointless, `pause` sleeps for that many seconds
    or until something else ends it. Raises `failure()` after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = _LEAST_PAUSE_S
    while not ready():
        check()
        if time.monotonic() > deadline:
            raise failure()
        pause(pause_s)
        pause_s = min(2 * pause_s, most_pause_s)
