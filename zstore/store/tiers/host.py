"""The host tier: shards in huge-page memory, counted against the host budget."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ...format.arrays import Bytes, numpy_dtype
from ...format.partition import round_up
from ...io.allocator import HUGE_PAGE_BYTES
from ...io.buffers import Budget, make_slab
from .base import LocalShard, View
from .memory import MemoryTier

_SLAB_BYTES = 32 * HUGE_PAGE_BYTES
_ALIGN_BYTES = 64
_DIRECT_BYTES = 512
"""Shards begin at a multiple: files are then written from their memory, and read into it, without a copy."""


class HostTier(MemoryTier):
    """Shards in host memory, made by `make` and counted against `budget`."""

    name = "host"
    owns_memory = True

    def __init__(self, budget: Budget | None = None, make: Callable[[int], Bytes] = make_slab) -> None:
        super().__init__()
        self._budget = budget or Budget()
        self._make = make
        self._slab = make_slab(0)
        self._slab_used = 0
        self._lock = threading.Lock()

    def _allocate(self, local: LocalShard) -> View:
        with self._lock:
            data = self._take(local)
        return data[: local.nbytes].view(numpy_dtype(local.spec.dtype))

    def _take(self, local: LocalShard) -> Bytes:
        nbytes = round_up(local.nbytes, _ALIGN_BYTES)
        self._budget.require(
            nbytes, f"array {local.spec.name!r}", ", or keep the state on disk (`offload_optimizer.device: nvme`)"
        )
        self._budget.take(nbytes)
        start = round_up(self._slab_used, _DIRECT_BYTES)
        if nbytes > self._slab.size - start:
            # Small shards share slabs; a large one has its own, and leaves the shared slab in use.
            if nbytes >= _SLAB_BYTES // 4:
                return self._make(nbytes)
            self._slab, start = self._make(_SLAB_BYTES), 0
        self._slab_used = start + nbytes
        return self._slab[start : self._slab_used]

    def remove(self, name: str) -> None:
        """See `Tier.remove`; the memory of a small shard is free once its neighbours' is."""
        nbytes = self._shards[name].nbytes
        super().remove(name)
        self._budget.release(round_up(nbytes, _ALIGN_BYTES))
        with self._lock:
            if not self._shards:
                self._slab, self._slab_used = make_slab(0), 0

    def close(self) -> None:
        """See `Tier.close`."""
        super().close()
        self._slab = make_slab(0)
