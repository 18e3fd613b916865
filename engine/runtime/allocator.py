"""Memory of the process: huge pages, and returning freed memory."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import torch

_HUGE_PAGE_BYTES = 2 * 1024 * 1024


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for huge pages if the tensor's storage is large and on the CPU: filling new memory takes a tenth then."""
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
    """Return the C library's madvise; None if there is none or the system has no huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    found = ctypes.CDLL(None, use_errno=True).madvise
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found


def return_free_memory() -> None:
    """Give memory that was freed back to the system: the C library keeps freed blocks between others."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    """Return the C library's malloc_trim; None if it has none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
