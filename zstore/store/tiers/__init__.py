"""The tiers of a shard: device, host, disk, behind one contract."""

from .base import ChunkSpan, LocalShard, Mode, PinnedShard, Tier, Tile
from .device import DeviceTier
from .disk import DiskTier, Drives
from .host import HostTier
from .memory import MemoryTier

__all__ = [
    "ChunkSpan", "DeviceTier", "DiskTier", "Drives", "HostTier", "LocalShard", "MemoryTier", "Mode", "PinnedShard",
    "Tier", "Tile",
]  # fmt: skip
