"""The device tier: shards as torch tensors on the device that computes, or in memory that the caller already has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import UsageError
from .base import LocalShard, View
from .memory import MemoryTier

if TYPE_CHECKING:
    import torch


DEVICE_TILE_NUMEL = 16 * 1024 * 1024
"""Elements of a tile of device memory: so many that its work takes longer than asking for it."""


class DeviceTier(MemoryTier):
    """Shards as 1-D torch tensors on `device`."""

    name = "device"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self._device = device
        if not device.startswith("cpu"):
            self.tile_numel = DEVICE_TILE_NUMEL

    def _allocate(self, local: LocalShard) -> View:
        import torch

        return torch.zeros(local.valid_numel, dtype=getattr(torch, local.spec.dtype), device=self._device)

    def change_memory(self, name: str, memory: torch.Tensor | None) -> None:
        """Keep a shard in other memory, which has its values, or in none."""
        with self._unpinned:
            self._require_rest(name)
            self._memory[name] = None if memory is None else self._adopt(self._shards[name], memory)

    def _adopt(self, local: LocalShard, memory: torch.Tensor) -> View:
        import torch

        wanted = getattr(torch, local.spec.dtype)
        if memory.shape != (local.valid_numel,) or memory.dtype != wanted or not memory.is_contiguous():
            raise UsageError(
                f"array {local.spec.name!r}: expected contiguous memory of {local.valid_numel} elements of {wanted}, "
                f"got shape {tuple(memory.shape)} of {memory.dtype}"
            )
        return memory.detach()
