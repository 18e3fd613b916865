"""Where a shard rests: device, host, disk, behind one contract."""

from .base import LocalShard, Mode, PinnedShard, Span, Tier, Tile
from .device import DeviceTier
from .disk import DiskTier, Drives
from .host import HostTier
from .memory import MemoryTier

__all__ = [
    "DeviceTier",
    "DiskTier",
    "Drives",
    "HostTier",
    "LocalShard",
    "MemoryTier",
    "Mode",
    "PinnedShard",
    "Span",
    "Tier",
    "Tile",
]
