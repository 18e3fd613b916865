"""Torch tensors: data type names and views between torch and numpy, and casts. Imported only if torch is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np
import torch

from ..errors import UsageError
from ..format.arrays import FLOAT8, Array, Bytes, numpy_dtype

if TYPE_CHECKING:
    from typing_extensions import Buffer


def dtype_name(dtype: torch.dtype, entry: str | None = None) -> str:
    """Return the Zarr name of a torch data type. Raises UsageError, that names `entry`, for one that is not stored."""
    name = str(dtype).removeprefix("torch.")
    try:
        numpy_dtype(name)
    except ValueError as error:
        text = str(error) if entry is None else f"{entry!r}: {error}; cast it, or leave it out"
        raise UsageError(text) from None
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's data type of a Zarr name."""
    return cast("torch.dtype", getattr(torch, name))


def as_torch(view: Any) -> torch.Tensor:
    """Return a numpy array (bfloat16 of ml_dtypes too) or torch tensor as a torch tensor over the same memory."""
    if isinstance(view, torch.Tensor):
        return view
    if view.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(view.view(np.int16)).view(torch.bfloat16)
    if view.dtype.name in FLOAT8:
        return torch.from_numpy(view.view(np.uint8)).view(torch_dtype(view.dtype.name))
    return torch.from_numpy(view)


def plain_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory has its values, contiguous: the tensor itself if that is so, else a copy.

    torch keeps a negation or conjugation that is not carried out as a bit apart from the memory, which then has other values:
    `x.conj().imag`. Whatever takes a tensor's memory takes that of this.
    """
    return tensor.contiguous().resolve_conj().resolve_neg()


def host_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's `plain_memory` on the CPU, without its gradient."""
    return plain_memory(tensor.detach().cpu())


def as_numpy(tensor: torch.Tensor) -> Array:
    """Return a contiguous CPU tensor as a numpy array over the same memory, bfloat16 as ml_dtypes has it."""
    flat = tensor.detach()
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if (name := str(flat.dtype).removeprefix("torch.")) in FLOAT8:
        return flat.view(torch.uint8).numpy().view(numpy_dtype(name))
    array: Array = flat.numpy()
    return array


def as_bytes(tensor: torch.Tensor) -> Buffer:
    """Return a contiguous CPU tensor of at least one extent as bytes over the same memory."""
    return cast("Buffer", tensor.detach().view(torch.uint8).numpy())


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the tensor's bytes in C order: over its memory if that is contiguous and the CPU's, else a copy."""
    flat = host_values(tensor).reshape(-1)
    data: Bytes = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return data


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with the floating tensors in it cast, also those in lists, tuples and dicts; other values stay."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast_floating(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floating(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(cast_floating(item, dtype) for item in value)
    return value
