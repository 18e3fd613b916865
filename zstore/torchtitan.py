"""torchtitan's checkpoints in zstore's format: `zstore.torchtitan.CheckpointManager`."""

from zstore.engine.adapters.torchtitan import CheckpointManager

__all__ = ["CheckpointManager"]
