"""Whole arrays in the shards of a store: what its threads do, one after the other for each array."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import UsageError
from ..format.arrays import Array, ArraySpec, numpy_dtype
from ..format.partition import make_grid
from ..store import TensorStore
from ..store.store import TierName
from .values import copy_view


class WholeArrays:
    """Makes, moves and removes the arrays of `shards`, and moves their elements, flat, in the calling thread.

    Nobody else changes which arrays there are. `wait_for_pins` returns once pins that will be released by themselves are.
    """

    def __init__(self, shards: TensorStore, wait_for_pins: Callable[[], None]) -> None:
        self._shards = shards
        self._wait_for_pins = wait_for_pins
        self._lock = threading.Lock()
        """Held while arrays come, go and move."""

    def make(self, spec: ArraySpec, tier: TierName | None) -> None:
        """Make an array, or take the one that is there if it is alike."""
        shards, name = self._shards, spec.name
        with self._lock:
            former: Any = shards.tier_of(name) if name in shards.names() else None
            if former is not None:
                if shards.spec(name) == spec and tier in (None, former):
                    return
                self._remove(name)
            usual: Any = "disk" if shards.options.all_paths else "host"
            shards.create(spec, grid=make_grid(spec.stored_shape, 1, 1), shard=0, tier=tier or former or usual)

    def read(self, spec: ArraySpec, first: int, stop: int, target: Array | None) -> Array:
        """Read elements `[first, stop)` into `target`, or new memory."""
        if first == stop:
            return np.empty(0, numpy_dtype(spec.dtype)) if target is None else target
        return self._shards.read(spec.name, first, stop, target).wait()

    def write(self, name: str, first: int, data: Array) -> None:
        """Replace the elements from `first` on."""
        if data.size:
            self._shards.write(name, data, first).wait()

    def remove(self, name: str) -> None:
        """Forget an array, if it is there."""
        with self._lock:
            if name in self._shards.names():
                self._remove(name)

    def _remove(self, name: str) -> None:
        try:
            self._shards.remove(name)
        except UsageError:  # it is pinned
            self._wait_for_pins()
            self._shards.remove(name)

    def move(self, name: str, tier: TierName) -> None:
        """Let an array rest on another tier."""
        with self._lock:
            self._shards.move(name, tier, copy_view)
