"""Views of any tier, and callers' values, as numpy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...errors import UsageError
from ...format.arrays import Array, ArraySpec, numpy_dtype
from .base import View

if TYPE_CHECKING:
    import torch


def as_numpy(data: Array | torch.Tensor, spec: ArraySpec) -> Array:
    """Return `data` as a 1-D numpy array of the spec's data type, without copying unless torch has its values to negate.

    Raises UsageError if that cannot be.
    """
    dtype = numpy_dtype(spec.dtype)
    if not isinstance(data, np.ndarray):
        import torch

        found = str(data.dtype).removeprefix("torch.")
        if data.device.type != "cpu" or data.dim() != 1 or not data.is_contiguous() or found != spec.dtype:
            raise UsageError(
                f"array {spec.name!r}: expected 1-D contiguous {spec.dtype} on the CPU, got {tuple(data.shape)} of "
                f"{found} on {data.device}"
            )
        from ...io.tensors import host_values

        flat = host_values(data)
        return flat.view(torch.uint8).numpy().view(dtype) if flat.numel() else np.empty(0, dtype)
    if data.ndim != 1 or not data.flags.c_contiguous or data.dtype != dtype:
        raise UsageError(f"array {spec.name!r}: expected 1-D contiguous {dtype}, got {data.shape} of {data.dtype}")
    return data


def copy_into(view: View, source: Array) -> None:
    """Copy `source`, of the view's size and data type, into a view of any tier."""
    if isinstance(view, np.ndarray):
        view[:] = source
    else:
        import torch

        # torch warns of memory that it might write to.
        writable = source if source.flags.writeable else source.copy()
        view.view(torch.uint8).copy_(torch.from_numpy(writable.view(np.uint8)))


def copy_out(view: View, out: Array) -> None:
    """Copy a view of any tier into host memory of as many bytes, of any shape; if `out` is contiguous, no other memory is
    taken."""
    target = out.view(np.uint8)
    if isinstance(view, np.ndarray):
        target[...] = view.view(np.uint8).reshape(target.shape)
        return
    import torch

    source = view.detach().view(torch.uint8)
    if source.device.type == "cpu":
        target[...] = source.numpy().reshape(target.shape)  # torch's copy would take threads of its own for it
    else:
        torch.from_numpy(target).copy_(source.view(target.shape))
