"""The global norm of the gradients, bit-identical at every stage, on every tier and with any number of threads.

[Note: the order of sums]
A shard's elements are taken in flat order: cast to fp32, and the 2-norm of each row of 4,096 is taken in fp32 (the last row
may be shorter); the squares of the rows' norms are added in fp64, one after another. A parameter's sum adds those of its
shards in rank order; the total adds parameters in the order of their names. The bits of a norm over more than one row would
depend on the number of threads. torch computes the norms of fp32 rows in one pass without a temporary; its fp32 norm of
16-bit rows is many times slower than a cast, so those are cast first, in tiles that stay in cache.

On a device that is not the host the 2-norm of each shard is taken in fp32 by torch's kernel for lists of tensors, in
pieces whose number and position depend on the shard alone: other tensors in the list do not change its bits. The host reads
all norms at once, since each read waits for the device, and squares them in fp64.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import torch

from ..runtime.device import Copy, Scratch, Transfers, one_thread, side_by_side, threads_for, tile_numel

ROW_NUMEL = 4096
_TILE_ROWS = 128


def sums_of_squares(shards: Sequence[torch.Tensor]) -> list[float]:
    """Return the sum of squares of each shard's elements, 1-D of any floating-point dtype. See [Note: the order of sums]."""
    on_device = [values for values in shards if not values.is_cpu]
    device_sums = iter([norm * norm for norm in torch.stack(device_norms(on_device)).tolist()] if on_device else ())
    host_sums = iter(_sums_on_host([values for values in shards if values.is_cpu]))
    return [next(host_sums) if values.is_cpu else next(device_sums) for values in shards]


@dataclass(eq=False, repr=False)
class SumOfSquares:
    """The pending sum of squares of a shard, from `begin_squares`. Any thread may read it, before values on the host change."""

    _transfers: Transfers
    _values: torch.Tensor | None
    """Elements in host memory."""
    _norm: torch.Tensor | Copy | None = None
    """The norm of values on a device, or the copy of several norms, among which it has index `_index`."""
    _index: int = 0
    _sum: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def value(self, others: Iterable[SumOfSquares] = ()) -> float:
        """Return the sum, after a wait if necessary; the same wait completes the sums of `others`."""
        with self._lock:
            if isinstance(self._norm, Copy):
                norm = self._transfers.finish(self._norm)[self._index].item()
                self._sum, self._norm = norm * norm, None
            elif self._norm is not None:
                pending = {sums: sums._norm for sums in (self, *others) if isinstance(sums._norm, torch.Tensor)}
                for sums, norm in zip(pending, torch.stack([*pending.values()]).tolist(), strict=True):
                    sums._sum, sums._norm = norm * norm, None
            elif self._values is not None:
                (self._sum,), self._values = sums_of_squares([self._values]), None
        return self._sum


def begin_squares(shards: Sequence[torch.Tensor], transfers: Transfers, *, one_by_one: bool) -> list[SumOfSquares]:
    """Start summing the squares of each shard's elements: asynchronously on a device other than the host, on demand on
    the host. With `one_by_one`, any thread may read any of the sums; else only one thread may."""
    on_device = [values for values in shards if values.device.type != "cpu"]
    norms = device_norms(on_device)
    copy = None
    if on_device and one_by_one:
        copy = transfers.begin(transfers.empty_host(len(on_device), torch.float32), torch.stack(norms))
    pending = iter([SumOfSquares(transfers, None, copy or norm, index) for index, norm in enumerate(norms)])
    return [SumOfSquares(transfers, values) if values.device.type == "cpu" else next(pending) for values in shards]


def _sums_on_host(shards: Sequence[torch.Tensor]) -> list[float]:
    small = iter(_sums_of_small([values for values in shards if 0 < values.numel() <= ROW_NUMEL]))
    large = iter(_sums_of_large([values for values in shards if values.numel() > ROW_NUMEL]))
    return [next(large) if n > ROW_NUMEL else next(small) if n else 0.0 for n in map(torch.Tensor.numel, shards)]


def _sums_of_small(shards: Sequence[torch.Tensor]) -> list[float]:
    """Return the sums of shards of one row each; one call of torch takes their norms, one after another."""
    sums: list[float] = []
    for first in range(0, len(shards), _TILE_ROWS):
        rows = [values.float() for values in shards[first : first + _TILE_ROWS]]
        sums += [norm * norm for norm in torch.stack(torch._foreach_norm(rows)).tolist()]
    return sums


def _sums_of_large(shards: Sequence[torch.Tensor]) -> list[float]:
    threads = threads_for([values.numel() for values in shards])
    numel = tile_numel(threads)
    scratch, tiles = Scratch(), [torch.split(values, numel) for values in shards]
    norms: list[list[list[float]]] = [[[] for _ in shard_tiles] for shard_tiles in tiles]

    def take(position: tuple[int, int]) -> None:
        shard, index = position
        tile = tiles[shard][index]
        if tile.dtype != torch.float32:
            tile = scratch.take("tile", tile, torch.float32).copy_(tile)
        norms[shard][index] = _row_norms(tile)

    positions = ((shard, index) for shard, shard_tiles in enumerate(tiles) for index in range(len(shard_tiles)))
    with one_thread(torch.get_num_threads() <= 2):  # torch's threads would spin, and delay the prefetch
        side_by_side(take, positions, threads)
    return [_sum_of_squares(norm for tile in shard_norms for norm in tile) for shard_norms in norms]


def _sum_of_squares(norms: Iterable[float]) -> float:
    total = 0.0  # not sum(), whose bits differ from Python 3.12 on
    for norm in norms:
        total += norm * norm
    return total


def _row_norms(tile: torch.Tensor) -> list[float]:
    """Return the 2-norm of each row of a tile, 1-D fp32, which begins at the start of a row."""
    whole = tile.numel() // ROW_NUMEL * ROW_NUMEL
    norms: list[float] = []
    if whole:
        norms = torch.linalg.vector_norm(tile[:whole].view(-1, ROW_NUMEL), dim=1).tolist()
    if whole < tile.numel():
        norms.append(torch.linalg.vector_norm(tile[whole:]).item())
    return norms


def device_norms(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the 2-norm of each shard, 1-D of any floating-point dtype and all on one device, in fp32 on that device.

    Each is bit-identical to the norm computed alone: torch's kernel gets lists of one dtype and of aligned addresses,
    since those determine which values each of its threads takes.
    """
    norms: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(values.dtype for values in shards):
        indices = [index for index, values in enumerate(shards) if values.dtype == dtype]
        aligned = [v if v.data_ptr() % 16 == 0 else v.clone() for v in map(shards.__getitem__, indices)]
        norms |= zip(indices, torch._foreach_norm(aligned, 2, torch.float32), strict=True)
    return [norms[index] for index in range(len(shards))]


def norm_of(sums: Iterable[tuple[str, Sequence[float], float]]) -> float:
    """Return the norm, given (name, sums of squares of the shards in rank order, factor) of each gradient."""
    total = 0.0
    for _, shards, scale in sorted(sums, key=itemgetter(0)):
        parameter = 0.0
        for shard in shards:
            parameter += shard * (scale * scale)
        total += parameter
    return math.sqrt(total) if total >= 0 else math.nan


def scale_factor(norm: float, clip: float, loss_scale: float) -> float:
    """Return the factor by which gradients are multiplied, once, in fp32: 1 / loss scale and, with a positive `clip`, the
    factor that scales a larger norm down to it.

    `norm` is the norm of the unscaled gradients. If it is not finite the factor is 0 or NaN, as in torch's clip_grad_norm_.
    """
    if clip > 0 and not norm <= clip:
        return clip / (norm + 1e-6) / loss_scale
    return 1.0 / loss_scale
