"""Which elements `array[key]` means, and where they lie in the flat order. Pure arithmetic.

[Note: runs and groups]
A selection's elements are runs of equal length in the array's flat (C) order: everything behind the last extent that
is not taken whole is contiguous. Runs whose stored chunks touch or coincide are read in one go, a group, and cut out of
it; chunks that no run needs are not read. A group ends at a chunk's border once it has `GROUP_NUMEL` elements.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

GROUP_NUMEL = 1024 * 1024
"""Elements of a group, about; runs that are longer are read straight into the result."""
_BATCH_RUNS = 256 * 1024

Index = SupportsIndex | slice | EllipsisType | None
Key = Index | tuple[Index, ...]


@dataclass(frozen=True)
class Axis:
    """Indices `first`, `first + step`, ..., `count` of them, of an extent of `extent`; ascending."""

    extent: int
    first: int
    count: int
    step: int

    @property
    def is_whole(self) -> bool:
        """Whether every index is taken."""
        return self.count == self.extent


@dataclass(frozen=True)
class Group:
    """Runs `[low_run, high_run)`, all within flat elements `[first, stop)`; `offsets` is where each begins in those."""

    low_run: int
    high_run: int
    first: int
    stop: int
    offsets: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Selection:
    """What a key selects of an array. See [Note: runs and groups]."""

    axes: tuple[Axis, ...]
    reversed_axes: tuple[int, ...]
    """Axes that the key walks backwards: the result is turned around in them."""
    shape: tuple[int, ...]
    """Of the result, in numpy's terms: without the axes that have an index, with those that None adds."""
    is_scalar: bool
    """Whether numpy returns the one element itself, and no array."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Extents of the result before axes are dropped or added."""
        return tuple(axis.count for axis in self.axes)

    @property
    def numel(self) -> int:
        """Elements of the result."""
        return math.prod(self.counts)

    def runs(self) -> tuple[int, int]:
        """Return how many runs there are, and the elements of each."""
        depth, numel = self._outer()
        return math.prod(axis.count for axis in self.axes[:depth]), numel

    def _outer(self) -> tuple[int, int]:
        """Return how many leading axes number the runs, and the elements of a run."""
        strides = _strides(self.axes)
        for i in reversed(range(len(self.axes))):
            axis = self.axes[i]
            if not axis.is_whole:
                return (i, axis.count * strides[i]) if axis.step == 1 or axis.count == 1 else (i + 1, strides[i])
        return 0, math.prod(axis.extent for axis in self.axes)

    def starts(self, low_run: int, high_run: int) -> npt.NDArray[np.int64]:
        """Return the flat index at which each of these runs begins, ascending."""
        depth, _ = self._outer()
        strides = _strides(self.axes)
        # Axes inside a run shift all runs alike; where there are no outer axes there is one run.
        base = sum(axis.first * stride for axis, stride in zip(self.axes[depth:], strides[depth:], strict=True))
        starts = np.full(high_run - low_run, base, np.int64)
        left = np.arange(low_run, high_run, dtype=np.int64)
        for axis, stride in zip(reversed(self.axes[:depth]), reversed(strides[:depth]), strict=True):
            left, index = np.divmod(left, axis.count)
            starts += (axis.first + index * axis.step) * stride
        return starts

    def groups(self, chunk_numel: int) -> Iterator[Group]:
        """Yield what is read in one go, where chunks have `chunk_numel` elements."""
        num_runs, numel = self.runs()
        if numel == 0:
            return
        most_chunks = max(1, GROUP_NUMEL // chunk_numel)
        for batch in range(0, num_runs, _BATCH_RUNS):
            starts = self.starts(batch, min(batch + _BATCH_RUNS, num_runs))
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
    """Return what `key` selects of an array of `shape`, as numpy's basic indexing has it.

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
            axes.append(Axis(extent, _position(item, extent, len(axes)), 1, 1))
    return Selection(tuple(axes), tuple(reversed_axes), tuple(result), not result and not num_dots)


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


def _strides(axes: tuple[Axis, ...]) -> list[int]:
    strides = [1] * len(axes)
    for i in range(len(axes) - 2, -1, -1):
        strides[i] = strides[i + 1] * axes[i + 1].extent
    return strides
