"""The names that DeepSpeed has in `deepspeed.checkpointing`, for scripts that `import zstore as deepspeed`."""

from zstore.engine.activations.checkpointing import (
    checkpoint,
    configure,
    is_configured,
    non_reentrant_checkpoint,
    reset,
)

__all__ = [
    "checkpoint",
    "configure",
    "is_configured",
    "non_reentrant_checkpoint",
    "reset",
]
