"""How a store uses this rank's host memory and disks, and the statistics of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..io.queue import QueueStatistics

DEFAULT_POOL_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How a store uses this rank's host memory and disk."""

    run_path: Path | None = None
    """Absolute folder on the drive for swap files (`nvme_path`); None: no disk tier."""
    other_paths: tuple[Path, ...] = ()
    """Folders on further drives: shards are spread over all of them, the next one to the drive with the fewest bytes."""
    group_paths: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    """By first part of an array's name, as "parameter": folders that its shards are spread over instead."""
    shares_folders: bool = False
    """Another store of this process may use the same folders: each has files of its own there. Else that is an error."""
    reserves: bool = True
    """An array on disk has its room from the start; else its first values take it, in fewer requests to the drive."""
    host_budget_bytes: int | None = None
    """Bytes of host memory for buffers and host-tier state of this rank; None: buffers of 128 MiB, state unlimited."""
    most_pool_bytes: int = DEFAULT_POOL_BYTES
    """Bytes of transfer buffers; at most half of the budget, and by default an eighth, but at least 64 MiB."""
    num_threads: int = 8
    """I/O threads."""
    queue_depth: int = 64
    """Operations that may wait for a thread."""
    block_bytes: int = 4 * 1024 * 1024
    """Bytes of one request to the disk, about."""
    verify: bool = True
    """Check the crc32c of every chunk that is read from disk."""
    device: str = "cpu"
    """Torch device of the device tier."""
    pin_buffers: bool = False
    """Register transfer buffers with CUDA; if that fails, the store's `fallbacks` say so."""
    pin_state: bool = False
    """Register arrays of tier "pinned" with CUDA, likewise."""

    @property
    def all_paths(self) -> tuple[Path, ...]:
        """Return the folders of all drives, each once."""
        first = () if self.run_path is None else (self.run_path,)
        others = (path for paths in self.group_paths.values() for path in paths)
        return tuple(dict.fromkeys((*first, *self.other_paths, *others)))

    @property
    def pool_bytes(self) -> int:
        """Bytes of transfer buffers, as `most_pool_bytes` says."""
        most, budget_bytes = self.most_pool_bytes, self.host_budget_bytes
        if budget_bytes is None:
            return most
        if most == DEFAULT_POOL_BYTES:  # state in memory gains more from what they leave
            most = min(most, max(most // 2, budget_bytes // 8))
        return min(most, budget_bytes // 2)

    @property
    def span_bytes(self) -> int:
        """Bytes of one request as the pool allows: a small pool still holds several at once."""
        return min(self.block_bytes, self.pool_bytes // 12)


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
