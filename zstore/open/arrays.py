"""A rank's part of arrays, in the shards of a store, and in memory ahead of their use: the work of its threads, one after the
other for each array."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ..checkpoint.source import ArraySource
from ..errors import UsageError
from ..format.arrays import Array, numpy_dtype
from ..io.buffers import Budget
from ..io.queue import Ticket
from ..store import TensorStore
from ..store.store import TierName
from ..store.tiers.views import copy_into
from .ranks import HeldArray
from .values import copy_view


class HeldArrays:
    """Makes, moves and removes the arrays of `shards`, and copies their elements, flat, in the calling thread.

    Nobody else makes or removes arrays; two threads never use one array at once. `wait` waits for pins that will be released
    without the caller.
    """

    def __init__(self, shards: TensorStore) -> None:
        self._shards = shards

    def put(
        self, held: HeldArray, fill: Callable[[HeldArray], None], tier: TierName | None, wait: Callable[[], None]
    ) -> None:
        """Let `fill` set all values of an array, made unless an equal one exists. A failure leaves no new one."""
        is_new = self._make(held, tier, wait)
        try:
            fill(held)
        except BaseException:
            if is_new:
                self.remove(held.spec.name, wait)
            raise

    def _make(self, held: HeldArray, tier: TierName | None, wait: Callable[[], None]) -> bool:
        """Make an array, unless an equal one exists; return whether it is new."""
        shards, name = self._shards, held.spec.name
        former: Any = shards.tier_of(name) if name in shards else None
        if former is not None:
            if self.has(held) and tier in (None, former):
                return False
            _unpinned(partial(shards.remove, name), wait)
        usual: Any = "disk" if shards.options.all_paths else "host"
        shards.create(held.spec, grid=held.grid, shard=held.shard, tier=tier or former or usual)
        return True

    def has(self, held: HeldArray) -> bool:
        """Return whether an array as described by `held` exists."""
        return held.spec.name in self._shards and self._shards.local(held.spec.name) == held.local

    def _require(self, held: HeldArray) -> None:
        if not self.has(held):
            raise UsageError(f"array {held.spec.name!r} is not what was put last, for that failed: put it again")

    def read(self, held: HeldArray, first: int, stop: int, target: Array | None) -> Array:
        """Read elements `[first, stop)` of the held part into `target`, or new memory."""
        self._require(held)
        if first == stop:
            return np.empty(0, numpy_dtype(held.spec.dtype)) if target is None else target
        return self._shards.reading(held.spec.name, first, stop, target)()

    def write(self, data: Array, first: int, held: HeldArray) -> None:
        """Replace the elements from `first` on."""
        self._require(held)
        if data.size:
            self._shards.writing(held.spec.name, data, first)()

    def load(self, source: ArraySource, held: HeldArray) -> None:
        """Replace all values by those of a checkpoint: link its file, if the array on disk is laid out alike, else read."""
        self._require(held)
        name, stored, shards = held.spec.name, source.array(held.spec.name), self._shards
        if not held.numel:
            return
        if shards.tier_of(name) == "disk" and (stored.grid, stored.spec.dtype) == (held.grid, held.spec.dtype):
            path, crcs = source.file_of(name, held.shard), source.shard_crcs(name, held.shard)
            if path is not None and crcs is not None and shards.adopt(name, path, crcs):
                return
        base, dtype = held.require(0, 0), numpy_dtype(held.spec.dtype)
        with contextlib.closing(shards.stream([[name]], "fill")) as tiles:
            for tile in tiles:
                values = np.empty(tile.stop - tile.first, dtype)
                source.read(name, base + tile.first, base + tile.stop, values)
                copy_into(tile.views[0], values)

    def remove(self, name: str, wait: Callable[[], None]) -> None:
        """Forget an array, if it is there."""
        if name in self._shards:
            _unpinned(partial(self._shards.remove, name), wait)

    def move(self, name: str, tier: TierName, wait: Callable[[], None]) -> None:
        """Move an array to another tier."""
        _unpinned(partial(self._shards.move, name, tier, copy_view), wait)


class Ahead:
    """Whole arrays in memory that `budget` counts, or on their way there. For one thread at a time."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._coming: dict[str, tuple[Ticket[Array], int]] = {}

    def begin(self, wanted: Mapping[str, int], read: Callable[[str], Ticket[Array]]) -> list[Ticket[Array]]:
        """Begin to read arrays of so many bytes that are not read ahead already; return the tickets of all.

        Raises BudgetError if there is no room for all of them: then none is read.
        """
        new = {name: nbytes for name, nbytes in wanted.items() if name not in self._coming}
        self._budget.require(sum(new.values()), "what is read ahead")
        for name, nbytes in new.items():
            self._budget.take(nbytes)
            self._coming[name] = read(name), nbytes
        return [self._coming[name][0] for name in wanted]

    def take(self, name: str) -> Ticket[Array] | None:
        """Return the elements of an array that was read ahead, the caller's from now on; None if it was not."""
        if name not in self._coming:
            return None
        ticket, nbytes = self._coming.pop(name)
        ticket.when_done(partial(self._budget.release, nbytes))
        return ticket


def _unpinned(operation: Callable[[], None], wait: Callable[[], None]) -> None:
    try:
        operation()
    except UsageError:  # it is pinned
        wait()
        operation()
