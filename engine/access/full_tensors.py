"""Whole tensors out of every rank's rows, piece by piece in flat order, in bounded memory.

[Note: pieces]
The flat elements of an array are cut at the ends of shards, and into pieces of whole chunks, about 8 MiB. A piece's owner
reads it ahead of its turn and gives it to rank 0, or to all. Every rank goes through all pieces in the same order. If state
is not sharded, every rank has everything, and nothing is sent.

A rank that fails goes on with zeros, so that the others are not left waiting, and all ranks agree on errors every now
and then, and at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from zstore.format import Grid, make_grid, stored_shape
from zstore.ranks.world import World

from ..params.record import ParameterRecord

_PIECE_NUMEL = 2 * 1024 * 1024
_PIECES_AHEAD = 2
_AGREE_NUMEL = 32 * 1024 * 1024
"""Elements after which the ranks agree on errors: at most as many move in vain."""

Read = Callable[[], torch.Tensor]
"""Waits for a read and returns its elements, 1-D, on any device."""


@dataclass(frozen=True, kw_only=True)
class RankArray:
    """An array of which this rank has its rows."""

    record: ParameterRecord
    name: str
    """Of the array."""
    dtype: torch.dtype
    begin: Callable[[int, int], Read]
    """Begins to read local flat elements `[first, stop)` of this rank's shard."""
    shape: tuple[int, ...] | None = None
    """Of the whole array, if it is not the parameter's, and it is cut by its own rows."""

    def grid(self, num_ranks: int) -> Grid:
        """Return how it is cut over `num_ranks` ranks that share the state."""
        if self.shape is None:
            return self.record.state_grid
        return make_grid(stored_shape(self.shape), num_ranks)


@dataclass(frozen=True, kw_only=True)
class ArrayPiece:
    """Global flat elements from `first` on of the array of `source`."""

    source: RankArray
    first: int
    values: torch.Tensor
    """1-D, on the CPU."""

    @property
    def stop(self) -> int:
        """End of the elements."""
        return self.first + self.values.numel()


@dataclass(frozen=True)
class _Plan:
    source: RankArray
    grid: Grid
    shard: int
    first: int
    stop: int


class WholeArrays:
    """Gathers `sources`; `sharded` says whether each rank has its own rows alone. See [Note: pieces]."""

    def __init__(self, world: World, sources: Sequence[RankArray], *, sharded: bool) -> None:
        self._world = world
        self._sources = sources
        self._sharded = sharded and world.world_size > 1
        self._error: Exception | None = None

    def each(self, take: Callable[[ArrayPiece], None], *, rank0_only: bool) -> None:
        """Call `take` with every piece, in order, on every rank or on rank 0 alone (all ranks).

        Raises on every rank the error of `take` or of a read on any.
        """
        mine = (plan for plan in self._plans() if self._has(plan, rank0_only))
        ahead: deque[Read] = deque()
        since_numel = 0
        for plan in self._plans():
            values: torch.Tensor | None = None
            if self._has(plan, rank0_only):
                while len(ahead) <= _PIECES_AHEAD and (coming := next(mine, None)) is not None:
                    ahead.append(self._begin(coming))
                values = self._finish(ahead.popleft(), plan)
            if self._sharded:
                values = self._move(plan, values, rank0_only)
            if values is not None and self._error is None:
                self._hand_over(plan, values, take)
            since_numel += plan.stop - plan.first
            if since_numel >= _AGREE_NUMEL:
                self._world.raise_together(self._error)
                since_numel = 0
        self._world.raise_together(self._error)

    def _plans(self) -> Iterator[_Plan]:
        for source in self._sources:
            grid = source.grid(self._world.world_size if self._sharded else 1)
            step = max(1, _PIECE_NUMEL // grid.chunk_numel) * grid.chunk_numel
            for shard in range(grid.num_shards):
                valid = grid.shard_valid_numel(shard)
                for first in range(0, valid, step):
                    yield _Plan(source, grid, shard, first, min(valid, first + step))

    def _has(self, plan: _Plan, rank0_only: bool) -> bool:
        if self._sharded:
            return plan.shard == self._world.rank
        return self._world.rank == 0 or not rank0_only

    def _begin(self, plan: _Plan) -> Read:
        try:
            return plan.source.begin(plan.first, plan.stop)
        except Exception as error:
            raised = error

        def fail() -> torch.Tensor:
            raise raised

        return fail

    def _finish(self, read: Read, plan: _Plan) -> torch.Tensor:
        try:
            return read()
        except Exception as error:
            self._error = self._error or error
            return torch.zeros(plan.stop - plan.first, dtype=plan.source.dtype)

    def _move(self, plan: _Plan, values: torch.Tensor | None, rank0_only: bool) -> torch.Tensor | None:
        """Return the piece on the ranks that want it, None on others."""
        world = self._world
        if rank0_only and world.rank not in (0, plan.shard):
            return None
        if values is None:
            values = torch.empty(plan.stop - plan.first, dtype=plan.source.dtype, device=world.device)
        values = values.to(world.device)
        if rank0_only:
            world.transfer(values, plan.shard, 0)
            return values if world.rank == 0 else None
        world.broadcast(values, plan.shard)
        return values

    def _hand_over(self, plan: _Plan, values: torch.Tensor, take: Callable[[ArrayPiece], None]) -> None:
        first = plan.shard * plan.grid.shard_numel + plan.first
        try:
            take(ArrayPiece(source=plan.source, first=first, values=values.cpu()))
        except Exception as error:
            self._error = error
