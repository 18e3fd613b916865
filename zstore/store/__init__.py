"""The tensor store: shards of named global tensors in tiers, passes over them, snapshots.

The names below are public, for code built on it.
"""

from ..checkpoint.part import PinnedShard
from ..format.arrays import LocalShard
from .options import RUN_FOLDER, StoreOptions, StoreStatistics
from .shards import SMALL_SHARD_BYTES, ModeName
from .store import Store
from .stream import Stream
from .tiers import Drives, Snapshot, TierName, Tile
from .tiers.diskfiles import MANY_SMALL, is_packed, run_file_bytes
from .tiers.memory import MEMORY_TILE_NUMEL, shared_bytes

__all__ = [
    "MANY_SMALL", "MEMORY_TILE_NUMEL", "RUN_FOLDER", "SMALL_SHARD_BYTES", "Drives", "LocalShard", "ModeName",
    "PinnedShard", "Snapshot", "Store", "StoreOptions", "StoreStatistics", "Stream", "TierName", "Tile",
    "is_packed", "run_file_bytes", "shared_bytes",
]  # fmt: skip
