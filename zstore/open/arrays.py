"""Whole arrays in the shards of a store: what its threads do, one after the other for each array."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
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

    Nobody else changes which arrays there are. `wait` waits for pins that will be released by themselves.
    """

    def __init__(self, shards: TensorStore) -> None:
        self._shards = shards
        self._lock = threading.Lock()
        """Held while arrays come, go and move."""

    def put(self, spec: ArraySpec, data: Array, tier: TierName | None, wait: Callable[[], None]) -> None:
        """Make an array of all of `data`, or change the one that is there if it is alike. A failure leaves no new one."""
        is_new = self._make(spec, tier, wait)
        try:
            self.write(spec, 0, data)
        except BaseException:
            if is_new:
                self.remove(spec.name, wait)
            raise

    def _make(self, spec: ArraySpec, tier: TierName | None, wait: Callable[[], None]) -> bool:
        """Make an array, unless one that is alike is there; return whether it is new."""
        shards, name = self._shards, spec.name
        with self._lock:
            former: Any = shards.tier_of(name) if name in shards.names() else None
            if former is not None:
                if shards.spec(name) == spec and tier in (None, former):
                    return False
                _unpinned(partial(shards.remove, name), wait)
            usual: Any = "disk" if shards.options.all_paths else "host"
            shards.create(spec, grid=make_grid(spec.stored_shape, 1, 1), shard=0, tier=tier or former or usual)
            return True

    def has(self, spec: ArraySpec) -> bool:
        """Return whether there is an array as `spec` has it."""
        return spec.name in self._shards.names() and self._shards.spec(spec.name) == spec

    def _require(self, spec: ArraySpec) -> None:
        if not self.has(spec):
            raise UsageError(f"array {spec.name!r} is not what was put last, for that failed: put it again")

    def read(self, spec: ArraySpec, first: int, stop: int, target: Array | None) -> Array:
        """Read elements `[first, stop)` into `target`, or new memory."""
        self._require(spec)
        if first == stop:
            return np.empty(0, numpy_dtype(spec.dtype)) if target is None else target
        return self._shards.reading(spec.name, first, stop, target)()

    def write(self, spec: ArraySpec, first: int, data: Array) -> None:
        """Replace the elements from `first` on."""
        self._require(spec)
        if data.size:
            self._shards.writing(spec.name, data, first)()

    def remove(self, name: str, wait: Callable[[], None]) -> None:
        """Forget an array, if it is there."""
        with self._lock:
            if name in self._shards.names():
                _unpinned(partial(self._shards.remove, name), wait)

    def move(self, name: str, tier: TierName, wait: Callable[[], None]) -> None:
        """Let an array rest on another tier."""
        with self._lock:
            _unpinned(partial(self._shards.move, name, tier, copy_view), wait)


def _unpinned(operation: Callable[[], None], wait: Callable[[], None]) -> None:
    try:
        operation()
    except UsageError:  # it is pinned
        wait()
        operation()
