"""The tiers of a shard: device, host and disk, with one contract."""

from .base import ChunkSpan, Mode, Snapshot, Tier, TierName, Tile
from .disk import DiskTier, Drives
from .memory import DeviceTier, HostTier, MemoryTier

__all__ = [
    "ChunkSpan", "DeviceTier", "DiskTier", "Drives", "HostTier", "MemoryTier", "Mode", "Snapshot", "Tier", "TierName",
    "Tile",
]  # fmt: skip
