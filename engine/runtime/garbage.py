"""Python's collector of reference cycles, held still while an engine trains (`disable_python_gc`).

A collection walks over every object of the process at a moment of its own choosing; with many ranks, all wait for the
one that collects. The engine's own steps leave no cycles behind. A loop that does calls `gc.collect()` where it suits.
"""

from __future__ import annotations

import gc
import os
import threading


class CollectorPause:
    """Holds the collector still until `end`, or until the last of several pauses in this process ended."""

    _lock = threading.Lock()
    _count = 0
    """Pauses that have not ended."""
    _was_enabled = False
    """Whether the collector worked before the first of them."""

    def __init__(self) -> None:
        self._ended = False
        with CollectorPause._lock:
            if CollectorPause._count == 0:
                CollectorPause._was_enabled = gc.isenabled()
                gc.disable()
            CollectorPause._count += 1

    def end(self) -> None:
        """Let the collector be as it was before; a second call does nothing."""
        with CollectorPause._lock:
            if not self._ended:
                self._ended = True
                CollectorPause._count -= 1
                if CollectorPause._count == 0 and CollectorPause._was_enabled:
                    gc.enable()

    @classmethod
    def _start_anew(cls) -> None:
        """Give a forked child, as a worker of a data loader is, a collector that works."""
        if cls._count and cls._was_enabled:
            gc.enable()
        cls._lock, cls._count = threading.Lock(), 0


os.register_at_fork(after_in_child=CollectorPause._start_anew)
