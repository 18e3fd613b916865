"""Python's collector of reference cycles, held still while an engine trains (`disable_python_gc`).

A collection walks over every object of the process at a moment of its own choosing; with many ranks, all wait for the
one that collects. The engine's own steps leave no cycles behind. A loop that does calls `gc.collect()` where it suits.
"""

from __future__ import annotations

import gc
import os
import threading


class _Holders:
    """How many engines of this process hold the collector still, and what it was before the first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.was_enabled = False

    def start_anew(self) -> None:
        """Give a forked child, as a worker of a data loader is, a collector that works."""
        if self.count and self.was_enabled:
            gc.enable()
        self.__init__()  # type: ignore[misc]


_holders = _Holders()
os.register_at_fork(after_in_child=_holders.start_anew)


class CollectorPause:
    """Holds the collector still until `end`, or until the last of several pauses ended."""

    def __init__(self) -> None:
        self._ended = False
        with _holders.lock:
            if _holders.count == 0:
                _holders.was_enabled = gc.isenabled()
                gc.disable()
            _holders.count += 1

    def end(self) -> None:
        """Let the collector be as it was before; a second call does nothing."""
        with _holders.lock:
            if self._ended:
                return
            self._ended = True
            _holders.count -= 1
            if _holders.count == 0 and _holders.was_enabled:
                gc.enable()
