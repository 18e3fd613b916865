"""The ranks that share a store's arrays: this process's number, its part of each array, and agreement on checkpoints.

[Note: rows of ranks]
N ranks hold the rows of an array as torch's `Shard(0)` cuts them: ceil(rows / N) each, then the remainder, then none. Each
rank's rows are one shard of the Zarr array, so that a checkpoint takes its file as it is; those of arrays under 64 KiB are
merged into one. Chunks end with ranks' rows: if no chunk of a useful size does, `put` raises an error.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError
from ..format.arrays import Array, ArraySpec
from ..format.partition import MAX_CHUNK_NUMEL, MOST_CHUNK_NUMEL, Grid, grid_of_rows, make_grid
from ..format.shardfile import layout_of
from ..io.files import Files
from ..ranks.agreement import Agreement
from ..ranks.rendezvous import Board, FolderBoard, StoreBoard
from ..store.runfolder import RUN_FOLDER
from ..store.tiers import LocalShard
from .arrays import StoreArray, Value, flatten, is_dtensor, is_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_opened: Counter[str] = Counter()
"""Stores that this process opened with others, by their ranks: all ranks open them in the same order."""
_lock = threading.Lock()


@dataclass(frozen=True)
class Ranks:
    """Those that share a store's arrays; by default this process alone."""

    rank: int = 0
    world_size: int = 1
    mesh: DeviceMesh | None = None
    board: Board | None = field(default=None, compare=False)
    """The board for texts to each other; None: they have none."""

    @staticmethod
    def of(rank: int | None, world_size: int | None, mesh: DeviceMesh | None, path: Path | None) -> Ranks:
        """Return the ranks that were given to `open_store`. Raises UsageError for arguments that make no sense."""
        if mesh is not None:
            if mesh.ndim != 1 or (rank, world_size) != (None, None):
                raise UsageError(
                    f"open_store(mesh=<{mesh.ndim} dimensions>, rank={rank}, world_size={world_size}): expected a mesh of one "
                    "dimension, as mesh['dp'] is of a larger one, and no rank and world_size beside it"
                )
            rank, world_size = mesh.get_local_rank(), mesh.size()
        elif rank is None or world_size is None:
            if (rank, world_size) != (None, None):
                raise UsageError(f"open_store(rank={rank}, world_size={world_size}): expected both or none")
            return Ranks()
        if not 0 <= rank < world_size:
            raise UsageError(
                f"open_store(rank={rank}, world_size={world_size}): expected a rank from 0 to {world_size - 1}"
            )
        board = _board(rank, world_size, mesh, path) if world_size > 1 else None
        return Ranks(rank, world_size, mesh, board)

    def agreement(self) -> Agreement:
        """Return how the ranks agree. Raises UsageError if they cannot."""
        if self.board is None:
            raise UsageError(
                f"rank {self.rank} of {self.world_size} has no way to agree with the others on a checkpoint: call "
                "torch.distributed.init_process_group before open_store, or open the stores of all ranks below one `path`"
            )
        return Agreement(self.board, self.rank, self.world_size)

    def rows(self, num_rows: int) -> tuple[int, int]:
        """Return this rank's rows `[first, stop)` of so many. See [Note: rows of ranks]."""
        each = -(-num_rows // self.world_size)
        first = min(num_rows, self.rank * each)
        return first, min(num_rows, first + each)

    def hold(self, spec: ArraySpec, *, by_rows: bool) -> StoreArray:
        """Return this rank's part of an array. Raises UsageError for rows that no chunks fit."""
        stored = spec.stored_shape
        if not by_rows or self.world_size == 1:
            rows = spec.shape[0] if spec.shape else 1
            return StoreArray(spec, make_grid(stored, 1, 1), 0, 0, rows, by_rows=False)
        first, stop = self.rows(spec.shape[0])
        each = -(-spec.shape[0] // self.world_size)
        grid = _grid(stored, each, spec.dtype) if spec.numel else make_grid(stored, 1, 1)
        if grid is None:
            raise UsageError(
                f"array {spec.name!r} of shape {spec.shape}: {each} rows a rank cannot be cut into chunks of a useful size; "
                f"make its first extent a multiple of {16 * self.world_size}, or put each rank's rows under a name of their own"
            )
        return StoreArray(spec, grid, self.rank, first, stop, by_rows=True)

    def held_as(self, local: LocalShard) -> StoreArray:
        """Return this rank's part of the array of a shard that `hold` gave."""
        whole = self.hold(local.spec, by_rows=False)
        return whole if whole.local == local else self.hold(local.spec, by_rows=True)

    def hold_value(
        self, name: str, value: Value, *, shape: Sequence[int] | None, dims: tuple[str, ...]
    ) -> tuple[StoreArray, Array]:
        """Return the array that `value` is put as, and the elements that this rank has of it, 1-D.

        `shape` is that of the whole array, if `value` is this rank's rows of it. Raises UsageError if it cannot be stored.
        """
        data, placements = flatten(name, value), self._placements(name, value)
        whole = tuple(np.shape(value) if shape is None else shape)
        by_rows = shape is not None or any(placement.is_shard() for placement in placements)
        if shape is not None and (placements or not whole):
            raise UsageError(
                f"array {name!r}: shape={whole} is for a plain value that has this rank's rows of such an array"
            )
        array = self.hold(_spec(name, whole, data.dtype.name, dims), by_rows=by_rows)
        local = tuple(np.shape(value)) if shape is not None else None
        if (local is not None and local != array.shape) or data.size != array.numel:
            raise UsageError(
                f"array {name!r} of shape {whole}: rank {self.rank} of {self.world_size} has rows [{array.first}, "
                f"{array.stop}), so expected shape {array.shape}, got {local or data.shape}"
            )
        return replace(array, is_torch=is_tensor(value), placements=placements), data

    def _placements(self, name: str, value: Value) -> tuple[Any, ...]:
        """Return the placements of a DTensor; none for another value. Raises UsageError for one that ranks cannot hold."""
        if not is_dtensor(value):
            return ()
        from torch.distributed.tensor import Replicate, Shard

        if value.device_mesh != self.mesh:
            raise UsageError(
                f"array {name!r} is a DTensor on {value.device_mesh}, the store is on {self.mesh}: open it with "
                "open_store(mesh=tensor.device_mesh), or put tensor.to_local()"
            )
        (placement,) = value.placements
        if type(placement) not in (Replicate, Shard) or not (placement.is_replicate() or placement.is_shard(0)):
            raise UsageError(
                f"array {name!r}: expected a DTensor placed as Shard(0) or Replicate(), got {placement}: put "
                "tensor.redistribute(placements=[Shard(0)])"
            )
        return tuple(value.placements)

    def hold_loaded(self, stored: ArraySpec, former: StoreArray | None, *, by_rows: bool) -> StoreArray:
        """Return the array that a checkpoint's is loaded as: `former`, which has its name, if that is alike; else by the rows
        of the ranks, unless it has none, or they fit no chunks."""
        if former is not None and (former.spec.shape, former.spec.dtype) == (stored.shape, stored.dtype):
            return former
        dims = stored.dims if len(stored.dims) == len(stored.shape) else ()
        spec = _spec(stored.name, stored.shape, stored.dtype, dims)
        array = self.hold(spec, by_rows=False)
        if by_rows and spec.shape:
            with contextlib.suppress(UsageError):
                array = self.hold(spec, by_rows=True)
        array = replace(array, is_torch="torch" in sys.modules)
        if not (array.is_torch and array.by_rows and self.mesh is not None):
            return array
        from torch.distributed.tensor import Shard

        return replace(array, placements=(Shard(0),))

    def distributed(self, local: Any, array: StoreArray) -> Any:
        """Return the DTensor that an array was put as, of this rank's part of it."""
        import torch
        from torch.distributed.tensor import DTensor

        shape = torch.Size(array.spec.shape)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, array.placements, run_check=False, shape=shape, stride=stride)


ALONE = Ranks()
"""This process and no other."""


def _spec(name: str, shape: tuple[int, ...], dtype: str, dims: tuple[str, ...]) -> ArraySpec:
    """Return the spec of an array that keeps its shape. Raises UsageError if there can be none."""
    try:
        return ArraySpec(name=name, shape=shape, dtype=dtype, keeps_shape=len(shape) not in (1, 2), dims=dims)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _grid(stored_shape: tuple[int, ...], shard_rows: int, dtype: str) -> Grid | None:
    """Return a grid whose shards have `shard_rows` rows; None if chunks would be too large, or waste too much."""
    grid = grid_of_rows(stored_shape, shard_rows)
    if grid is not None:
        return grid
    rows, row_numel = stored_shape[0], math.prod(stored_shape[1:])
    cols = make_grid((1, *stored_shape[1:]), 1, 1).chunk_cols
    heights = [d for d in range(1, min(shard_rows, MOST_CHUNK_NUMEL // row_numel) + 1) if shard_rows % d == 0]
    grids = [Grid(rows, row_numel, shard_rows, d, row_numel) for d in heights] + [
        Grid(rows, row_numel, shard_rows, 1, cols)
    ]
    layouts = [(layout_of(grid, 0, dtype), grid) for grid in grids]
    fitting = [grid for layout, grid in layouts if 3 * layout.slot_bytes <= 4 * layout.payload_bytes]
    return min(fitting, key=lambda grid: abs(math.log(grid.chunk_numel / MAX_CHUNK_NUMEL)), default=None)


def _board(rank: int, world_size: int, mesh: DeviceMesh | None, path: Path | None) -> Board | None:
    torch_dist = sys.modules.get("torch.distributed")
    has_group = torch_dist is not None and torch_dist.is_available() and torch_dist.is_initialized()
    members = f"{world_size}"
    if mesh is not None:
        members = "-".join(map(str, mesh.mesh.flatten().tolist()))
    elif torch_dist is not None and has_group:
        known = torch_dist.get_rank(), torch_dist.get_world_size()
        if known != (rank, world_size):
            raise UsageError(
                f"open_store(rank={rank}, world_size={world_size}): this is rank {known[0]} of {known[1]} of torch's process "
                "group; give ranks of a part of it as `mesh`"
            )
    if not has_group and path is None:
        return None
    with _lock:
        _opened[members] += 1
        name = f"ranks-{members}-{_opened[members]}"
    if has_group:
        return StoreBoard(f"/{name}")
    if path is None:
        return None
    files = Files()
    files.make_folder(path / RUN_FOLDER / name)
    return FolderBoard(path / RUN_FOLDER / name, files)
