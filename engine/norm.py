"""The global norm of the gradients, the same bits at every stage, tier and number of threads.

[Note: the order of sums]
A shard's elements are taken in flat order: cast to fp32, squared, summed in rows of 4,096 in fp32 (the last row may be
shorter); the rows are added in fp64, one after another. A parameter's sum is that of its shards in rank order; the
total adds parameters in the order of their names. One large dot product would give other bits with other numbers of
threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zstore.dist import World

from .gradients import Gradients
from .parameters import ParameterRecord

ROW_NUMEL = 4096
_TILE_ROWS = 32


def sum_of_squares(values: torch.Tensor) -> float:
    """Return the sum of squares of a shard's elements, 1-D of any floating type. See [Note: the order of sums]."""
    rows: list[float] = []
    for first in range(0, values.numel(), _TILE_ROWS * ROW_NUMEL):
        tile = values[first : first + _TILE_ROWS * ROW_NUMEL].float()
        squares = tile * tile if tile.dtype == values.dtype else tile.mul_(tile)
        whole = squares.numel() // ROW_NUMEL * ROW_NUMEL
        rows += squares[:whole].view(-1, ROW_NUMEL).sum(dim=1).tolist()
        if whole < squares.numel():
            rows.append(float(squares[whole:].sum()))
    total = 0.0
    for row in rows:
        total += row
    return total


def norm_of_sums(sums: Sequence[tuple[str, Sequence[float]]]) -> float:
    """Return the norm from (name, sum of squares of each shard in rank order), one entry a parameter."""
    total = 0.0
    for _, shards in sorted(sums, key=lambda item: item[0]):
        parameter = 0.0
        for shard in shards:
            parameter += shard
        total += parameter
    return math.sqrt(total) if total >= 0 else math.nan


def global_norm(
    records: Sequence[ParameterRecord], gradients: Gradients, world: World, *, state_is_sharded: bool
) -> float:
    """Return the norm of the averaged gradients over all parameters and ranks, as they are scaled (all ranks)."""
    here = [record for record in records if gradients.has(record)]
    if not here:
        return 0.0
    if not state_is_sharded:  # every rank has all rows
        return norm_of_sums([(record.name, _sums_of_shards(record, gradients)) for record in here])
    mine = torch.tensor([_sum(record, gradients) for record in here], dtype=torch.float64, device=world.device)
    everyone = torch.empty(world.world_size * len(here), dtype=torch.float64, device=world.device)
    world.all_gather(everyone, mine, kind="control")
    columns = everyone.view(world.world_size, -1).t().tolist()
    return norm_of_sums([(record.name, shards) for record, shards in zip(here, columns, strict=True)])


def _sum(record: ParameterRecord, gradients: Gradients) -> float:
    known = gradients.squares(record)
    if known is not None:
        return known
    rows = gradients.owned(record)
    return 0.0 if rows is None else sum_of_squares(rows)


def _sums_of_shards(record: ParameterRecord, gradients: Gradients) -> list[float]:
    step = max(record.grid.shard_numel, 1)
    if record.numel <= step:
        return [_sum(record, gradients)]
    rows = gradients.owned(record)
    return (
        [] if rows is None else [sum_of_squares(rows[first : first + step]) for first in range(0, record.numel, step)]
    )


def scale_factor(norm: float, clip: float, loss_scale: float) -> float:
    """Return what the gradients are multiplied with, once, in fp32: 1 / loss scale, and down to norm `clip` if it is
    set.

    `norm` is that of the unscaled gradients.
    """
    if clip > 0 and norm > clip:
        return clip / (norm + 1e-6) / loss_scale
    return 1.0 / loss_scale
