"""What a rank sends to others in a step: predicted from shapes and the config, as the engine counts it. Pure.

[Note: bytes sent]
Of N ranks each sends (N - 1) times the bytes of one rank's rows of a parameter, padding included, in an all-gather and in a
reduce-scatter; an all-reduce is both. Parameters are gathered before their uses (stage 3) and after an update (what stays
gathered, from stage 1 on); gradients are reduced in each micro-batch (stages 2 and 3) or once a step. Rows that are
quantized are counted by `encoded_bytes`; in two hops (see quantized reductions) with g ranks in each of n groups it is
(g - 1) n + n - 1 times these. Not counted are agreements between ranks, of some bytes each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from zstore.format.arrays import numpy_dtype
from zstore.format.partition import Grid, make_grid
from zstore.tensors import dtype_name

from ..config.config import Config
from ..params.gradient_types import GradientTypes
from ..params.quantized import WEIGHT_BITS, encoded_bytes, is_matrix
from ..params.tensors import PRECISIONS
from .plan import Need

_FLOATING = {dtype_name(dtype): dtype for dtype in PRECISIONS.values()}


def sent_bytes(needs: Sequence[Need], config: Config, *, world_size: int, local_world_size: int) -> dict[str, int]:
    """Return the bytes that a rank sends in a step in which every parameter that is trained has a gradient, by kind of
    collective. See [Note: bytes sent]."""
    sent: Counter[str] = Counter()
    if world_size == 1:
        return {}
    wire = _Wire(config, world_size, quantized_group(config, world_size, local_world_size))
    for need in needs:
        if not need.numel:
            continue
        grid = make_grid((need.grid.rows, need.grid.row_numel), world_size)
        sent["all_gather"] += wire.gathered(need, grid)
        if need.slots is not None and not config.frozen:
            sent.update(wire.reduced(need, grid))
    return {kind: nbytes for kind, nbytes in sorted(sent.items()) if nbytes}


def quantized_group(config: Config, world_size: int, local_world_size: int) -> int:
    """Return how many ranks reduce quantized gradients among them before they travel between such groups; all of them where
    there is one hop."""
    size = config.zero.zero_hpz_partition_size
    size = size if size > 1 else local_world_size
    return size if size > 1 and world_size % size == 0 else world_size


class _Wire:
    """What travels, and in which form, as a config says."""

    def __init__(self, config: Config, world_size: int, group_size: int) -> None:
        zero = config.zero
        self._others = world_size - 1
        self._stage = config.stage
        self._forwards = 1 if config.frozen else config.batch.accumulation_steps
        self._scatter = zero.reduce_scatter or self._stage == 3
        self._types = GradientTypes.of(config, world_size)
        self._weights = zero.zero_quantized_weights
        self._bits = config.own.quantized_gradient_bits if zero.zero_quantized_gradients else None
        groups = world_size // group_size
        self._hops = (group_size - 1) * groups + groups - 1

    def gathered(self, need: Need, grid: Grid) -> int:
        """Return the bytes sent for a parameter's values."""
        rows = grid.shard_numel * numpy_dtype(need.dtype).itemsize
        if not need.stays_gathered:
            if self._weights and _is_quantized(need, grid):
                rows = encoded_bytes(grid.shard_numel, WEIGHT_BITS)
            return need.fetches * self._forwards * self._others * rows
        updated = need.slots is not None and self._stage > 0
        return self._others * rows if updated else 0

    def reduced(self, need: Need, grid: Grid) -> dict[str, int]:
        """Return the bytes sent for a parameter's gradient, by kind."""
        rows = grid.shard_numel * self._types.reduced(_FLOATING[need.dtype]).itemsize
        by_unit = self._stage >= 2
        mine = self._others * rows
        if self._bits is not None and by_unit and _is_quantized(need, grid):
            mine = self._hops * encoded_bytes(grid.shard_numel, self._bits)
        times = self._forwards if by_unit else 1
        if self._stage > 0 and self._scatter:
            return {"reduce_scatter": times * mine}
        return {"all_reduce": times * (mine + self._others * rows)}


def _is_quantized(need: Need, grid: Grid) -> bool:
    return need.dtype in _FLOATING and is_matrix(grid)
