"""The elements of `array[key]`, and their places in the flat order. Pure arithmetic.

[Note: runs and groups]
A selection's elements are runs of equal length in the array's flat (C) order (see [Note: runs]). Runs whose stored
chunks touch or coincide are read together, as a group, and cut out of it; chunks that no run needs are not read. A group
ends at a chunk's border once it has `GROUP_NUMEL` elements.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from .boxes import Axis, BoxRuns

GROUP_NUMEL = 1024 * 1024
"""Elements of a group, about; runs that are longer are read straight into the result."""
_BATCH_RUNS = 256 * 1024

Index = SupportsIndex | slice | EllipsisType | None
Key = Index | tuple[Index, ...]


@dataclass(frozen=True)
class Group:
    """Runs `[low_run, high_run)`, all within flat elements `[first, stop)`; `offsets` has the start of each among those."""

    low_run: int
    high_run: int
    first: int
    stop: int
    offsets: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Selection:
    """The elements of an array that a key selects. See [Note: runs and groups]."""

    runs: BoxRuns
    """Its elements in the flat order."""
    reversed_axes: tuple[int, ...]
    """Axes that the key walks backwards: the result is reversed along them."""
    shape: tuple[int, ...]
    """Shape of the result, as numpy's: without the axes that have an index, with those that None adds."""
    is_scalar: bool
    """Whether numpy returns the one element itself, and no array."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Extents of the result before axes are dropped or added."""
        return tuple(axis.count for axis in self.runs.axes)

    def groups(self, chunk_numel: int) -> Iterator[Group]:
        """Yield the groups to read, for chunks of `chunk_numel` elements."""
        num_runs, numel = self.runs.count, self.runs.numel
        most_chunks = max(1, GROUP_NUMEL // chunk_numel)
        for batch in range(0, num_runs, _BATCH_RUNS):
            starts = self.runs.starts(batch, min(batch + _BATCH_RUNS, num_runs))
            first_chunks, last_chunks = starts // chunk_numel, (starts + numel - 1) // chunk_numel
            gaps = np.flatnonzero(first_chunks[1:] > last_chunks[:-1] + 1) + 1
            low = 0
            for end in [*gaps.tolist(), starts.size]:
                while low < end:
                    limit = first_chunks[low] + most_chunks
                    high = low + max(1, int(np.searchsorted(first_chunks[low:end], limit)))
                    first, stop = int(starts[low]), int(starts[high - 1]) + numel
                    yield Group(batch + low, batch + high, first, stop, starts[low:high] - first)
                    low = high


def select(key: Any, shape: tuple[int, ...]) -> Selection:
    """Return the selection of `key` in an array of `shape`, as numpy's basic indexing has it.

    Whole numbers, slices with any step, `...` and None, or a tuple of them. Raises IndexError for an index out of range
    and for everything else, as lists and masks.
    """
    items = list(key) if isinstance(key, tuple) else [key]
    num_given = sum(item is not None and item is not Ellipsis for item in items)
    num_dots = sum(item is Ellipsis for item in items)
    if num_given > len(shape):
        raise IndexError(f"{num_given} indices for an array with {len(shape)} extents, {shape}")
    if num_dots > 1:
        raise IndexError("an index has at most one `...`")
    if not num_dots:
        items.append(Ellipsis)
    where = next(i for i, item in enumerate(items) if item is Ellipsis)
    items[where : where + 1] = [slice(None)] * (len(shape) - num_given)
    axes: list[Axis] = []
    reversed_axes: list[int] = []
    result: list[int] = []
    for item in items:
        if item is None:
            result.append(1)
            continue
        extent = shape[len(axes)]
        if isinstance(item, slice):
            walk = range(*item.indices(extent))
            if walk.step < 0 and len(walk) > 1:
                reversed_axes.append(len(axes))
                walk = walk[::-1]
            result.append(len(walk))
            axes.append(Axis(extent, walk.start if walk else 0, len(walk), walk.step if len(walk) > 1 else 1))
        else:
            axes.append(Axis(extent, _position(item, extent, len(axes)), 1))
    return Selection(BoxRuns(tuple(axes)), tuple(reversed_axes), tuple(result), not result and not num_dots)


def _position(item: Any, extent: int, axis: int) -> int:
    try:
        if isinstance(item, bool | np.bool_):
            raise TypeError
        index = operator.index(item)
    except TypeError:
        raise IndexError(
            f"expected whole numbers, slices, `...` or None as index, got a {type(item).__name__}: read what is around it, "
            "as `array[first:stop]`, and index the result"
        ) from None
    if not -extent <= index < extent:
        raise IndexError(f"index {index} is out of bounds for axis {axis} with extent {extent}")
    return index + extent if index < 0 else index
