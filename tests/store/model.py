"""A perfect store: the contract of `TensorStore` in plain numpy, for tests that compare the two after every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from zstore.format.arrays import Array, ArraySpec, numpy_dtype
from zstore.format.partition import Grid


class ModelStore:
    """The contents of a rank's shards. Nothing waits, nothing fails, and every value given out is a copy."""

    def __init__(self) -> None:
        self._shards: dict[str, Array] = {}
        self._version = 0

    def create(self, spec: ArraySpec, grid: Grid, shard: int) -> None:
        """Add an array, all zeros; `shard` may have no rows."""
        first = min(shard * grid.shard_rows, grid.rows)
        stop = min(first + grid.shard_rows, grid.rows)
        self._shards[spec.name] = np.zeros((stop - first) * grid.row_numel, numpy_dtype(spec.dtype))

    def names(self) -> list[str]:
        """Return the names in the order they were created."""
        return list(self._shards)

    def numel(self, name: str) -> int:
        """Return the elements of the shard."""
        return self._shards[name].size

    def write(self, name: str, values: Array, first: int = 0) -> None:
        """Replace elements from `first` on."""
        self._shards[name][first : first + values.size] = values

    def update(self, names: Sequence[str], change: Callable[..., None]) -> None:
        """Call `change` with the shards of `names`, to be changed in place."""
        change(*(self._shards[name] for name in names))

    def read(self, name: str, first: int = 0, stop: int | None = None) -> Array:
        """Return elements `[first, stop)`."""
        return self._shards[name][first:stop].copy()

    def commit(self) -> int:
        """Return the next version's number."""
        self._version += 1
        return self._version

    def snapshot(self) -> Mapping[str, Array]:
        """Return a lasting copy of all shards' contents."""
        return {name: shard.copy() for name, shard in self._shards.items()}
