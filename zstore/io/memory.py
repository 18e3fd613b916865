"""Host memory: slabs in huge pages, a buffer pool within a byte budget, slabs registered with CUDA, settings of the C
library's allocator, and torch tensors over memory. torch is imported on first use."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from functools import cache, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import ml_dtypes
import numpy as np

from ..errors import BudgetError, UsageError
from ..format.arrays import FLOAT8, Array, Bytes, numpy_dtype, round_up
from .machine import Workers, num_cores

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer as BytesLike

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 * 1024 * 1024
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BLOCK_BYTES = 1024 * 1024


def make_slab(nbytes: int, *, zeroed: bool = True) -> Bytes:
    """Return `nbytes` of private memory, page aligned; from 2 MiB on, in huge pages if the system has them.

    Direct I/O into huge pages moves about twice the bytes per second of ordinary pages. The memory lives as long as the
    array or a view of it.
    """
    if nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    if nbytes < HUGE_PAGE_BYTES:
        memory = (np.zeros if zeroed else np.empty)(nbytes + PAGE_BYTES, dtype=np.uint8)
        start = -memory.ctypes.data % PAGE_BYTES
        return memory[start : start + nbytes]
    if not hasattr(mmap, "MAP_PRIVATE"):
        return np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
    region = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages: use ordinary pages
            region.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(region, dtype=np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE_BYTES
    return memory[start : start + nbytes]


class Budget:
    """A budget of `limit_bytes` of host memory (None: no limit), and the bytes in use. Usable from any thread."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int | None:
        """Bytes that are not in use; None without a limit."""
        return None if self.limit_bytes is None else self.limit_bytes - self.used_bytes

    def require(self, nbytes: int, what: str, advice: str = "") -> None:
        """Raise BudgetError unless `nbytes` are free; `what` says what needs them."""
        if self.limit_bytes is not None and self.used_bytes + nbytes > self.limit_bytes:
            raise BudgetError(
                f"{what} needs {nbytes} bytes of host memory, but {self.used_bytes} of the {self.limit_bytes} bytes of "
                f"`host_budget_bytes` are in use: raise the budget{advice}"
            )

    def take(self, nbytes: int) -> None:
        """Count `nbytes` as in use."""
        with self._lock:
            self.used_bytes += nbytes

    def release(self, nbytes: int) -> None:
        """Count `nbytes` as free again."""
        with self._lock:
            self.used_bytes -= nbytes


class Slabs:
    """Reusable slabs of `nbytes` each; created as needed for concurrent use."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free: list[Bytes] = []
        self._lock = threading.Lock()

    def acquire(self) -> Bytes:
        """Return a slab with undefined contents."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return make_slab(self._nbytes)

    def release(self, slab: Bytes) -> None:
        """Make a slab available again."""
        with self._lock:
            self._free.append(slab)


class Rooms:
    """A cache of memory from `make`: an array from `take` is reused once it and all its views and tensors have been freed.
    Usable from any thread."""

    def __init__(self, make: Callable[[int], Bytes]) -> None:
        self._make = make
        self._free: defaultdict[tuple[str, int], list[Bytes]] = defaultdict(list)
        """Memory by purpose and size."""

    def take(self, nbytes: int, what: str = "") -> Bytes:
        """Return `nbytes` of memory, undefined and page aligned; if possible, memory used for the same purpose before."""
        free = self._free[what, nbytes]
        try:
            slab = free.pop()
        except IndexError:
            slab = self._make(nbytes)
        memory = slab[:]
        weakref.finalize(memory, free.append, slab).atexit = False
        return memory


class Buffer:
    """A part of a pool: `bytes` is uint8, 1-D, page aligned. Release it with `release()` or use it in a `with` block."""

    def __init__(self, pool: Pool, data: Bytes, start: int, used_bytes: int) -> None:
        self.bytes = data
        self._pool: Pool | None = pool
        self._start = start
        self._used_bytes = used_bytes
        """Size in whole pages."""

    def release(self) -> None:
        """Return the memory to the pool; a second call does nothing. Views of it must not be used afterwards."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._release(self._start, self._used_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class Pool:
    """Allocates page-aligned buffers from one slab of `nbytes`; requests are served in order.

    An update makes one request for all its buffers, so it gets all or none, and cannot deadlock with itself. A request
    larger than the slab gets separate memory, one such request at a time, if `budget`, which includes the slab, allows it.
    `make` allocates the slab; by default `make_slab`.
    """

    def __init__(
        self, nbytes: int, *, budget: Budget | None = None, make: Callable[[int], Bytes] | None = None
    ) -> None:
        self.nbytes = max(nbytes + -nbytes % PAGE_BYTES, PAGE_BYTES)
        self._budget = budget or Budget()
        self._budget.take(self.nbytes)
        self._slab = (make or make_slab)(self.nbytes)
        self._free: list[tuple[int, int]] = [(0, self.nbytes)]  # (start, bytes), sorted, never adjacent
        self._oversized_bytes = 0
        self._lock = threading.Lock()
        self._waiting: deque[threading.Condition] = deque()
        """Waiting requests, in order; only the first is woken."""
        self.peak_bytes = 0
        self._used_bytes = 0

    def acquire(self, nbytes: int) -> Buffer:
        """Return a buffer of `nbytes`; waits until there is room.

        Raises BudgetError if it can never fit.
        """
        rounded_bytes = self._check(nbytes)
        condition = threading.Condition(self._lock)
        with self._lock:
            self._waiting.append(condition)
            try:
                while self._waiting[0] is not condition or (buffer := self._take(nbytes, rounded_bytes)) is None:
                    condition.wait()
            finally:
                self._waiting.remove(condition)
                self._wake_first()
            return buffer

    def _wake_first(self) -> None:
        if self._waiting:
            self._waiting[0].notify()

    def try_acquire(self, nbytes: int) -> Buffer | None:
        """Return a buffer of `nbytes`, or None instead of waiting."""
        rounded_bytes = self._check(nbytes)
        with self._lock:
            return None if self._waiting else self._take(nbytes, rounded_bytes)

    def _check(self, nbytes: int) -> int:
        """Return the size of a buffer in whole pages, as bytes."""
        if nbytes <= 0:
            raise UsageError(f"a buffer has at least one byte, got {nbytes}")
        rounded_bytes, free_bytes = nbytes + -nbytes % PAGE_BYTES, self._budget.free_bytes
        if rounded_bytes > self.nbytes and free_bytes is not None and rounded_bytes > free_bytes:
            raise BudgetError(
                f"one request needs a buffer of {rounded_bytes} bytes in addition to the pool of {self.nbytes}, but the "
                f"host budget leaves {self.nbytes + free_bytes} for both: raise `host_budget_bytes`"
            )
        return rounded_bytes

    def _take(self, nbytes: int, rounded_bytes: int) -> Buffer | None:
        if rounded_bytes > self.nbytes:
            if self._oversized_bytes:
                return None
            slab = make_slab(rounded_bytes)  # first: if this fails, nothing is counted
            self._oversized_bytes = rounded_bytes
            self._count_used(rounded_bytes)
            return Buffer(self, slab[:nbytes], -1, rounded_bytes)
        for i, (start, size) in enumerate(self._free):
            if size >= rounded_bytes:
                self._free[i : i + 1] = [(start + rounded_bytes, size - rounded_bytes)] if size > rounded_bytes else []
                self._count_used(rounded_bytes)
                return Buffer(self, self._slab[start : start + nbytes], start, rounded_bytes)
        return None

    def _count_used(self, nbytes: int) -> None:
        self._used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._used_bytes)

    def _release(self, start: int, size: int) -> None:
        with self._lock:
            self._used_bytes -= size
            if start < 0:
                self._oversized_bytes = 0
            else:
                self._free = _merge_adjacent([*self._free, (start, size)])
            self._wake_first()

    @property
    def used_bytes(self) -> int:
        """Bytes of buffers in use."""
        return self._used_bytes


def _merge_adjacent(extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, size in sorted(extents):
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((start, size))
    return merged


@cache
def map_large_blocks() -> None:
    """Let the C library return each block of a MiB or more to the system when it is freed, once for the process.

    By default, once a block of up to 32 MiB has been freed, glibc keeps such blocks for reuse, per thread. If one thread
    allocates blocks and another frees them, as with gradients, the process takes 50 % more memory than is ever in use.
    """
    mallopt = _c_function("mallopt", ctypes.c_int, ctypes.c_int)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _LARGE_BLOCK_BYTES)


def advise_huge_pages(address: int, nbytes: int) -> None:
    """Request huge pages for host memory, if it is large: the first write to it is then ten times as fast."""
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    stop = (address + nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    madvise = _c_function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if nbytes >= 2 * HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE") and madvise is not None:
        madvise(first, stop - first, mmap.MADV_HUGEPAGE)  # if refused, the pages stay ordinary


def return_free_memory() -> None:
    """Return freed memory to the system, which the C library otherwise keeps."""
    trim = _c_function("malloc_trim", ctypes.c_size_t)
    if trim is not None:
        trim(0)


@cache
def _c_function(name: str, *arguments: Any) -> Any:
    """Return a function of the C library, or None if it does not exist."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function.argtypes = arguments
    return function


_MAX_PIN_THREADS = 8
_MIN_PART_BYTES = 32 * HUGE_PAGE_BYTES
"""Minimum bytes per thread that populates pages of a slab."""
_MADV_POPULATE_WRITE = 23


class PinnedSlabs:
    """Allocates slabs and keeps them registered with CUDA until they are freed, or `close()`. If that is impossible, slabs
    are ordinary, and `messages` has the reason."""

    def __init__(self, runtime: Any = None) -> None:
        self._runtime = _cuda_runtime() if runtime is None else runtime
        self._registered: dict[int, int] = {}
        """Bytes of each slab, by address."""
        self._lock = threading.RLock()  # reentrant: Python may free a slab anywhere, even in these methods
        self._is_disabled = False
        self.pinned_bytes = 0
        """Bytes that are registered."""
        self.messages: list[str] = []
        if self._runtime is None:
            self._disable("there is no CUDA device")

    def make(self, nbytes: int) -> Bytes:
        """Return a slab as `make_slab` does, registered if possible."""
        slab = make_slab(nbytes)
        if self._is_disabled or nbytes == 0:
            return slab
        _populate_pages(slab)
        try:
            # Without the lock, so that threads can register slabs concurrently.
            code = int(self._runtime.cudaHostRegister(slab.ctypes.data, slab.nbytes, 0))
        except RuntimeError as error:  # torch's binding raises if CUDA cannot be started
            self._disable(str(error))
            return slab
        if code:
            clear_cuda_error()
            self._disable(f"cudaHostRegister of {slab.nbytes} bytes gave error {code}")
            return slab
        with self._lock:
            _share_with_forks(slab.ctypes.data, slab.nbytes, False)
            self._registered[slab.ctypes.data] = slab.nbytes
            self.pinned_bytes += slab.nbytes
            # Before its memory is freed: otherwise new memory at this address would count as registered.
            weakref.finalize(_memory_owner(slab), self._release, slab.ctypes.data).atexit = False
        return slab

    def _release(self, address: int) -> None:
        """Unregister a slab, once."""
        with self._lock:
            nbytes = self._registered.pop(address, None)
            if nbytes is not None:
                self._runtime.cudaHostUnregister(address)
                _share_with_forks(address, nbytes, True)
                self.pinned_bytes -= nbytes

    def _disable(self, reason: str) -> None:
        with self._lock:
            if not self._is_disabled:
                self.messages.append(f"host memory is not pinned, so copies to the device may be synchronous: {reason}")
            self._is_disabled = True

    def close(self) -> None:
        """Unregister all slabs. No copy to or from them may be running."""
        with self._lock:
            for address in list(self._registered):
                self._release(address)


def _populate_pages(slab: Bytes) -> None:
    """Populate the pages of a large slab in several threads. That takes most of the time of registering it: with one
    thread, a sixth of a second per gigabyte."""
    count = min(_MAX_PIN_THREADS, num_cores(), slab.nbytes // _MIN_PART_BYTES)
    if count > 1:
        part = round_up(-(-slab.nbytes // count), HUGE_PAGE_BYTES)
        places = [(first, min(part, slab.nbytes - first)) for first in range(0, slab.nbytes, part)]
        with Workers(count - 1, "zstore-pinning") as workers:
            workers.run(
                [partial(_populate, slab.ctypes.data + first, nbytes) for first, nbytes in places], in_caller=True
            )


def _populate(address: int, nbytes: int) -> None:
    """Populate the pages of memory, if the kernel supports it (Linux 5.14 and later); otherwise the first write does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE)


def _share_with_forks(address: int, nbytes: int, shared: bool) -> None:
    """Set whether forked processes inherit the memory: the kernel immediately copies pinned pages for each of them."""
    advice = getattr(mmap, "MADV_DOFORK" if shared else "MADV_DONTFORK", None)
    if advice is not None and nbytes >= HUGE_PAGE_BYTES:  # smaller slabs share pages with other memory
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)


def _memory_owner(slab: Bytes) -> Bytes:
    """Return the array that owns the memory, and so lives as long as any view of the slab."""
    return slab.base if isinstance(slab.base, np.ndarray) else slab


def clear_cuda_error() -> None:
    """Clear the CUDA error of this thread's last call, which the next kernel launch would raise otherwise."""
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")


def _cuda_runtime() -> Any:
    """Return torch's binding of the CUDA runtime; None without a CUDA device."""
    import torch

    return torch.cuda.cudart() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]


def dtype_name(dtype: torch.dtype, entry: str | None = None) -> str:
    """Return the Zarr name of a torch data type. Raises UsageError naming `entry` for an unsupported type."""
    name = str(dtype).removeprefix("torch.")
    try:
        numpy_dtype(name)
    except ValueError as error:
        text = str(error) if entry is None else f"{entry!r}: {error}; cast it, or leave it out"
        raise UsageError(text) from None
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch data type with a Zarr name."""
    import torch

    return cast("torch.dtype", getattr(torch, name))


def as_torch(view: Any) -> torch.Tensor:
    """Return a numpy array (bfloat16 of ml_dtypes too) or torch tensor as a torch tensor over the same memory."""
    import torch

    if isinstance(view, torch.Tensor):
        return view
    if view.dtype.isbuiltin == 1:  # numpy's own, the usual case
        return torch.from_numpy(view)
    if view.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(view.view(np.int16)).view(torch.bfloat16)
    if view.dtype.name in FLOAT8:
        return torch.from_numpy(view.view(np.uint8)).view(torch_dtype(view.dtype.name))
    return torch.from_numpy(view)


def plain_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor whose memory has its values: the tensor itself if possible, else a copy.

    torch records a pending negation or conjugation as a flag, and the memory then has other values, as for
    `x.conj().imag`. Code that accesses a tensor's memory must use the result of this function.
    """
    return tensor.contiguous().resolve_conj().resolve_neg()


def host_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's `plain_memory` on the CPU, without its gradient."""
    return plain_memory(tensor.detach().cpu())


def as_numpy(tensor: torch.Tensor) -> Array:
    """Return a contiguous CPU tensor as a numpy array over the same memory; bfloat16 has the data type of ml_dtypes."""
    import torch

    flat = tensor.detach()
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if (name := str(flat.dtype).removeprefix("torch.")) in FLOAT8:
        return flat.view(torch.uint8).numpy().view(numpy_dtype(name))
    array: Array = flat.numpy()
    return array


def as_bytes(tensor: torch.Tensor) -> BytesLike:
    """Return a contiguous CPU tensor of at least one dimension as bytes over the same memory."""
    import torch

    return cast("BytesLike", tensor.detach().view(torch.uint8).numpy())


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the tensor's bytes in C order, without a copy if it is contiguous and on the CPU."""
    import torch

    flat = host_values(tensor).reshape(-1)
    data: Bytes = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return data
