"""`deepspeed.checkpointing`: that of zstore, whose `configure` takes configs as scripts hand them over to DeepSpeed."""

from __future__ import annotations

from functools import wraps
from typing import Any

from zstore import checkpointing
from zstore.checkpointing import (
    checkpoint,
    get_cuda_rng_tracker,
    is_configured,
    model_parallel_cuda_manual_seed,
    non_reentrant_checkpoint,
    reset,
)

from .config import raw_config

__all__ = [
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "reset",
]


@wraps(checkpointing.configure)
def configure(mpu_: Any = None, deepspeed_config: Any = None, *args: Any, **kwargs: Any) -> None:
    """Do as `zstore.checkpointing.configure`."""
    config = None if deepspeed_config is None else raw_config(deepspeed_config)
    checkpointing.configure(mpu_, config, *args, **kwargs)
