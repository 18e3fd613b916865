"""Python's collector of reference cycles while an engine trains: spared long-lived objects, or off.

A collection walks over every object of the process, those of torch, transformers and the model among them, which takes
0.2 s; with many ranks, all wait for the one that collects. So objects that exist when an engine is made are frozen until
it is closed. With `disable_python_gc` there are none: steps leave no cycles, and a loop that does calls `gc.collect()`.
"""

from __future__ import annotations

import gc
import os
import threading


class FrozenObjects:
    """Spares the collector the objects that are there now, until `end` of this engine, or until another is made.

    With several engines nothing is frozen: one that is dropped without `close()` is found by the collector alone. Nor if the
    application froze objects itself: only all can be unfrozen."""

    _lock = threading.Lock()
    _count = 0  # of engines that have not ended
    frozen_before: bool | None = None  # by the application, before its first engine

    def __init__(self) -> None:
        self._ended = False
        with FrozenObjects._lock:
            if FrozenObjects.frozen_before is None:
                FrozenObjects.frozen_before = bool(gc.get_freeze_count())
            FrozenObjects._count += 1
            if FrozenObjects._count > 1:
                self.thaw()
            elif not FrozenObjects.frozen_before:
                gc.freeze()

    def end(self) -> None:
        """Let the collector look at all objects again; a second call does nothing."""
        with FrozenObjects._lock:
            if not self._ended:
                self._ended = True
                FrozenObjects._count -= 1
                self.thaw()

    @classmethod
    def thaw(cls) -> None:
        """Unfreeze what an engine froze."""
        if cls.frozen_before is False:
            gc.unfreeze()


class CollectorPause:
    """Turns the collector off until `end`, or until the last of several pauses in this process ended."""

    _lock = threading.Lock()
    _count = 0
    """Pauses that have not ended."""
    _was_enabled = False
    """Whether the collector was on before the first of them."""

    def __init__(self) -> None:
        self._ended = False
        with CollectorPause._lock:
            if CollectorPause._count == 0:
                CollectorPause._was_enabled = gc.isenabled()
                gc.disable()
            CollectorPause._count += 1

    def end(self) -> None:
        """Restore the collector's former state; a second call does nothing."""
        with CollectorPause._lock:
            if not self._ended:
                self._ended = True
                CollectorPause._count -= 1
                if CollectorPause._count == 0 and CollectorPause._was_enabled:
                    gc.enable()

    @classmethod
    def _start_anew(cls) -> None:
        """Turn the collector on in a forked child, as a worker of a data loader."""
        if cls._count and cls._was_enabled:
            gc.enable()
        cls._lock, cls._count = threading.Lock(), 0


os.register_at_fork(after_in_child=CollectorPause._start_anew)
