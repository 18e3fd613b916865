"""The ranks that share a store's arrays: this process's number, and agreement on checkpoints.

[Note: rows of ranks]
N ranks hold the rows of an array as torch's `Shard(0)` cuts them: ceil(rows / N) each, then the remainder, then none. Each
rank's rows are one shard of the Zarr array, so that a checkpoint takes its file as it is; those of arrays under 64 KiB are
merged into one. Chunks end with ranks' rows: if no chunk of a useful size does, `put` raises an error.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..format.arrays import ArraySpec
from ..format.partition import MAX_CHUNK_NUMEL, MOST_CHUNK_NUMEL, WHOLE_BYTES, Grid, grid_of_rows, make_grid
from ..format.shardfile import layout_of
from ..io.files import Files
from ..ranks.agreement import Agreement
from ..ranks.rendezvous import Board, FolderBoard, StoreBoard
from ..store.runfolder import RUN_FOLDER
from ..store.tiers import LocalShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_opened: Counter[str] = Counter()
"""Stores that this process opened with others, by their ranks: all ranks open them in the same order."""
_lock = threading.Lock()


@dataclass(frozen=True)
class HeldArray:
    """A rank's part of an array: all of it, or its rows."""

    spec: ArraySpec
    grid: Grid
    shard: int
    first: int
    """Its first row, along the array's first extent."""
    stop: int
    by_rows: bool
    """Whether others have other rows."""

    @property
    def local(self) -> LocalShard:
        """The shard."""
        return LocalShard(self.spec, self.grid, self.shard)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rank's part."""
        return (self.stop - self.first, *self.spec.shape[1:]) if self.spec.shape else ()

    @property
    def numel(self) -> int:
        """Elements of the rank's part."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the rank's part."""
        return self.numel * self.spec.itemsize

    @property
    def grid_in_checkpoint(self) -> Grid:
        """How the array is cut in a checkpoint of all ranks."""
        is_small = self.by_rows and self.spec.nbytes < WHOLE_BYTES
        return make_grid(self.spec.stored_shape, 1, 1) if is_small else self.grid

    def flat_rows(self, rows: slice | None) -> tuple[int, int, tuple[int, ...]]:
        """Return (first, stop, shape) of the flat elements of `rows`, counted in the whole array, among those that the rank
        holds; of all these by default. Raises UsageError unless they are consecutive rows of this rank."""
        if rows is None:
            return 0, self.numel, self.shape
        spec = self.spec
        is_slice = isinstance(rows, slice)  # untyped callers may pass anything
        if not spec.shape or not is_slice or rows.step not in (None, 1):
            raise UsageError(
                f"array {spec.name!r} of shape {spec.shape}: expected rows of its first extent as a slice without a step, got "
                f"{rows!r}; `store[{spec.name!r}]` takes any of numpy's basic indices"
            )
        low, high, _ = rows.indices(spec.shape[0])
        row_numel = math.prod(spec.shape[1:])
        shape = (max(high - low, 0), *spec.shape[1:])
        if low >= high:
            return 0, 0, shape
        self.require(low * row_numel, high * row_numel)
        return (low - self.first) * row_numel, (high - self.first) * row_numel, shape

    def require(self, first: int, stop: int) -> int:
        """Return the rank's first element, counted in the whole array. Raises UsageError unless it holds `[first, stop)`."""
        row_numel = math.prod(self.spec.shape[1:])
        if first < stop and not self.first * row_numel <= first < stop <= self.stop * row_numel and self.by_rows:
            raise UsageError(
                f"array {self.spec.name!r}: this rank has rows [{self.first}, {self.stop}) of {self.spec.shape[0]}, others "
                "have the rest: `zstore.open_checkpoint` reads any rows of a checkpoint"
            )
        return self.first * row_numel


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

    def hold(self, spec: ArraySpec, *, by_rows: bool) -> HeldArray:
        """Return this rank's part of an array. Raises UsageError for rows that no chunks fit."""
        stored = spec.stored_shape
        if not by_rows or self.world_size == 1:
            rows = spec.shape[0] if spec.shape else 1
            return HeldArray(spec, make_grid(stored, 1, 1), 0, 0, rows, by_rows=False)
        first, stop = self.rows(spec.shape[0])
        each = -(-spec.shape[0] // self.world_size)
        grid = _grid(stored, each, spec.dtype) if spec.numel else make_grid(stored, 1, 1)
        if grid is None:
            raise UsageError(
                f"array {spec.name!r} of shape {spec.shape}: {each} rows a rank cannot be cut into chunks of a useful size; "
                f"make its first extent a multiple of {16 * self.world_size}, or put each rank's rows under a name of their own"
            )
        return HeldArray(spec, grid, self.rank, first, stop, by_rows=True)

    def held_as(self, local: LocalShard) -> HeldArray:
        """Return this rank's part of the array of a shard that `hold` gave."""
        whole = self.hold(local.spec, by_rows=False)
        return whole if whole.local == local else self.hold(local.spec, by_rows=True)


ALONE = Ranks()
"""This process and no other."""


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
