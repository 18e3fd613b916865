"""`deepspeed.runtime.utils`: what scripts take from it."""

from __future__ import annotations

import logging
import random

import numpy as np
import torch
import torch.distributed as torch_dist

from zstore.sizes import format_bytes

_log = logging.getLogger("zstore")


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log, on rank 0, the memory that the device and the process take; nothing unless `force`, as in DeepSpeed."""
    if not force or (torch_dist.is_initialized() and torch_dist.get_rank() != 0):
        return
    parts = [f"process {format_bytes(_resident_bytes())}"]
    if torch.cuda.is_available():
        parts.append(f"CUDA {format_bytes(torch.cuda.memory_allocated())}")
        parts.append(f"at most {format_bytes(torch.cuda.max_memory_allocated())}")
    _log.info("%s: memory of %s", message, ", ".join(parts))


def _resident_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))


def set_random_seed(seed: int) -> None:
    """Seed the generators of random, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
