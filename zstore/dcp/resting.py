"""Tensors kept in shard files of this machine, such as an offloaded optimizer's state: saved by links, not copies.

[Note: tensors in shard files]
A tensor of a class that has `pin_shard()` takes part, in a state dict as it is, or as the local part of a DTensor. The writer
pins it, and links its file if the checkpoint is to have the same one, byte by byte: when all of an array is one rank's, or
each rank has rows of it that the store cuts by `grid_of_rows`. A tensor with write items of its own may name another cut by
`RestingWrite`. Otherwise the values are read and written as any others.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeGuard

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zstore.errors import UsageError
from zstore.format import ArraySpec, Box, Grid, layout_of
from zstore.store import LocalShard, PinnedShard


@dataclass(frozen=True)
class RestingWrite(TensorWriteData):
    """The write data of a piece that is a shard of an array cut by `grid`."""

    grid: Grid
    shard: int


class Resting(Protocol):
    """A tensor whose values are in a store."""

    def pin_shard(self) -> PinnedShard | None:
        """Return its present version, which no later change reaches until it is released; the caller releases it.

        Its elements are the tensor's, in C order. None if the store has no such shard, as of a part of one: then the
        tensor is read as any other.
        """
        ...


def is_resting(value: object) -> TypeGuard[Resting]:
    """Return whether `value` is a tensor in a store. Checking the protocol takes as long as writing a small file."""
    return hasattr(type(value), "pin_shard")


def box_of(piece: TensorWriteData) -> Box:
    """Return which part of its array a piece is."""
    return Box(tuple(piece.size), tuple(piece.chunk.offsets), tuple(piece.chunk.sizes))


def shard_of(local: LocalShard, spec: ArraySpec, grid: Grid, box: Box) -> int | None:
    """Return the shard of an array on `grid` that the file of `local` may be as it is; None if there is none.

    `box` is its part of the array.
    """
    run = next(box.overlap(0, spec.numel), None)
    if run is None or run.at % grid.shard_numel:
        return None
    shard = run.at // grid.shard_numel
    alike = (
        run.numel == box.numel == local.valid_numel == grid.shard_valid_numel(shard)
        and (local.spec.dtype, local.grid.chunk_numel) == (spec.dtype, grid.chunk_numel)
        and layout_of(local.grid, local.shard, spec.dtype) == layout_of(grid, shard, spec.dtype)
    )
    return shard if alike else None


def resting_grid(spec: ArraySpec, pieces: Sequence[TensorWriteData]) -> Grid | None:
    """Return the grid of which each piece of an array says that it is a whole shard in a store; None if they do not."""
    grids = {piece.grid if isinstance(piece, RestingWrite) else None for piece in pieces}
    grid = grids.pop() if len(grids) == 1 else None
    if grid is None or (grid.rows, grid.row_numel) != (spec.rows, spec.row_numel):
        return None
    shards = [each.shard for each in pieces if isinstance(each, RestingWrite) and _is_shard(each, grid)]
    return grid if sorted(shards) == list(range(grid.num_shards)) and len(shards) == len(pieces) else None


def _is_shard(piece: RestingWrite, grid: Grid) -> bool:
    box = box_of(piece)
    base, numel = piece.shard * grid.shard_numel, grid.shard_valid_numel(piece.shard)
    return 0 < box.numel == numel and sum(run.numel for run in box.overlap(base, base + numel)) == numel


class PinnedTensor(torch.Tensor):
    """The present version of a tensor in a store, which a stager hands on. It holds its pins until they were saved."""

    _items: list[WriteItem]
    _pins: dict[tuple[int, ...], PinnedShard]

    def __new__(cls, tensor: Any, items: list[WriteItem]) -> Self:
        """Return it, without memory of its own."""
        make: Any = torch.Tensor._make_wrapper_subclass
        made: Self = make(cls, tensor.shape, dtype=tensor.dtype)
        return made

    def __init__(self, tensor: Any, items: list[WriteItem]) -> None:
        self._items = items
        self._pins = {}
        for item in items:
            pin = _part(tensor, item.index).pin_shard()
            if pin is not None:
                # At the end of the program the store is closed; a forked child that ends must not remove the parent's files.
                weakref.finalize(self, pin.release).atexit = False
                self._pins[_place(item.index)] = pin

    @property
    def is_whole(self) -> bool:
        """Whether all its pieces are pinned."""
        return len(self._pins) == len(self._items)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [replace(item, index=replace(item.index, fqn=fqn)) for item in self._items]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [item.tensor_data.chunk for item in self._items if item.tensor_data is not None]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Resting:
        return _Pinned(self._pins[_place(index)])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PinnedTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse to compute: the values are not in memory."""
        raise UsageError(f"{func} on a tensor that was staged for a save by zstore.dcp.Writer: it only can be saved")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a tensor in a store of this process cannot be saved by another process: leave out "
            "async_checkpointer_type=AsyncCheckpointerType.PROCESS"
        )


@dataclass(frozen=True)
class _Pinned:
    pin: PinnedShard

    def pin_shard(self) -> PinnedShard:
        return self.pin


def _place(index: MetadataIndex) -> tuple[int, ...]:
    return () if index.offset is None else tuple(index.offset)


def _part(tensor: Any, index: MetadataIndex) -> Any:
    return tensor.__get_tensor_shard__(index) if hasattr(tensor, "__get_tensor_shard__") else tensor


def _write_items(tensor: Any) -> list[WriteItem]:
    if hasattr(tensor, "__create_write_items__"):
        items: list[WriteItem] = tensor.__create_write_items__("", tensor)
        return items
    place = torch.Size([0] * tensor.dim())
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(place, tensor.shape),
        properties=TensorProperties(dtype=tensor.dtype),
        size=tensor.shape,
    )
    return [WriteItem(MetadataIndex("", place), WriteItemType.TENSOR, tensor_data=data)]


def pinned(value: Any) -> PinnedTensor | None:
    """Return the replacement of `value` in a staged state dict: its pinned version if it is in a store, else None."""
    if not isinstance(value, torch.Tensor) or type(value) is torch.Tensor or not value.numel():
        return None
    if isinstance(value, PinnedTensor):
        return value
    items = _write_items(value)
    parts = [_part(value, item.index) for item in items]
    if not parts or not all(part.numel() and is_resting(part) for part in parts):
        return None
    found = PinnedTensor(value, items)
    return found if found.is_whole else None
