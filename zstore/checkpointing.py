"""The names that DeepSpeed has in `deepspeed.checkpointing`, for scripts that `import zstore as deepspeed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zstore.engine.activations.checkpointing import (
    checkpoint,
    configure,
    get_cuda_rng_tracker,
    is_configured,
    model_parallel_cuda_manual_seed,
    reset,
)

__all__ = [
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "reset",
]


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Do as `checkpoint`, which is not reentrant either."""
    return checkpoint(function, *args)
