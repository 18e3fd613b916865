"""The host tier: shards in huge-page memory, counted against the host budget."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ...errors import BudgetError
from ...format.arrays import numpy_dtype
from ...io.buffers import HUGE_PAGE_BYTES, make_slab
from .base import Bytes, LocalShard, View
from .memory import MemoryTier

_SLAB_BYTES = 32 * HUGE_PAGE_BYTES
_ALIGN_BYTES = 64


class HostTier(MemoryTier):
    """Shards in host memory, made by `make`. `limit_bytes` is what the budget leaves for them (None: no limit)."""

    name = "host"

    def __init__(self, limit_bytes: int | None = None, make: Callable[[int], Bytes] = make_slab) -> None:
        super().__init__()
        self._make = make
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._slab = make_slab(0)
        self._slab_used = 0
        self._lock = threading.Lock()

    def _allocate(self, local: LocalShard) -> View:
        with self._lock:
            data = self._take(local)
        return data[: local.nbytes].view(numpy_dtype(local.spec.dtype))

    def _take(self, local: LocalShard) -> Bytes:
        nbytes = -(-local.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        if self.limit_bytes is not None and self.used_bytes + nbytes > self.limit_bytes:
            raise BudgetError(
                f"array {local.spec.name!r} needs {nbytes} bytes of host memory, but {self.used_bytes} of the "
                f"{self.limit_bytes} bytes that `host_budget_bytes` leaves for state are taken: raise the budget, or "
                "keep the state on disk (`offload_optimizer.device: nvme`)"
            )
        self.used_bytes += nbytes
        if nbytes > self._slab.size - self._slab_used:
            # Small shards share slabs; a large one has its own, and leaves the shared slab's rest in use.
            if nbytes >= _SLAB_BYTES // 4:
                return self._make(nbytes)
            self._slab, self._slab_used = self._make(_SLAB_BYTES), 0
        data = self._slab[self._slab_used : self._slab_used + nbytes]
        self._slab_used += nbytes
        return data

    def remove(self, name: str) -> None:
        """See `Tier.remove`; the memory of a small shard is free once its neighbours' is."""
        nbytes = self._shards[name].nbytes
        super().remove(name)
        with self._lock:
            self.used_bytes -= -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES

    def reserve(self, nbytes: int) -> None:
        """Count memory that is taken beside the shards. Raises BudgetError where there is no room for it."""
        with self._lock:
            if self.limit_bytes is not None and self.used_bytes + nbytes > self.limit_bytes:
                raise BudgetError(
                    f"buffers need {nbytes} bytes of host memory, but {self.used_bytes} of the {self.limit_bytes} bytes "
                    "that `host_budget_bytes` leaves beside the transfer buffers are taken: raise the budget"
                )
            self.used_bytes += nbytes

    def close(self) -> None:
        """See `Tier.close`."""
        super().close()
        self._slab = make_slab(0)
