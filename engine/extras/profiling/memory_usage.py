"""Memory that the process and its device use now."""

from __future__ import annotations

import logging

import torch
import torch.distributed as torch_dist

from zstore.io import read_host_memory, resident_bytes

_log = logging.getLogger("zstore")

_GB = 10**9


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
