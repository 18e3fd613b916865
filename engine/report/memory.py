"""Bytes of memory and disk that a rank uses, and its peaks."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..training import Training

_MAXRSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True, kw_only=True)
class MemoryStatistics:
    """What one rank uses."""

    device_bytes: int
    """Arrays of the store that rest on the device, parameters that are their own masters included."""
    host_bytes: int
    """Arrays of the store that rest in host memory."""
    disk_bytes: int
    """Arrays of the store that rest on disk."""
    buffer_bytes: int
    """The store's transfer buffers, in host memory."""
    buffer_peak_bytes: int
    """Most of them that were in use at once."""
    process_peak_bytes: int
    """Most memory that the process had resident, everything included."""
    cuda_peak_bytes: int
    """Most memory that tensors had on the CUDA device; 0 where there is none."""

    def line(self) -> str:
        """Return all of it for a person to read."""
        cuda = f", of CUDA {_size(self.cuda_peak_bytes)}" if self.cuda_peak_bytes else ""
        return (
            f"state on device {_size(self.device_bytes)}, host {_size(self.host_bytes)}, disk {_size(self.disk_bytes)}; "
            f"buffers {_size(self.buffer_bytes)}, at most {_size(self.buffer_peak_bytes)} in use; "
            f"peak of the process {_size(self.process_peak_bytes)}{cuda}"
        )


def memory_statistics(training: Training) -> MemoryStatistics:
    """Return what this rank uses now, and its peaks so far."""
    store = training.state.store.statistics()
    cuda = training.world.device.type == "cuda"
    return MemoryStatistics(
        device_bytes=store.device_bytes,
        host_bytes=store.host_bytes,
        disk_bytes=store.disk_bytes,
        buffer_bytes=store.pool_bytes,
        buffer_peak_bytes=store.pool_peak_bytes,
        process_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT_BYTES,
        cuda_peak_bytes=torch.cuda.max_memory_allocated(training.world.device) if cuda else 0,
    )


def _size(nbytes: int) -> str:
    """Return bytes as a number of three digits and its unit."""
    value, units = float(nbytes), ["B", "KB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g} {units[0]}"
