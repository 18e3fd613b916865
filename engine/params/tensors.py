"""Between torch and numpy: data type names and views without copies."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
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


_HUGE_PAGE_BYTES = 2 * 1024 * 1024


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for huge pages where the tensor's storage is large and on the CPU: filling new memory takes a tenth then."""
    storage = tensor.untyped_storage()
    if storage.device.type != "cpu" or storage.nbytes() < 2 * _HUGE_PAGE_BYTES:
        return
    first = -(-storage.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    stop = (storage.data_ptr() + storage.nbytes()) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    madvise = _madvise()
    if madvise is not None and stop > first:
        madvise(first, stop - first, mmap.MADV_HUGEPAGE)  # a refusal leaves ordinary pages, which serve


@cache
def _madvise() -> Any:
    """Return the C library's madvise; None where there is none or the system has no huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    found = ctypes.CDLL(None, use_errno=True).madvise
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found


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


def return_free_memory() -> None:
    """Give memory that was freed back to the system: the C library keeps what lies between other blocks."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BLOCK_BYTES = 1024 * 1024


@cache
def map_large_blocks() -> None:
    """Let the C library give each block of a MiB or more back to the system when it is freed, once for the process.

    By itself glibc keeps blocks up to 32 MiB for later as soon as one was freed. Gradients, which one thread makes and
    another frees, then take half as much memory again as is ever in use.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BLOCK_BYTES)


@cache
def _malloc_trim() -> Any:
    """Return the C library's malloc_trim; None where it has none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
