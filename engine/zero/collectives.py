"""Collectives over the rows of many parameters: buckets, and the mean in a fixed order.

[Note: buckets]
A bucket is a matrix [world, cols] whose row r holds rank r's rows of several parameters side by side, padding
included. A parameter larger than a bucket is cut at shard columns; no size is an error. On gloo a bucket has at most
4 Mi elements, whatever the config allows: larger ones are no faster, and their memory is new to the process in every
step, so that each of its pages costs a fault (30 M fp32 parameters at stage 0: a quarter of a step's processor time).

[Note: the mean]
On gloo a reduce-scatter is an all-to-all of rows, then a sum in rank order in fp32, times 1/world, rounded once to the
type of the exchange: the same bits whatever arrives first, at every stage. An all-reduce is that and an
all-gather. On other backends it is the backend's own reduction. Bytes sent by a rank: (world - 1) / world of the bucket
each way.

An all-reduce of two ranks needs no such order; see [Note: the mean of two].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zstore.format import ALIGN_NUMEL, Grid
from zstore.ranks.world import Kind, Work, World

from ..params.record import ParameterRecord

TypeOf = Callable[[ParameterRecord], torch.dtype]
GridOf = Callable[[ParameterRecord], Grid]
"""How the ranks of a collective divide a parameter."""
Rows = Callable[[ParameterRecord], torch.Tensor]
"""Gives this rank's rows of a parameter with padding, 1-D [shard_numel]."""

_SUM_NUMEL = 64 * 1024
_ALONE_NUMEL = 64 * 1024
"""Elements of a gradient from which on it is reduced alone."""
_IN_PLACE_AT_ONCE = 4
_GLOO_BUCKET_NUMEL = 4 * 1024 * 1024


@dataclass(frozen=True)
class Segment:
    """Columns `[first, stop)` of every shard of a parameter, at `offset` in each row of its bucket."""

    record: ParameterRecord
    first: int
    stop: int
    offset: int
    shard_numel: int
    """Elements of a shard, padding included."""

    @property
    def columns(self) -> slice:
        """Offset of the segment in a row of the bucket."""
        return slice(self.offset, self.offset + self.stop - self.first)


@dataclass(frozen=True)
class Bucket:
    """Segments that are exchanged together. See [Note: buckets]."""

    segments: tuple[Segment, ...]
    cols: int
    dtype: torch.dtype


def bucket_limit(world: World, limit_numel: int) -> int:
    """Return the most elements of a bucket if the config allows `limit_numel`. See [Note: buckets]."""
    return min(limit_numel, _GLOO_BUCKET_NUMEL) if world.backend == "gloo" else limit_numel


def plan_buckets(
    records: Iterable[ParameterRecord],
    world_size: int,
    limit_numel: int,
    dtype_of: TypeOf = lambda record: record.dtype,
    grid_of: GridOf = lambda record: record.grid,
    *,
    align_numel: int = ALIGN_NUMEL,
) -> list[Bucket]:
    """Return buckets of at most `limit_numel` elements (or `align_numel` columns) that cover the records in order, one
    type each: that of the exchange, by default the parameters'. Parameters are cut at multiples of `align_numel`
    columns."""
    limit = max(limit_numel // world_size // align_numel, 1) * align_numel
    buckets: list[Bucket] = []
    segments: list[Segment] = []
    cols = 0
    dtype: torch.dtype | None = None

    def close() -> None:
        nonlocal segments, cols
        if segments and dtype is not None:
            buckets.append(Bucket(tuple(segments), cols, dtype))
        segments, cols = [], 0

    for record in records:
        if record.numel == 0:
            continue
        if dtype_of(record) != dtype:
            close()
            dtype = dtype_of(record)
        first, shard_numel = 0, grid_of(record).shard_numel
        while first < shard_numel:
            if cols > limit - align_numel:
                close()
            stop = min(shard_numel, first + (limit - cols) // align_numel * align_numel)
            segments.append(Segment(record, first, stop, cols, shard_numel))
            cols += stop - first
            first = stop
    close()
    return buckets


def pack(bucket: Bucket, world_size: int, values: Callable[[ParameterRecord], torch.Tensor | None]) -> torch.Tensor:
    """Return the matrix [world, cols] of whole parameters or gradients; `values` gives them contiguous, None for zeros."""
    device = bucket.segments[0].record.full.device
    matrix = torch.empty(world_size, bucket.cols, dtype=bucket.dtype, device=device)
    for segment in bucket.segments:
        source = values(segment.record)
        target = matrix[:, segment.columns]
        if source is None:
            target.zero_()
            continue
        flat, present = source.view(-1), 0
        for rows, rest, part in _pieces(segment, world_size):
            if rest == 0:
                target[rows] = flat[part].view(-1, segment.shard_numel)[:, segment.first : segment.stop]
            else:
                target[rows.start, :rest] = flat[part]
                target[rows.start, rest:] = 0
            present = rows.stop
        target[present:] = 0
    return matrix


def unpack(bucket: Bucket, matrix: torch.Tensor, values: Callable[[ParameterRecord], torch.Tensor]) -> None:
    """Copy the matrix [world, cols] into whole parameters or gradients, 1-D [numel]; padding is dropped."""
    world_size = matrix.shape[0]
    for segment in bucket.segments:
        target = values(segment.record)
        source = matrix[:, segment.columns]
        for rows, rest, part in _pieces(segment, world_size):
            if rest == 0:
                target[part].view(-1, segment.shard_numel)[:, segment.first : segment.stop] = source[rows]
            else:
                target[part] = source[rows.start, :rest]


def _pieces(segment: Segment, world_size: int) -> Iterator[tuple[slice, int, slice]]:
    """Yield (rows of the bucket, 0, elements of those whole shards), then (row, elements, their slice) for a partial
    one."""
    shard_numel, numel = segment.shard_numel, segment.record.numel
    whole = min(world_size, numel // shard_numel)
    if whole:
        yield slice(0, whole), 0, slice(0, whole * shard_numel)
    rest = min(numel - whole * shard_numel, segment.stop) - segment.first
    if whole < world_size and rest > 0:
        base = whole * shard_numel + segment.first
        yield slice(whole, whole + 1), rest, slice(base, base + rest)


class Gathering(Protocol):
    """A gather of a bucket under way."""

    work: Work
    """To be waited for before `finish`."""

    def finish(self) -> None:
        """Copy the received values into `full` of the parameters, whose memory must be there."""


class Reducing(Protocol):
    """A bucket's reduce-scatter under way."""

    bucket: Bucket

    def done(self) -> bool:
        """Return whether the reduction is done, so that `finish` would not block."""

    def finish(self) -> torch.Tensor:
        """Wait, and return the mean of this rank's rows, [cols]."""


class Reduction(Reducing):
    """A bucket's reduce-scatter under way. See [Note: the mean]."""

    def __init__(self, world: World, bucket: Bucket, matrix: torch.Tensor, kind: Kind) -> None:
        self.bucket = bucket
        self._send = matrix
        self._native = world.backend != "gloo"
        if self._native:
            self._out = matrix.new_empty(bucket.cols)
            self._work = world.reduce_scatter_mean(self._out, matrix, kind=kind)
        else:
            self._out = torch.empty_like(matrix)
            self._work = world.all_to_all(self._out, matrix, kind=kind)

    def done(self) -> bool:
        return self._work.is_completed()

    def finish(self) -> torch.Tensor:
        self._work.wait()
        return self._out if self._native else mean_of_rows(self._out)


def rows_in(bucket: Bucket, mean: torch.Tensor) -> Iterator[tuple[Segment, slice, torch.Tensor]]:
    """Yield (segment, slice of this rank's rows, their mean) for each segment of a reduced bucket, whose mean is `mean`
    [cols]."""
    for segment in bucket.segments:
        first, stop = segment.record.owned_range
        rows = slice(*(min(stop - first, at) for at in (segment.first, segment.stop)))
        yield segment, rows, mean[segment.offset : segment.offset + rows.stop - rows.start]


def mean_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the mean of `rows` [world, cols] over the first extent, summed in order in fp32; overwrites the first
    row."""
    scale = 1.0 / rows.shape[0]
    for first in range(0, rows.shape[1], _SUM_NUMEL):
        tile = rows[:, first : first + _SUM_NUMEL]
        total = tile[0].float() if rows.dtype != torch.float32 else tile[0].clone()
        for row in tile[1:]:
            total.add_(row)
        tile[0] = total.mul_(scale)
    return rows[0]


class RowGather(Gathering):
    """An all-gather of a bucket's rows under way: straight into the memory of a parameter that has a bucket of its own."""

    def __init__(self, world: World, bucket: Bucket, rows: Rows) -> None:
        first = bucket.segments[0]
        self._bucket = bucket
        self._matrix: torch.Tensor | None = None
        """Received rows, [world, cols]; None: they are in place."""
        if len(bucket.segments) == 1 and bucket.cols == first.shard_numel:
            self._sent = rows(first.record)
            target = first.record.padded_full(world.world_size * bucket.cols)
        else:
            parts = [rows(segment.record)[segment.first : segment.stop] for segment in bucket.segments]
            self._sent = torch.cat(parts)
            self._matrix = self._sent.new_empty(world.world_size, bucket.cols)
            target = self._matrix.view(-1)
        self.work = world.start_all_gather(target, self._sent)

    def finish(self) -> None:
        if self._matrix is not None:
            unpack(self._bucket, self._matrix, lambda record: record.full)


def all_gather_rows(world: World, records: Iterable[ParameterRecord], limit_numel: int) -> None:
    """Fill `full` of each record with every rank's rows, which `record.owned()` gives."""
    limit = bucket_limit(world, limit_numel)
    for bucket in plan_buckets(records, world.world_size, limit):
        device = bucket.segments[0].record.full.device
        mine = torch.zeros(bucket.cols, dtype=bucket.dtype, device=device)
        for segment in bucket.segments:
            rows = segment.record.owned()[segment.first : segment.stop]
            mine[segment.offset : segment.offset + rows.numel()] = rows
        matrix = mine.new_empty(world.world_size, bucket.cols)
        world.all_gather(matrix.view(-1), mine)
        unpack(bucket, matrix, lambda record: record.full)


class _Mean:
    """The mean of two ranks' gradients, 1-D, under way: of one in place, of several or in another type in a copy."""

    def __init__(self, world: World, gradients: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        self._gradients = gradients
        self._is_copy = len(gradients) > 1 or gradients[0].dtype != dtype
        self._sum = torch.cat([each.to(dtype) for each in gradients]) if self._is_copy else gradients[0]
        self._work = world.all_reduce(self._sum, kind="all_reduce")

    def finish(self) -> None:
        """Wait; then the gradients are the mean."""
        self._work.wait()
        self._sum.mul_(0.5)
        if self._is_copy:
            parts = torch.split(self._sum, [each.numel() for each in self._gradients])
            for gradient, part in zip(self._gradients, parts, strict=True):
                gradient.copy_(part)


def _travelling_together(
    gradients: Iterable[tuple[torch.Tensor, torch.dtype]], limit_numel: int
) -> Iterator[tuple[list[torch.Tensor], torch.dtype]]:
    """Yield pieces of gradients, 1-D, of at most `limit_numel` elements together and of one type: large ones alone."""
    small: list[torch.Tensor] = []
    left, of_small = 0, torch.float32
    for gradient, dtype in gradients:
        if gradient.numel() >= _ALONE_NUMEL:
            yield from (([piece], dtype) for piece in torch.split(gradient, limit_numel))
            continue
        for piece in torch.split(gradient, limit_numel):
            if small and (piece.numel() > left or dtype != of_small):
                yield small, of_small
                small = []
            if not small:
                left, of_small = limit_numel, dtype
            small.append(piece)
            left -= piece.numel()
    if small:
        yield small, of_small


def mean_in_place(
    world: World, gradients: Iterable[tuple[torch.Tensor, torch.dtype]], limit_numel: int, *, overlap: bool
) -> int:
    """Replace gradients, 1-D in their types of exchange, by their mean over two ranks; return how many reductions
    overlapped with another."""
    under_way: deque[_Mean] = deque()
    overlapped = 0
    for together, dtype in _travelling_together(gradients, limit_numel):
        under_way.append(_Mean(world, together, dtype))
        overlapped += len(under_way) > 1
        if len(under_way) > _IN_PLACE_AT_ONCE or not overlap:
            under_way.popleft().finish()
    while under_way:
        under_way.popleft().finish()
    return overlapped
