"""Memory that the process and its device use now."""

from __future__ import annotations

import logging
import resource
import sys

import torch
import torch.distributed as torch_dist

from zstore.io import read_host_memory

_log = logging.getLogger("zstore")

MAXRSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024
"""Bytes of a unit of `ru_maxrss`."""
_GB = 10**9


def resident_bytes() -> int:
    """Return the bytes that the process has resident; if the system does not say, the most that it had."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS_UNIT_BYTES


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log on rank 0, in GB (10^9 bytes): the memory of tensors on the CUDA device and its peak since the last such line,
    memory that torch reserves there and its peak, the process's host memory, and the available host memory, within the
    limits of control groups. Nothing unless `force`, as in DeepSpeed."""
    if not force or (torch_dist.is_available() and torch_dist.is_initialized() and torch_dist.get_rank() != 0):
        return
    parts = []
    if torch.cuda.is_available():
        parts.append(
            f"CUDA allocated {torch.cuda.memory_allocated() / _GB:.2f} GB, at most "
            f"{torch.cuda.max_memory_allocated() / _GB:.2f} GB, cached {torch.cuda.memory_reserved() / _GB:.2f} GB, at most "
            f"{torch.cuda.max_memory_reserved() / _GB:.2f} GB"
        )
        torch.cuda.reset_peak_memory_stats()
    memory = read_host_memory()
    host = f"process {resident_bytes() / _GB:.2f} GB"
    if memory.available_bytes is not None:
        host += f", host available {memory.available_bytes / _GB:.2f} GB"
    if memory.usable_bytes is not None:
        host += f" of {memory.usable_bytes / _GB:.2f} GB"
    _log.info("%s: %s", message, ", ".join([*parts, host]))
