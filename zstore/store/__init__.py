"""The tensor store: shards of named global tensors in tiers, passes over them, snapshots."""

from .options import StoreOptions
from .store import TensorStore

__all__ = ["StoreOptions", "TensorStore"]
