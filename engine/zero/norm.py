"""The global norm of the gradients, the same bits at every stage, tier and number of threads.

[Note: the order of sums]
A shard's elements are taken in flat order: cast to fp32, and the 2-norm of each row of 4,096 is taken in fp32 (the last
row may be shorter); the squares of the rows' norms are added in fp64, one after another. A parameter's sum is that of
its shards in rank order; the total adds parameters in the order of their names. A norm over more than a row would give
other bits with other numbers of threads. torch takes the norms of fp32 rows in one pass without a temporary; of 16-bit
rows in fp32 it is many times slower than the cast, so those are cast first, in tiles that stay in cache.

On a device that is not the host the squares of a row are added by halves: the second half to the first, until one is left,
with zeros behind a short row; these sums are added in fp64. The device's own norm of a row has other bits for other
numbers of rows, and so may square roots: torch does not promise that they are rounded correctly. Rows of all parameters
are taken together, and the host looks at their sums once: each look waits for the device.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import torch

from zstore.format import Array
from zstore.ranks.world import World
from zstore.store import MEMORY_TILE_NUMEL

from ..device import Copy, Room, Transfers, one_thread, side_by_side, threads_for, tile_numel
from ..params.record import ParameterRecord
from ..params.sharding import Sharding
from .gradients import Gradients

ROW_NUMEL = 4096
_TILE_ROWS = 128
_DEVICE_TILE_ROWS = 4096


def sum_of_squares(values: torch.Tensor) -> float:
    """Return the sum of squares of a shard's elements, 1-D of any floating type. See [Note: the order of sums]."""
    return sums_of_squares([values])[0]


def sums_of_squares(shards: Sequence[torch.Tensor]) -> list[float]:
    """Return the sum of squares of each shard's elements; see `sum_of_squares`."""
    elsewhere = iter(sums_by_halves([values for values in shards if values.device.type != "cpu"]))
    here = [values for values in shards if values.device.type == "cpu"]
    sums = iter(_sums_on_host(here))
    return [next(sums) if values.device.type == "cpu" else next(elsewhere) for values in shards]


class SumOfSquares:
    """The sum of squares of a shard's elements, which nobody waits for yet: a device that is not the host adds them behind
    the caller, and the host when it is asked. Any thread may ask, before it changes `values`."""

    def __init__(self, values: torch.Tensor, transfers: Transfers) -> None:
        self._lock = threading.Lock()
        self._values: torch.Tensor | None = values
        self._copy: Copy | None = None
        self._transfers = transfers
        self._sum = 0.0
        if values.device.type != "cpu" and values.numel():
            rows = _row_sums([values])
            self._copy = transfers.begin(transfers.streams.empty_host(rows.numel(), rows.dtype), rows)
            self._values = None

    def value(self) -> float:
        """Return the sum; the host waits for it if it is not there yet."""
        with self._lock:
            if self._copy is not None:
                self._sum, self._copy = _added_up(self._transfers.finish(self._copy).numpy()), None
            elif self._values is not None:
                self._sum, self._values = sum_of_squares(self._values), None
        return self._sum


def _sums_on_host(shards: Sequence[torch.Tensor]) -> list[float]:
    small = iter(_sums_of_small([values for values in shards if 0 < values.numel() <= ROW_NUMEL]))
    large = iter(_sums_of_large([values for values in shards if values.numel() > ROW_NUMEL]))
    return [next(large) if n > ROW_NUMEL else next(small) if n else 0.0 for n in map(torch.Tensor.numel, shards)]


def _sums_of_small(shards: Sequence[torch.Tensor]) -> list[float]:
    """Return the sums of shards of one row each, of which torch takes the norms one after another in one call."""
    sums: list[float] = []
    for first in range(0, len(shards), _TILE_ROWS):
        rows = [values.float() for values in shards[first : first + _TILE_ROWS]]
        sums += [norm * norm for norm in torch.stack(torch._foreach_norm(rows)).tolist()]
    return sums


def _sums_of_large(shards: Sequence[torch.Tensor]) -> list[float]:
    threads = threads_for([values.numel() for values in shards])
    numel = tile_numel(threads)
    room, tiles = Room(), [torch.split(values, numel) for values in shards]
    norms: list[list[list[float]]] = [[[] for _ in each] for each in tiles]

    def take(place: tuple[int, int]) -> None:
        shard, number = place
        tile = tiles[shard][number]
        if tile.dtype != torch.float32:
            tile = room.take("tile", tile, torch.float32).copy_(tile)
        norms[shard][number] = _row_norms(tile)

    places = ((shard, number) for shard, each in enumerate(tiles) for number in range(len(each)))
    with one_thread(
        numel == MEMORY_TILE_NUMEL
    ):  # torch's few, which spin, would take the processors from the read-ahead
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


def sums_by_halves(shards: Sequence[torch.Tensor]) -> list[float]:
    """Return the sum of squares of each shard's elements, all on one device, as a device that is not the host adds them."""
    rows, stop, sums = _row_sums(shards).cpu().numpy(), 0, list[float]()
    for values in shards:
        first, stop = stop, stop + _num_rows(values)
        sums.append(_added_up(rows[first:stop]))
    return sums


def _num_rows(values: torch.Tensor) -> int:
    return -(-values.numel() // ROW_NUMEL)


def _added_up(rows: Array) -> float:
    """Return the sum in fp64, one row after another."""
    return float(np.cumsum(rows, dtype=np.float64)[-1]) if len(rows) else 0.0


def _row_sums(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sums of squares of all rows, one after another, on the device."""
    found: list[torch.Tensor] = []
    parts: list[torch.Tensor] = []
    used = 0
    for part in chain.from_iterable(torch.split(v, _DEVICE_TILE_ROWS * ROW_NUMEL) for v in shards if v.numel()):
        if used + _num_rows(part) > _DEVICE_TILE_ROWS:
            found.append(_rows_by_halves(parts))
            parts, used = [], 0
        parts.append(part)
        used += _num_rows(part)
    if parts:
        found.append(_rows_by_halves(parts))
    return torch.cat(found) if found else torch.empty(0)


def _rows_by_halves(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of each row of `parts`, which begin at rows."""
    numels = [_num_rows(part) * ROW_NUMEL for part in parts]
    tile = torch.zeros(sum(numels), device=parts[0].device)
    places = zip(torch.split(tile, numels), parts, strict=True)
    torch._foreach_copy_([place[: part.numel()] for place, part in places], parts)
    squares = tile.mul_(tile).view(-1, ROW_NUMEL)
    while squares.shape[-1] > 1:
        half = squares.shape[-1] // 2
        squares = squares[:, :half].add_(squares[:, half:])
    return squares[:, 0].clone()  # not a view, which would keep the tile


def norm_of_sums(sums: Sequence[tuple[str, Sequence[float]]]) -> float:
    """Return the norm from (name, sum of squares of each shard in rank order), one entry a parameter."""
    total = 0.0
    for _, shards in sorted(sums, key=lambda item: item[0]):
        parameter = 0.0
        for shard in shards:
            parameter += shard
        total += parameter
    return math.sqrt(total) if total >= 0 else math.nan


def counted(record: ParameterRecord, rows: torch.Tensor) -> torch.Tensor:
    """Return those of this rank's rows whose squares it sums: all, or one shard of a copy's. See [Note: copies]."""
    first, stop = record.counted_range
    return rows if stop - first == rows.numel() else rows[first:stop]


def sums_over_ranks(
    records: Sequence[ParameterRecord], gradients: Gradients, world: World, *, sharding: Sharding
) -> dict[ParameterRecord, Sequence[float]]:
    """Return the sum of squares of each shard, in rank order, of the averaged gradients, as they are scaled (all ranks)."""
    here = [record for record in records if gradients.has(record)]
    if not here:
        return {}
    sharded = sharding.optimizer_state
    cut = [[_known_or_rows(record, gradients)] if sharded else _shards(record, gradients) for record in here]
    sums = iter(sums_of_squares([one for shards in cut for one in shards if isinstance(one, torch.Tensor)]))
    found = [[next(sums) if isinstance(one, torch.Tensor) else one for one in shards] for shards in cut]
    if not sharded:  # every rank has all rows
        return dict(zip(here, found, strict=True))
    mine = torch.tensor([shards[0] for shards in found], dtype=torch.float64, device=world.device)
    everyone = torch.empty(world.world_size * len(here), dtype=torch.float64, device=world.device)
    world.all_gather(everyone, mine, kind="control")
    # Of rank r of copy c: shard r copies + c.
    columns = everyone.view(sharding.num_copies, sharding.copy_size, -1).permute(2, 1, 0).flatten(1).tolist()
    return dict(zip(here, columns, strict=True))


def norm_of(sums: Mapping[ParameterRecord, Sequence[float]], scales: Mapping[ParameterRecord, float]) -> float:
    """Return the norm from sums of squares of each shard, and the factors of the gradients, 1 by default."""
    squares = {record: scale * scale for record, scale in scales.items()}
    return norm_of_sums(
        [
            (record.name, [one * squares[record] for one in shards] if record in squares else shards)
            for record, shards in sums.items()
        ]
    )


def _known_or_rows(record: ParameterRecord, gradients: Gradients) -> float | torch.Tensor:
    """Return the sum of squares of this rank's rows if it is known, else the rows."""
    known = gradients.squares(record)
    if known is not None:
        return known
    rows = gradients.owned(record)
    return 0.0 if rows is None else counted(record, rows)


def _shards(record: ParameterRecord, gradients: Gradients) -> list[float | torch.Tensor]:
    """Return the result of `_known_or_rows` for every rank's shard of a gradient that is whole here."""
    step = max(record.grid.shard_numel, 1)
    if record.numel <= step:
        return [_known_or_rows(record, gradients)]
    rows = gradients.owned(record)
    return [] if rows is None else [rows[first : first + step] for first in range(0, record.numel, step)]


def scale_factor(norm: float, clip: float, loss_scale: float) -> float:
    """Return the factor of the gradients, applied once, in fp32: 1 / loss scale, and down to norm `clip` if it is
    set.

    `norm` is that of the unscaled gradients. If it is not finite the factor is 0 or NaN, as in torch's clip_grad_norm_.
    """
    if clip > 0 and not norm <= clip:
        return clip / (norm + 1e-6) / loss_scale
    return 1.0 / loss_scale
