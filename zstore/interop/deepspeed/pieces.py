"""Where the elements of a global tensor lie in the ranks' flat tensors. Pure, but for reading one piece.

[Note: flat tensors]
At stages 1 and 2 a parameter group is one long vector, cut into as many parts as there are ranks: a tensor is a range of
it, and may lie in several parts (`Joined`). At stage 3 each tensor is cut by itself, its last part padded, and each rank's
parts of a group of tensors lie one behind the other (`Striped`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ...format.arrays import numpy_dtype
from ...io.files import Files

Bytes = npt.NDArray[np.uint8]


class Part(Protocol):
    """A flat tensor in a file."""

    @property
    def dtype(self) -> str:
        """Type of the elements, as Zarr names it."""

    @property
    def numel(self) -> int:
        """Elements."""

    def read(self, files: Files, first: int, stop: int, out: Bytes) -> None:
        """Read elements `[first, stop)` into `out`."""


@dataclass(frozen=True)
class RawPart:
    """Elements that fill a file from its beginning on."""

    path: Path
    dtype: str
    numel: int

    def read(self, files: Files, first: int, stop: int, out: Bytes) -> None:
        """See Part."""
        with files.opened(self.path) as file:
            files.read_into(file, out, first * numpy_dtype(self.dtype).itemsize)


@dataclass(frozen=True)
class MemoryPart:
    """Elements in memory."""

    values: npt.NDArray[Any]
    dtype: str

    @property
    def numel(self) -> int:
        """See Part."""
        return self.values.size

    def read(self, files: Files, first: int, stop: int, out: Bytes) -> None:
        """See Part."""
        out[:] = self.values.reshape(-1)[first:stop].view(np.uint8)


class Elements(Protocol):
    """The elements of one global tensor."""

    def pieces(self, first: int, stop: int) -> Iterator[tuple[Part, int, int]]:
        """Yield the part, and the range in it, of each piece of flat elements `[first, stop)`, in order."""


class Vector:
    """What `parts`, all of one type, make together."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.starts = [0, *accumulate(part.numel for part in parts)]
        """Elements before each part, and all of them."""

    @property
    def dtype(self) -> str:
        """Type of the elements."""
        return self.parts[0].dtype

    @property
    def numel(self) -> int:
        """Elements."""
        return self.starts[-1]


@dataclass(frozen=True)
class Joined:
    """A range of a vector, from its element `start` on."""

    vector: Vector
    start: int = 0

    def pieces(self, first: int, stop: int) -> Iterator[tuple[Part, int, int]]:
        """See Elements."""
        parts, starts = self.vector.parts, self.vector.starts
        position, end = self.start + first, self.start + stop
        while position < end:
            number = bisect_right(starts, position) - 1
            upto = min(end, starts[number + 1])
            yield parts[number], position - starts[number], upto - starts[number]
            position = upto


@dataclass(frozen=True)
class Striped:
    """`part_numel` elements of each part, from its element `start` on; the last part's may be padded."""

    parts: Sequence[Part]
    start: int
    part_numel: int

    def pieces(self, first: int, stop: int) -> Iterator[tuple[Part, int, int]]:
        """See Elements."""
        position = first
        while position < stop:
            rank, inside = divmod(position, self.part_numel)
            count = min(stop - position, self.part_numel - inside)
            yield self.parts[rank], self.start + inside, self.start + inside + count
            position += count
