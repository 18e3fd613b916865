"""Precisions by their names in a config, and casts to them."""

from __future__ import annotations

from typing import Any

import torch

from zstore.tensors import torch_dtype

from ..config.config import DTYPES

PRECISIONS = {name: torch_dtype(dtype) for name, dtype in DTYPES.items()}
"""Name of a precision in a config -> torch data type."""


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
