"""Tensors that rest in shard files of this machine, as an offloaded optimizer's state does: saved by links, not copies.

[Note: how a tensor says that it rests]
A tensor subclass with DCP's own two methods takes part: its `__create_write_items__` gives write items whose tensor data
are `RestingWrite`, and what its `__get_tensor_shard__` returns has `pin_shard()`. Where all ranks' pieces of an array are
whole shards of one grid, the checkpoint is cut as they are, and each rank links its file. Elsewhere the values are read from
it and written as any others.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem

from zstore.errors import UsageError
from zstore.format.arrays import ArraySpec
from zstore.format.boxes import Box
from zstore.format.partition import Grid
from zstore.store.tiers import PinnedShard


@dataclass(frozen=True)
class RestingWrite(TensorWriteData):
    """What a write item says of a piece that rests in a shard file: how the whole array is cut, and which shard it is."""

    grid: Grid
    shard: int


@runtime_checkable
class Resting(Protocol):
    """A piece whose values rest in a store."""

    def pin_shard(self) -> PinnedShard:
        """Return its present version, which no later change reaches until it is released; the caller releases it."""
        ...


def resting_grid(spec: ArraySpec, pieces: Sequence[TensorWriteData]) -> Grid | None:
    """Return the grid on which each piece of an array rests as a whole shard; None where there is no such one."""
    grids = {piece.grid if isinstance(piece, RestingWrite) else None for piece in pieces}
    grid = grids.pop() if len(grids) == 1 else None
    if grid is None or (grid.rows, grid.row_numel) != (spec.rows, spec.row_numel):
        return None
    shards = [each.shard for each in pieces if isinstance(each, RestingWrite) and is_shard(each, grid)]
    return grid if sorted(shards) == list(range(grid.num_shards)) and len(shards) == len(pieces) else None


def is_shard(piece: RestingWrite, grid: Grid) -> bool:
    """Return whether a piece is its shard of `grid`, no more and no less."""
    box = Box(tuple(piece.size), tuple(piece.chunk.offsets), tuple(piece.chunk.sizes))
    base, numel = piece.shard * grid.shard_numel, grid.shard_valid_numel(piece.shard)
    return 0 < box.numel == numel and sum(run.numel for run in box.overlap(base, base + numel)) == numel


class PinnedTensor(torch.Tensor):
    """A tensor that rests in a store, as it is now: what a stager hands on. It holds its pins until they were saved."""

    _items: list[WriteItem]
    _chunks: list[ChunkStorageMetadata]
    _pins: dict[tuple[int, ...], PinnedShard]

    def __new__(cls, tensor: Any, items: list[WriteItem]) -> Self:
        """Return it, without memory of its own."""
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made: Self = make(cls, tensor.shape, dtype=tensor.dtype)
        return made

    def __init__(self, tensor: Any, items: list[WriteItem]) -> None:
        self._items = items
        self._chunks = tensor.__create_chunk_list__()
        self._pins = {}
        for item in items:
            pin = tensor.__get_tensor_shard__(item.index).pin_shard()
            weakref.finalize(self, pin.release)
            self._pins[_place(item.index)] = pin

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """See `torch.distributed.checkpoint`."""
        return [replace(item, index=replace(item.index, fqn=fqn)) for item in self._items]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """See `torch.distributed.checkpoint`."""
        return self._chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> Resting:
        """See `torch.distributed.checkpoint`."""
        return _Pinned(self._pins[_place(index)])

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PinnedTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to compute: the values are not in memory."""
        raise UsageError(f"{func} on a tensor that was staged for a save by zstore.dcp.Writer: it only can be saved")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a tensor that rests in a store of this process cannot be saved by another process: leave out "
            "async_checkpointer_type=AsyncCheckpointerType.PROCESS"
        )


@dataclass(frozen=True)
class _Pinned:
    pin: PinnedShard

    def pin_shard(self) -> PinnedShard:
        return self.pin


def _place(index: MetadataIndex) -> tuple[int, ...]:
    return () if index.offset is None else tuple(index.offset)


def pinned(value: Any) -> Any:
    """Return what stands for `value` in a staged state dict: a tensor's pinned version where it rests, else None."""
    if not isinstance(value, torch.Tensor) or not hasattr(type(value), "__create_write_items__"):
        return None
    if isinstance(value, PinnedTensor):
        return value
    items: list[WriteItem] = value.__create_write_items__("", value)  # type: ignore[attr-defined]
    if not any(isinstance(item.tensor_data, RestingWrite) for item in items):
        return None
    return PinnedTensor(value, items)
