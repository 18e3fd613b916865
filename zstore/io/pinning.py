"""Host memory that is registered with CUDA, so that copies to and from the device run asynchronously."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
import weakref
from functools import partial
from typing import Any

import numpy as np

from ..format.arrays import Bytes, round_up
from .buffers import HUGE_PAGE_BYTES, make_slab
from .pool import Workers, num_cores

_MOST_THREADS = 8
_LEAST_PART_BYTES = 32 * HUGE_PAGE_BYTES
"""Of a slab whose pages one thread makes."""
_MADV_POPULATE_WRITE = 23


class PinnedSlabs:
    """Makes slabs and registers them until they are freed, or `close()`. If that is impossible, slabs are ordinary, and
    `messages` has the reason, once."""

    def __init__(self, runtime: Any = None) -> None:
        self._runtime = _cuda_runtime() if runtime is None else runtime
        self._registered: dict[int, int] = {}
        """Bytes of each slab, by address."""
        self._lock = threading.RLock()  # Python may free a slab anywhere, in here too
        self._failed = False
        self.pinned_bytes = 0
        """Bytes registered now."""
        self.messages: list[str] = []
        if self._runtime is None:
            self._give_up("there is no CUDA device")

    def make(self, nbytes: int) -> Bytes:
        """Return a slab as `make_slab` does, registered if possible."""
        slab = make_slab(nbytes)
        if self._failed or nbytes == 0:
            return slab
        _make_pages(slab)
        try:
            # Without the lock: other threads have slabs of their own.
            code = int(self._runtime.cudaHostRegister(slab.ctypes.data, slab.nbytes, 0))
        except RuntimeError as error:  # torch's binding raises if CUDA cannot be started
            self._give_up(str(error))
            return slab
        if code:
            clear_cuda_error()
            self._give_up(f"cudaHostRegister of {slab.nbytes} bytes gave error {code}")
            return slab
        with self._lock:
            _let_forks_have(slab.ctypes.data, slab.nbytes, False)
            self._registered[slab.ctypes.data] = slab.nbytes
            self.pinned_bytes += slab.nbytes
            # Before its memory: else the next memory at this address would pass for registered.
            weakref.finalize(_owner(slab), self._release, slab.ctypes.data).atexit = False
        return slab

    def _release(self, address: int) -> None:
        """Unregister a slab, once."""
        with self._lock:
            nbytes = self._registered.pop(address, None)
            if nbytes is not None:
                self._runtime.cudaHostUnregister(address)
                _let_forks_have(address, nbytes, True)
                self.pinned_bytes -= nbytes

    def _give_up(self, reason: str) -> None:
        with self._lock:
            if not self._failed:
                self.messages.append(f"host memory is not pinned, so that copies to the device may wait: {reason}")
            self._failed = True

    def close(self) -> None:
        """Unregister all slabs. No copy to or from them may be under way."""
        with self._lock:
            for address in list(self._registered):
                self._release(address)


def _make_pages(slab: Bytes) -> None:
    """Let several threads make the pages of a large slab, which is most of the time of registering it: a sixth of a second a
    gigabyte in one."""
    count = min(_MOST_THREADS, num_cores(), slab.nbytes // _LEAST_PART_BYTES)
    if count > 1:
        part = round_up(-(-slab.nbytes // count), HUGE_PAGE_BYTES)
        places = [(first, min(part, slab.nbytes - first)) for first in range(0, slab.nbytes, part)]
        with Workers(count - 1, "zstore-pinning") as workers:
            workers.run([partial(_populate, slab.ctypes.data + first, nbytes) for first, nbytes in places], here=True)


def _populate(address: int, nbytes: int) -> None:
    """Make the pages of memory, if the kernel can (from Linux 5.14 on); the first write to each makes the others."""
    if sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE)


def _let_forks_have(address: int, nbytes: int, shared: bool) -> None:
    """Let processes that are forked have memory, or not: of pinned pages the kernel makes a copy for each, at once."""
    advice = getattr(mmap, "MADV_DOFORK" if shared else "MADV_DONTFORK", None)
    if advice is not None and nbytes >= HUGE_PAGE_BYTES:  # smaller slabs have pages that others use too
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)


def _owner(slab: Bytes) -> Bytes:
    """Return the array that lives as long as any view of the slab does."""
    return slab.base if isinstance(slab.base, np.ndarray) else slab


def clear_cuda_error() -> None:
    """Let CUDA forget an error that this thread's last call returned, which the next kernel's launch would raise as its own."""
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")


def _cuda_runtime() -> Any:
    """Return torch's binding of the CUDA runtime; None without a CUDA device."""
    import torch

    return torch.cuda.cudart() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
