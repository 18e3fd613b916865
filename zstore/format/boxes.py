"""Blocks of a tensor, and their runs of consecutive elements of the whole. Pure.

[Note: runs]
A box is one rank's part of a tensor that is cut along one or more dims, or one piece of it in a file. In the whole tensor, in C
order, it is a series of runs of equal length: a run has all of the dims after the last one that is cut. Cut along dim 0 it is
one run.

[Note: tiling]
Boxes tile a tensor if each element is in exactly one of them. Sizes do not prove it: overlaps may make up for gaps. So each
interval between two cuts of a dim is given a random weight, a box the product of the weights of its sides, modulo a prime, and
the boxes must weigh as much as the whole. The count of each element is then a polynomial in the weights; a count other than one
passes with a probability of dims / 2**61. One pass over the boxes, however many they are.
"""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .arrays import Bytes

_PRIME = 2**61 - 1
_BATCH_RUNS = 4096
"""Most runs whose starts are in memory at once: a box of columns may have one for every row."""


class BoxRun(NamedTuple):
    """Consecutive elements that a box shares with a range of the whole tensor."""

    at: int
    """The first flat element, of the whole tensor."""
    in_box: int
    """The first flat element, of the box."""
    numel: int


@dataclass(frozen=True)
class Box:
    """The block `[offsets, offsets + sizes)` of a tensor of `shape`. See [Note: runs]."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        dims = list(zip(self.shape, self.offsets, self.sizes, strict=True))
        if any(offset < 0 or size < 0 or offset + size > dim_size for dim_size, offset, size in dims):
            raise ValueError(
                f"a block at {self.offsets} of sizes {self.sizes} is not in a tensor of shape {self.shape}"
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that is all of a tensor."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.sizes)

    @cached_property
    def _strides(self) -> list[int]:
        """Flat elements from one index of each dim to the next."""
        return [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]

    @cached_property
    def _depth(self) -> int:
        """Number of leading dims that count the runs: those before the last one that is cut."""
        cut = [i for i, (size, dim_size) in enumerate(zip(self.sizes, self.shape, strict=True)) if size != dim_size]
        return cut[-1] if cut else 0

    @cached_property
    def run_numel(self) -> int:
        """Elements of a run."""
        return math.prod(self.sizes[self._depth :])

    @cached_property
    def num_runs(self) -> int:
        """How many runs it is; 0 if it is empty."""
        return math.prod(self.sizes[: self._depth]) if self.run_numel else 0

    def starts(self, low_run: int, high_run: int) -> npt.NDArray[np.int64]:
        """First flat elements of the runs `[low_run, high_run)` in the whole tensor, ascending."""
        # Dims inside a run shift all runs alike.
        first = sum(offset * stride for offset, stride in zip(self.offsets, self._strides, strict=True))
        starts = np.full(high_run - low_run, first, np.int64)
        number = np.arange(low_run, high_run, dtype=np.int64)
        for dim in reversed(range(self._depth)):
            number, index = np.divmod(number, self.sizes[dim])
            starts += index * self._strides[dim]
        return starts

    def _num_runs_before(self, element: int) -> int:
        """Return how many runs begin before flat element `element` of the whole tensor."""
        count, runs_per_index, remainder = 0, self.num_runs, element
        depth = self._depth
        # The last cut dim counts as one index, the start of its part.
        for dim, stride in enumerate(self._strides[: depth + 1] if self.numel else ()):
            size = 1 if dim == depth else self.sizes[dim]
            runs_per_index //= size
            index, remainder = divmod(remainder, stride)
            inside = index - self.offsets[dim]
            if not 0 <= inside < size:
                return count + (0 if inside < 0 else size * runs_per_index)
            count += inside * runs_per_index
        return count + runs_per_index if remainder > 0 else count

    def overlap(self, first: int, stop: int) -> Iterator[BoxRun]:
        """Yield its runs within the flat elements `[first, stop)` of the whole tensor, in order."""
        length = self.run_numel
        low_run, high_run = max(0, self._num_runs_before(first + 1) - 1), self._num_runs_before(stop)
        for batch in range(low_run, high_run, _BATCH_RUNS):
            starts = self.starts(batch, min(batch + _BATCH_RUNS, high_run)).tolist()
            for number, start in enumerate(starts, batch):
                low, high = max(start, first), min(start + length, stop)
                if low < high:
                    yield BoxRun(low, number * length + low - start, high - low)


def gather(box: Box, first: int, stop: int, itemsize: int, read: Callable[[int, Bytes], None], out: Bytes) -> int:
    """Fill the part of `out`, the bytes of flat elements `[first, stop)` of the whole tensor, that is in `box`.

    `read(start, part)` fills `part` with the box's own bytes from element `start` on. Returns the elements that were
    filled.
    """
    runs = list(box.overlap(first, stop))
    if not runs:
        return 0
    start, end = runs[0].in_box, runs[-1].in_box + runs[-1].numel
    if len(runs) == 1:
        read(start, out[(runs[0].at - first) * itemsize : (runs[0].at - first + end - start) * itemsize])
        return end - start
    # The box has the same order as the whole, without the gaps: one read for all.
    data = np.empty((end - start) * itemsize, np.uint8)
    read(start, data)
    for at, in_box, numel in runs:
        part = data[(in_box - start) * itemsize : (in_box - start + numel) * itemsize]
        out[(at - first) * itemsize : (at - first + numel) * itemsize] = part
    return end - start


def tiles(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Return whether each element of a tensor of `shape` is in exactly one of `boxes`. See [Note: tiling]."""
    cut_weights: list[dict[int, int]] = [defaultdict(lambda: secrets.randbelow(_PRIME)) for _ in shape]

    def weight(box: Box) -> int:
        product = 1
        for dim_weights, offset, size in zip(cut_weights, box.offsets, box.sizes, strict=True):
            product = product * (dim_weights[offset + size] - dim_weights[offset]) % _PRIME
        return product

    return (sum(map(weight, boxes)) - weight(Box.whole(shape))) % _PRIME == 0


def flat_ranges(box: Box, max_numel: int, gap_numel: int) -> list[tuple[int, int]]:
    """Return the flat ranges to read for a box: its runs, joined if they are at most `gap_numel` apart.

    A joined range has at most about `max_numel` elements.
    """
    ranges: list[tuple[int, int]] = []
    for start in box.starts(0, box.num_runs).tolist():
        stop = start + box.run_numel
        if ranges and start - ranges[-1][1] <= gap_numel and stop - ranges[-1][0] <= max_numel:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return ranges
