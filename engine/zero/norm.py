"""The global norm of the gradients, the same bits at every stage, tier and number of threads.

[Note: the order of sums]
A shard's elements are taken in flat order: cast to fp32, and the 2-norm of each row of 4,096 is taken in fp32 (the last row
may be shorter); the squares of the rows' norms are added in fp64, one after another. A parameter's sum adds its shards' in
rank order; the total adds parameters in the order of their names. A norm over more than a row would give other bits with
other numbers of threads. torch takes the norms of fp32 rows in one pass without a temporary; of 16-bit rows in fp32 it is
many times slower than the cast, so those are cast first, in tiles that stay in cache.

On a device that is not the host the 2-norm of each shard is taken in fp32 by torch's kernel for lists of tensors, in
pieces whose number and place depend on the shard alone: other tensors in the list do not change its bits. The host squares
them in fp64, and looks at all of them once: each look waits for the device.
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
    """Return the sum of squares of each shard's elements, 1-D of any floating type. See [Note: the order of sums]."""
    on_device = [values for values in shards if not values.is_cpu]
    elsewhere = iter([norm * norm for norm in torch.stack(device_norms(on_device)).tolist()] if on_device else ())
    sums = iter(_sums_on_host([values for values in shards if values.is_cpu]))
    return [next(sums) if values.is_cpu else next(elsewhere) for values in shards]


@dataclass(eq=False, repr=False)
class SumOfSquares:
    """The pending sum of squares of a shard's elements, from `begin_squares`. Any thread may call it, before it changes the
    values on the host."""

    _transfers: Transfers
    _values: torch.Tensor | None
    """Elements in host memory."""
    _norm: torch.Tensor | Copy | None = None
    """The norm of values on a device, or the copy of several norms with it at `_place`."""
    _place: int = 0
    _sum: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def value(self, others: Iterable[SumOfSquares] = ()) -> float:
        """Return the sum, waiting for it if necessary, and together with it for the sums of `others`."""
        with self._lock:
            if isinstance(self._norm, Copy):
                norm = self._transfers.finish(self._norm)[self._place].item()
                self._sum, self._norm = norm * norm, None
            elif self._norm is not None:
                waiting = {one: one._norm for one in (self, *others) if isinstance(one._norm, torch.Tensor)}
                for one, norm in zip(waiting, torch.stack([*waiting.values()]).tolist(), strict=True):
                    one._sum, one._norm = norm * norm, None
            elif self._values is not None:
                (self._sum,), self._values = sums_of_squares([self._values]), None
        return self._sum


def begin_squares(shards: Sequence[torch.Tensor], transfers: Transfers, *, one_by_one: bool) -> list[SumOfSquares]:
    """Start summing the squares of each shard's elements: a device other than the host does it asynchronously, the host on
    demand. Without `one_by_one` one thread calls."""
    on_device = [values for values in shards if values.device.type != "cpu"]
    norms = device_norms(on_device)
    copy = None
    if on_device and one_by_one:
        copy = transfers.begin(transfers.empty_host(len(on_device), torch.float32), torch.stack(norms))
    made = iter([SumOfSquares(transfers, None, copy or norm, place) for place, norm in enumerate(norms)])
    return [SumOfSquares(transfers, one) if one.device.type == "cpu" else next(made) for one in shards]


def _sums_on_host(shards: Sequence[torch.Tensor]) -> list[float]:
    small = iter(_sums_of_small([values for values in shards if 0 < values.numel() <= ROW_NUMEL]))
    large = iter(_sums_of_large([values for values in shards if values.numel() > ROW_NUMEL]))
    return [next(large) if n > ROW_NUMEL else next(small) if n else 0.0 for n in map(torch.Tensor.numel, shards)]


def _sums_of_small(shards: Sequence[torch.Tensor]) -> list[float]:
    """Return the sums of shards of one row each, whose norms torch takes one after another in one call."""
    sums: list[float] = []
    for first in range(0, len(shards), _TILE_ROWS):
        rows = [values.float() for values in shards[first : first + _TILE_ROWS]]
        sums += [norm * norm for norm in torch.stack(torch._foreach_norm(rows)).tolist()]
    return sums


def _sums_of_large(shards: Sequence[torch.Tensor]) -> list[float]:
    threads = threads_for([values.numel() for values in shards])
    numel = tile_numel(threads)
    room, tiles = Scratch(), [torch.split(values, numel) for values in shards]
    norms: list[list[list[float]]] = [[[] for _ in each] for each in tiles]

    def take(place: tuple[int, int]) -> None:
        shard, number = place
        tile = tiles[shard][number]
        if tile.dtype != torch.float32:
            tile = room.take("tile", tile, torch.float32).copy_(tile)
        norms[shard][number] = _row_norms(tile)

    places = ((shard, number) for shard, each in enumerate(tiles) for number in range(len(each)))
    with one_thread(torch.get_num_threads() <= 2):  # so few threads spin, and would delay the read-ahead
        side_by_side(take, places, threads)
    return [_sum_of_squares(norm for tile in each for norm in tile) for each in norms]


def _sum_of_squares(norms: Iterable[float]) -> float:
    total = 0.0  # not sum(), which from Python 3.12 on gives other bits
    for norm in norms:
        total += norm * norm
    return total


def _row_norms(tile: torch.Tensor) -> list[float]:
    """Return the 2-norm of each row of a tile, 1-D fp32, that begins at a row."""
    whole = tile.numel() // ROW_NUMEL * ROW_NUMEL
    norms: list[float] = []
    if whole:
        norms = torch.linalg.vector_norm(tile[:whole].view(-1, ROW_NUMEL), dim=1).tolist()
    if whole < tile.numel():
        norms.append(torch.linalg.vector_norm(tile[whole:]).item())
    return norms


def device_norms(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the 2-norm of each shard, 1-D of any floating type and all on one device, in fp32 on that device.

    Each has the same bits as if computed alone: a list that torch's kernel takes is of one type, and the values that
    each thread of it takes depend on the address.
    """
    found: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(values.dtype for values in shards):
        places = [place for place, values in enumerate(shards) if values.dtype == dtype]
        aligned = [v if v.data_ptr() % 16 == 0 else v.clone() for v in map(shards.__getitem__, places)]
        found |= zip(places, torch._foreach_norm(aligned, 2, torch.float32), strict=True)
    return [found[place] for place in range(len(shards))]


def norm_of(sums: Iterable[tuple[str, Sequence[float], float]]) -> float:
    """Return the norm from (name, sum of squares of each shard in rank order, factor of the gradient), one entry a
    parameter."""
    total = 0.0
    for _, shards, scale in sorted(sums, key=itemgetter(0)):
        parameter = 0.0
        for shard in shards:
            parameter += shard * (scale * scale)
        total += parameter
    return math.sqrt(total) if total >= 0 else math.nan


def scale_factor(norm: float, clip: float, loss_scale: float) -> float:
    """Return the factor of the gradients, applied once, in fp32: 1 / loss scale, and down to norm `clip` if it is
    set.

    `norm` is the norm of the unscaled gradients. If it is not finite the factor is 0 or NaN, as in torch's clip_grad_norm_.
    """
    if clip > 0 and not norm <= clip:
        return clip / (norm + 1e-6) / loss_scale
    return 1.0 / loss_scale
