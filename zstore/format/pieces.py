"""How the pieces of a tensor that ranks hold become the shards and chunks of an array. Pure.

[Note: pieces and chunks]
A chunk has one checksum, so one rank writes it. If all pieces of a tensor are whole chunks of some grid, each rank
writes the chunks that it holds, into whichever shard file they belong to: rows that FSDP cuts, evenly or not, and
experts. If they are not (columns, and rows whose cuts fit no chunks of a useful size), the ranks put their pieces
into files, and each shard is assembled by one rank, its owner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .arrays import ArraySpec
from .boxes import Box, cut_numel
from .partition import (
    CHUNKS_PER_SHARD,
    MAX_CHUNK_NUMEL,
    MAX_CHUNKS_PER_SHARD,
    MIN_CHUNK_NUMEL,
    MOST_CHUNK_NUMEL,
    Grid,
    grid_of_rows,
    make_grid,
)
from .shardfile import layout_of

_LEAST_RUN_BYTES = 64 * 1024
"""Least bytes of a run that is written by itself, unless runs are few."""
_FEW = 4


@dataclass(frozen=True, kw_only=True)
class ArrayLayout:
    """How an array is written."""

    spec: ArraySpec
    grid: Grid
    boxes: tuple[Box, ...] = ()
    """All pieces, if pieces pass through files; empty if every rank writes its own chunks."""

    @property
    def passes_through_files(self) -> bool:
        """Whether shards are assembled by their owners."""
        return bool(self.boxes)


def lay_out(spec: ArraySpec, boxes: Sequence[Box], world_size: int) -> ArrayLayout:
    """Return how an array in `boxes`, which tile it, is written. See [Note: pieces and chunks]."""
    pieces = [box for box in boxes if box.numel]
    if len(pieces) <= 1:
        return ArrayLayout(spec=spec, grid=make_grid(spec.stored_shape, 1))
    grid = _grid_of_pieces(spec, pieces, world_size) or _fitting_grid(spec, pieces, world_size)
    if grid is not None and _is_worth_it(grid, spec, pieces):
        return ArrayLayout(spec=spec, grid=grid)
    return ArrayLayout(spec=spec, grid=make_grid(spec.stored_shape, world_size), boxes=tuple(pieces))


def _grid_of_pieces(spec: ArraySpec, pieces: Sequence[Box], world_size: int) -> Grid | None:
    """Return the grid whose shards are the pieces; None if they are not rows, as many each but for the last, of a rank each."""
    shard_rows = max(box.numel for box in pieces) // spec.row_numel
    if len(pieces) > world_size or cut_numel(pieces) != shard_rows * spec.row_numel:
        return None
    return grid_of_rows(spec.stored_shape, shard_rows)


def _fitting_grid(spec: ArraySpec, pieces: Sequence[Box], world_size: int) -> Grid | None:
    """Return a grid of which all pieces are whole chunks, with chunks near the usual size; None if there is none."""
    rows, row_numel = spec.rows, spec.row_numel
    cut = cut_numel(pieces)
    least_rows = -(-rows // world_size)
    target = min(max(least_rows * row_numel // CHUNKS_PER_SHARD, MIN_CHUNK_NUMEL), MAX_CHUNK_NUMEL)
    if cut % row_numel:
        cols = _best_divisor(math.gcd(cut, row_numel), 1, target)
        return None if cols is None else Grid(rows, row_numel, least_rows, 1, cols)
    chunk_rows = _best_divisor(cut // row_numel, row_numel, target)
    if chunk_rows is None:
        return None
    cols = row_numel
    if chunk_rows == 1 and row_numel > MAX_CHUNK_NUMEL:
        cols = _best_divisor(row_numel, 1, target) or row_numel
    return Grid(rows, row_numel, -(-least_rows // chunk_rows) * chunk_rows, chunk_rows, cols)


def _best_divisor(number: int, each_numel: int, target: int) -> int | None:
    """Return the divisor d of `number` for which `d * each_numel` elements are nearest to `target`, as ratios go."""
    root = math.isqrt(number)
    small = [d for d in range(1, root + 1) if number % d == 0]
    fitting = [d for d in (*small, *(number // d for d in small)) if d * each_numel <= MOST_CHUNK_NUMEL]
    return min(fitting, key=lambda d: abs(math.log(d * each_numel / target)), default=None)


def _is_worth_it(grid: Grid, spec: ArraySpec, pieces: Sequence[Box]) -> bool:
    layout = layout_of(grid, 0, spec.dtype)
    num_chunks = grid.num_shards * layout.num_chunks
    num_runs = sum(box.num_runs for box in pieces)
    run_bytes = min(box.run_numel for box in pieces) * spec.itemsize
    few = _FEW * len(pieces)
    return (
        layout.num_chunks <= MAX_CHUNKS_PER_SHARD
        and (num_chunks <= few or 3 * layout.slot_bytes <= 4 * layout.payload_bytes)
        and (num_runs <= few or run_bytes >= _LEAST_RUN_BYTES)
    )
