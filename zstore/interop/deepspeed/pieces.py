"""The trained parameters of a DeepSpeed checkpoint, and the places of their elements in the ranks' flat tensors.

[Note: flat tensors]
At stages 1 and 2 a parameter group is one long vector, cut into as many parts as there are ranks: a tensor is a range of
it, and may be in several parts. At stage 3 each tensor is cut by itself, its last part padded, and each rank's parts of a
group of tensors follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Elements:
    """The elements of one global tensor in `parts`, all of one type. See [Note: flat tensors]."""

    parts: Sequence[Part]
    start: int = 0
    """Of a range of the concatenation of all parts its first element; of a tensor that is cut, the first one in each part."""
    cut: int | None = None
    """How many elements of each part a tensor has that is cut by itself, padding included."""

    @property
    def dtype(self) -> str:
        """Type of the elements, as Zarr names it."""
        return self.parts[0].dtype

    def pieces(self, first: int, stop: int) -> Iterator[tuple[Part, int, int]]:
        """Yield the part, and the range in it, of each piece of flat elements `[first, stop)`, in order."""
        begin, inside = (-self.start, 0) if self.cut is None else (0, self.start)
        for part in self.parts:
            end = begin + (part.numel if self.cut is None else self.cut)
            low, high = max(first, begin), min(stop, end)
            if low < high:
                yield part, inside + low - begin, inside + high - begin
            begin = end


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
