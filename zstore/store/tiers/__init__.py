"""The tiers of shards: device, host and disk, with one interface."""

from .base import ChunkSpan, Mode, Snapshot, Tier, TierName, Tile
from .disk import DiskTier, Drives
from .memory import DeviceTier, HostTier, MemoryTier

__all__ = [
    "ChunkSpan", "DeviceTier", "DiskTier", "Drives", "HostTier", "MemoryTier", "Mode", "Snapshot", "Tier", "TierName",
    "Tile",
]  # fmt: skip
