"""The trained parameters of a DeepSpeed checkpoint, and the places of their elements in the ranks' flat tensors.

[Note: flat tensors]
At stages 1 and 2 a parameter group is one long vector, cut into as many parts as there are ranks: a tensor is a range of
it, and may be in several parts (`Joined`). At stage 3 each tensor is cut by itself, its last part padded, and each rank's
parts of a group of tensors follow each other (`Striped`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ...format.arrays import Bytes
from ...io.files import Files
from ..torchfile import TorchTensor


@dataclass(frozen=True)
class MemoryPart:
    """Elements in memory."""

    values: npt.NDArray[Any]
    dtype: str

    @property
    def numel(self) -> int:
        """Elements."""
        return self.values.size

    def read(self, files: Files, first: int, stop: int, out: Bytes) -> None:
        """Read elements `[first, stop)` into `out`, as `TorchTensor.read` does."""
        out[:] = self.values.reshape(-1)[first:stop].view(np.uint8)


Part = TorchTensor | MemoryPart
"""A flat tensor that holds a part of others."""


class Vector:
    """The concatenation of `parts`, all of one type."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.starts = [0, *accumulate(part.numel for part in parts)]
        """Elements before each part, and all of them."""

    @property
    def numel(self) -> int:
        """Elements."""
        return self.starts[-1]


@dataclass(frozen=True)
class Joined:
    """A range of a vector, from its element `start` on."""

    vector: Vector
    start: int = 0

    @property
    def dtype(self) -> str:
        """Type of the elements, as Zarr names it."""
        return self.vector.parts[0].dtype

    def pieces(self, first: int, stop: int) -> Iterator[tuple[Part, int, int]]:
        """Yield the part, and the range in it, of each piece of flat elements `[first, stop)`, in order."""
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

    @property
    def dtype(self) -> str:
        """Type of the elements, as Zarr names it."""
        return self.parts[0].dtype

    def pieces(self, first: int, stop: int) -> Iterator[tuple[Part, int, int]]:
        position = first
        while position < stop:
            rank, inside = divmod(position, self.part_numel)
            count = min(stop - position, self.part_numel - inside)
            yield self.parts[rank], self.start + inside, self.start + inside + count
            position += count


Elements = Joined | Striped
"""The elements of one global tensor."""


def whole(part: Part) -> Joined:
    """Return the elements of a tensor that is one part."""
    return Joined(Vector([part]))


MASTER = "fp32"
"""The master among a parameter's states; the others are the optimizer's slots, by their names."""

Shapes = dict[str, tuple[int, ...]]


@dataclass
class TrainedParameter:
    """One parameter that the optimizer updates."""

    shape: tuple[int, ...]
    states: dict[str, Elements]
    """The master and each slot."""
    scalars: dict[str, float]


@dataclass
class States:
    """The content of the optimizer's files."""

    stage: int
    world_size: int
    parameters: dict[str, TrainedParameter] = field(default_factory=dict)
    groups: list[Mapping[Any, Any]] = field(default_factory=list)
    """The optimizer's parameter groups: their settings."""
    scaler: Any = None
    """The loss scaler, an object or a dict."""
    num_offloaded: int = 0
    """Flat tensors that were on NVMe."""
    notes: list[str] = field(default_factory=list)
