"""Between torch and numpy: data type names and views without copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np
import torch

from zstore.errors import UsageError
from zstore.format.arrays import numpy_dtype

if TYPE_CHECKING:
    from typing_extensions import Buffer

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Name of a precision in a config -> torch data type."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the Zarr name of a torch data type. Raises UsageError for one that the format does not store."""
    name = str(dtype).removeprefix("torch.")
    try:
        numpy_dtype(name)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return name


def as_torch(view: Any) -> torch.Tensor:
    """Return a numpy array (bfloat16 of ml_dtypes too) or torch tensor as a torch tensor over the same memory."""
    if isinstance(view, torch.Tensor):
        return view
    if view.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(view.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(view)


def as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a contiguous CPU tensor as a numpy array over the same memory, bfloat16 as ml_dtypes has it."""
    flat = tensor.detach()
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: np.ndarray[Any, np.dtype[Any]] = flat.numpy()
    return array


def as_bytes(tensor: torch.Tensor) -> Buffer:
    """Return a contiguous CPU tensor of at least one extent as bytes over the same memory."""
    return cast("Buffer", tensor.detach().view(torch.uint8).numpy())


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with the floating tensors in it cast, also those in lists, tuples and dicts; the rest as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast_floating(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floating(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(cast_floating(item, dtype) for item in value)
    return value
