"""Between torch and the format: names of data types, and a tensor's bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import torch

from zstore.errors import UsageError
from zstore.format.arrays import Bytes, numpy_dtype

if TYPE_CHECKING:
    from typing import Any


def dtype_name(key: str, dtype: torch.dtype) -> str:
    """Return the format's name of the data type of entry `key`. Raises UsageError for one that is not stored."""
    name = str(dtype).removeprefix("torch.")
    try:
        numpy_dtype(name)
    except ValueError as error:
        raise UsageError(f"{key!r}: {error}; cast it, or leave it out") from None
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's data type of that name of the format."""
    return cast("torch.dtype", getattr(torch, name))


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the tensor's bytes in C order: over its memory where that is contiguous and the CPU's, else a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data: npt.NDArray[Any] = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return data
