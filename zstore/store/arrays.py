"""A store's arrays by name, programs' values as flat elements, and their ways between tiers and from checkpoints.

Values are tensors of torch, arrays of numpy and numbers; torch is imported only if a tensor is passed or requested.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checkpoint.layout import array_path, groups_of
from ..errors import UsageError
from ..format.arrays import Array, ArraySpec, LocalShard, make_grid, numpy_dtype
from .tiers.base import View, copy_into, copy_out

if TYPE_CHECKING:
    from torch import Tensor

Value = Any
"""A torch tensor, a numpy array, or a number."""


@dataclass(frozen=True)
class StoreArray(LocalShard):
    """An array of a store: the facts that are known at once, whatever is still under way for it."""

    is_torch: bool = False
    """Whether it was put as a tensor of torch."""

    @classmethod
    def whole(cls, spec: ArraySpec, is_torch: bool) -> StoreArray:
        """Return an array as one shard."""
        return cls(spec, make_grid(spec.stored_shape, 1), 0, is_torch)

    def flat_rows(self, rows: slice | None) -> tuple[int, int, tuple[int, ...]]:
        """Return (first, stop, shape) of the flat elements of `rows`, of all by default."""
        spec = self.spec
        if rows is None:
            return 0, spec.numel, spec.shape
        is_slice = isinstance(rows, slice)  # untyped callers may pass anything
        if not spec.shape or not is_slice or rows.step not in (None, 1):
            raise UsageError(
                f"array {spec.name!r} of shape {spec.shape}: expected rows of its first extent as a slice without a step, "
                f"got {rows!r}"
            )
        low, high, _ = rows.indices(spec.shape[0])
        high, row_numel = max(low, high), math.prod(spec.shape[1:])
        return low * row_numel, high * row_numel, (high - low, *spec.shape[1:])


class ArraysByName(dict[str, StoreArray]):
    """Arrays whose names a checkpoint can have side by side: none is in another's folder."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[str, str] = {}
        """By folder in a checkpoint."""
        self._groups: set[str] = set()
        """Folders that are or were groups."""

    def set(self, name: str, array: StoreArray | None) -> None:
        """Add, replace or, with None, remove an array."""
        if array is not None:
            self[name] = array
        elif name in self:
            del self[name]

    def __setitem__(self, name: str, array: StoreArray) -> None:
        """Add or replace an array. Raises UsageError for a name that no checkpoint can have together with others."""
        if name not in self:
            path = array_path(name)
            others = [self._names[group] for group in groups_of(path) if group in self._names]
            if path in self._groups:
                others += [other for folder, other in self._names.items() if folder.startswith(f"{path}/")]
            if others:
                raise UsageError(
                    f"array {name!r} cannot be stored beside {others[0]!r}: in a checkpoint one would be in the folder of the "
                    "other; rename one of them"
                )
            self._names[path] = name
            self._groups.update(groups_of(path))
        super().__setitem__(name, array)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self._names[array_path(name)]


def spec_of(name: str, shape: tuple[int, ...], dtype: str, dims: tuple[str, ...]) -> ArraySpec:
    """Return the spec of an array that keeps its shape. Raises UsageError if there can be none."""
    try:
        return ArraySpec(name=name, shape=shape, dtype=dtype, keeps_shape=len(shape) not in (1, 2), dims=dims)
    except ValueError as error:
        raise UsageError(str(error)) from None


def is_tensor(value: Value) -> bool:
    """Return whether `value` is a tensor of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def flatten(name: str, value: Value) -> Array:
    """Return a value's elements, 1-D, without a copy if possible."""
    if is_tensor(value):
        from ..io.tensors import as_numpy, dtype_name, host_values

        if hasattr(value, "to_local"):
            raise UsageError(
                f"array {name!r}: expected all values of a tensor, got a DTensor: `zstore.dcp.Writer` saves those of all "
                "ranks, and `tensor.to_local()` is this rank's part"
            )
        if value.is_meta or str(value.layout) != "torch.strided":
            raise UsageError(f"array {name!r}: expected dense values, got {value.layout} on {value.device}")
        dtype_name(value.dtype, name)
        return as_numpy(host_values(value)).reshape(-1)
    array = np.asarray(value)
    try:
        dtype = numpy_dtype(array.dtype.name)
    except ValueError as error:
        raise UsageError(f"array {name!r}: {error}") from None
    return np.ascontiguousarray(array, dtype).reshape(-1)


def flat_target(spec: ArraySpec, out: Value, shape: tuple[int, ...]) -> Array:
    """Return `out` as 1-D memory to read into."""
    if is_tensor(out):
        fits = out.device.type == "cpu" and out.is_contiguous() and not out.is_neg()
    else:
        fits = isinstance(out, np.ndarray) and out.flags.c_contiguous and out.flags.writeable
    flat = flatten(spec.name, out) if fits else None
    if flat is None or tuple(out.shape) != shape or flat.dtype.name != spec.dtype:
        raise UsageError(
            f"array {spec.name!r}: expected contiguous, writable {spec.dtype} of shape {shape} in host memory as `out`, got "
            f"{type(out).__name__} of {getattr(out, 'dtype', '?')} and {tuple(np.shape(out))}"
        )
    return flat


def shaped(data: Array, shape: tuple[int, ...], is_torch: bool) -> Array | Tensor:
    """Return flat elements in their shape: as numpy's, or as a tensor of torch."""
    values = data.reshape(shape)
    if not is_torch:
        return values
    from ..io.tensors import as_torch

    return as_torch(values)


def copy_view(target: View, source: View) -> None:
    """Copy between views of two tiers."""
    if isinstance(source, np.ndarray):
        copy_into(target, source)
    else:
        copy_out(source, target)
