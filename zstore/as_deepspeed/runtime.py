"""`deepspeed.runtime.utils`: what scripts take from it."""

from __future__ import annotations

import random

import numpy as np
import torch

from zstore.profiling import see_memory_usage

__all__ = ["see_memory_usage", "set_random_seed"]


def set_random_seed(seed: int) -> None:
    """Seed the generators of random, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
