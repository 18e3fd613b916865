"""Memory of the process: what the C library keeps of freed memory, and huge pages."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

HUGE_PAGE_BYTES = 2 * 1024 * 1024
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BLOCK_BYTES = 1024 * 1024


@cache
def map_large_blocks() -> None:
    """Let the C library give each block of a MiB or more back to the system when it is freed, once for the process.

    By itself glibc keeps blocks up to 32 MiB for later as soon as one was freed, for each thread. Blocks that one thread
    makes and another frees, such as gradients, then take half as much memory again as is ever in use.
    """
    mallopt = _c_function("mallopt", ctypes.c_int, ctypes.c_int)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BLOCK_BYTES)


def advise_huge_pages(address: int, nbytes: int) -> None:
    """Ask for huge pages in host memory, if it is large: filling new memory takes a tenth then."""
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    stop = (address + nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    madvise = _c_function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if nbytes >= 2 * HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE") and madvise is not None:
        madvise(first, stop - first, mmap.MADV_HUGEPAGE)  # a refusal leaves ordinary pages, which serve


def return_free_memory() -> None:
    """Give memory that was freed back to the system: the C library keeps freed blocks between others."""
    trim = _c_function("malloc_trim", ctypes.c_size_t)
    if trim is not None:
        trim(0)


@cache
def _c_function(name: str, *arguments: Any) -> Any:
    """Return a function of the C library; None if it has none."""
    found = getattr(ctypes.CDLL(None), name, None)
    if found is not None:
        found.argtypes = arguments
    return found
