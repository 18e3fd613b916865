"""What programs hand in and get, tensors of torch, arrays of numpy and numbers, as flat elements.

torch is imported where somebody has a tensor, or wants one.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError
from ..format.arrays import Array, ArraySpec, numpy_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from ..store.tiers.base import View

Value = Any
"""A torch tensor, a numpy array, or a number."""


def flatten(name: str, value: Value) -> tuple[Array, bool]:
    """Return a value's elements, 1-D, without a copy where that can be, and whether it is a tensor of torch."""
    is_torch = is_tensor(value)
    if is_torch:
        from ..tensors import as_numpy, dtype_name

        dtype_name(value.dtype, name)
        return as_numpy(value.detach().cpu().contiguous()).reshape(-1), True
    array = np.asarray(value)
    try:
        dtype = numpy_dtype(array.dtype.name)
    except ValueError as error:
        raise UsageError(f"array {name!r}: {error}") from None
    return np.ascontiguousarray(array, dtype).reshape(-1), False


def is_tensor(value: Value) -> bool:
    """Return whether `value` is a tensor of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def flat_rows(spec: ArraySpec, rows: slice | None) -> tuple[int, int, tuple[int, ...]]:
    """Return (first, stop, shape) of the flat elements of `rows`. Raises UsageError for what is not rows in a row."""
    if rows is None:
        return 0, spec.numel, spec.shape
    is_slice = isinstance(rows, slice)  # whatever callers without types hand in
    if not spec.shape or not is_slice or rows.step not in (None, 1):
        raise UsageError(
            f"array {spec.name!r} of shape {spec.shape}: expected rows of its first extent as a slice without a step, got "
            f"{rows!r}; `store[{spec.name!r}]` takes any of numpy's basic indices"
        )
    low, high, _ = rows.indices(spec.shape[0])
    row_numel = spec.numel // spec.shape[0] if spec.shape[0] else 0
    return low * row_numel, max(low, high) * row_numel, (max(high - low, 0), *spec.shape[1:])


def flat_target(spec: ArraySpec, out: Value, shape: tuple[int, ...]) -> Array:
    """Return `out` as 1-D memory to read into."""
    if is_tensor(out):
        fits = out.device.type == "cpu" and out.is_contiguous()
    else:
        fits = isinstance(out, np.ndarray) and out.flags.c_contiguous and out.flags.writeable
    flat = flatten(spec.name, out)[0] if fits else None
    if flat is None or tuple(out.shape) != shape or flat.dtype.name != spec.dtype:
        raise UsageError(
            f"array {spec.name!r}: expected contiguous, writable {spec.dtype} of shape {shape} in host memory as `out`, got "
            f"{type(out).__name__} of {getattr(out, 'dtype', '?')} and {tuple(np.shape(out))}"
        )
    return flat


def shaped(data: Array, shape: tuple[int, ...], is_torch: bool, device: Any) -> Array | Tensor:
    """Return flat elements in their shape: as numpy's, or as a tensor of torch, on `device` where there is one."""
    values = data.reshape(shape)
    if not is_torch:
        return values
    from ..tensors import as_torch

    tensor = as_torch(values)
    return tensor if device is None else tensor.to(device)


def spec_of(name: str, shape: tuple[int, ...], dtype: str, dims: tuple[str, ...]) -> ArraySpec:
    """Return the spec of an array that keeps its shape. Raises UsageError for what cannot be one."""
    try:
        return ArraySpec(name=name, shape=shape, dtype=dtype, keeps_shape=len(shape) not in (1, 2), dims=dims)
    except ValueError as error:
        raise UsageError(str(error)) from None


def copy_view(target: View, source: View) -> None:
    """Copy between views of two tiers."""
    if isinstance(target, np.ndarray) and isinstance(source, np.ndarray):
        target[...] = source
        return
    from ..tensors import as_torch

    as_torch(target).copy_(as_torch(source))
