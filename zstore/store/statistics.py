"""The statistics of a store."""

from __future__ import annotations

from dataclasses import dataclass

from ..io.queue import QueueStatistics


@dataclass(frozen=True, kw_only=True)
class StoreStatistics:
    """The store's contents, and its work since it was opened."""

    disk_read_bytes: int
    disk_write_bytes: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    pool_bytes: int
    pool_peak_bytes: int
    read_wait_s: float
    write_wait_s: float
    pool_wait_s: float
    pin_wait_s: float
    pinned_bytes: int
    """Bytes of buffers and state in host memory that are registered with CUDA."""
    queue: QueueStatistics
    fallbacks: tuple[str, ...]
