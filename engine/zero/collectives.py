"""Collectives over the rows of many parameters: buckets, reductions of gradients, and replacements of both.

[Note: buckets]
A bucket is a matrix [world, cols] whose row r has rank r's rows of several parameters, concatenated and padded. Larger
parameters are cut at shard columns. On gloo a bucket has at most 4 Mi elements: larger ones are no faster, and each step
would fault their pages in again (30 M fp32 parameters at stage 0: a quarter of a step's CPU time).

[Note: the mean]
On gloo a reduce-scatter is an all-to-all of rows, then a sum in rank order in fp32, times 1/world, rounded once to the
dtype of the exchange: bit-identical in any order of arrival, at every stage. An all-reduce adds an all-gather to that; between
two ranks it is gloo's, in the gradients' own buffers, halved after rounding, which is bit-identical too: see "The mean of two
processes" in docs/design/0004-gradients.md. Other backends use their own reduction.

[Note: exchanges]
By default, units are gathered by all-gathers of their rows, and gradients reduced by reduce-scatters, over all ranks.
`register` adds replacements, as `engine/extras` does with low-precision gathers and reductions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from zstore.format import ALIGN_NUMEL, Grid
from zstore.ranks.world import Kind, Work, World

from ..config.config import Config
from ..params.record import ParameterRecord
from ..params.sharding import GradientTypes, Sharding

TypeOf = Callable[[ParameterRecord], torch.dtype]
GridOf = Callable[[ParameterRecord], Grid]
"""How the ranks of a collective divide a parameter."""
Rows = Callable[[ParameterRecord], torch.Tensor]
"""Returns this rank's rows of a parameter with padding, 1-D [shard_numel]."""

_SUM_NUMEL = 64 * 1024
_MIN_SEPARATE_NUMEL = 64 * 1024
"""Size of the smallest gradient that is reduced in a separate collective."""
_MAX_IN_PLACE = 4
"""Maximum number of concurrent in-place reductions."""
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
        """The segment's columns of the bucket."""
        return slice(self.offset, self.offset + self.stop - self.first)


@dataclass(frozen=True)
class Bucket:
    """Segments that are exchanged together. See [Note: buckets]."""

    segments: tuple[Segment, ...]
    cols: int
    dtype: torch.dtype


Put = Callable[[Bucket, torch.Tensor], None]
"""Stores the mean of this rank's rows of a bucket, [cols]; see `rows_in`."""


def bucket_limit(world: World, limit_numel: int) -> int:
    """Return the maximum size of a bucket if the config allows `limit_numel`. See [Note: buckets]."""
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
    """Return buckets of at most `limit_numel` elements (or `align_numel` columns) that cover the records in order, each of
    one dtype, by default the parameters'. Parameters are cut at multiples of `align_numel` columns."""
    limit = max(limit_numel // world_size // align_numel, 1) * align_numel
    buckets: list[Bucket] = []
    segments: list[Segment] = []
    cols = 0

    def close() -> None:
        nonlocal segments, cols
        if segments:
            buckets.append(Bucket(tuple(segments), cols, dtype_of(segments[0].record)))
        segments, cols = [], 0

    for record in records:
        if record.numel == 0:
            continue
        if segments and dtype_of(record) != dtype_of(segments[0].record):
            close()
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
    """Return the matrix [world, cols] of whole gradients; `values` returns them contiguous, None for zeros."""
    device = bucket.segments[0].record.full.device
    matrix = torch.empty(world_size, bucket.cols, dtype=bucket.dtype, device=device)
    for segment in bucket.segments:
        source = values(segment.record)
        target = matrix[:, segment.columns]
        if source is None:
            target.zero_()
            continue
        flat, present = source.view(-1), 0
        for rows, partial, part in _pieces(segment, world_size):
            if partial == 0:
                target[rows] = flat[part].view(-1, segment.shard_numel)[:, segment.first : segment.stop]
            else:
                target[rows.start, :partial] = flat[part]
                target[rows.start, partial:] = 0
            present = rows.stop
        target[present:] = 0
    return matrix


def unpack(bucket: Bucket, matrix: torch.Tensor, values: Callable[[ParameterRecord], torch.Tensor]) -> None:
    """Copy the matrix [world, cols] into whole parameters or gradients, 1-D [numel]; padding is dropped."""
    world_size = matrix.shape[0]
    for segment in bucket.segments:
        target = values(segment.record)
        source = matrix[:, segment.columns]
        for rows, partial, part in _pieces(segment, world_size):
            if partial == 0:
                target[part].view(-1, segment.shard_numel)[:, segment.first : segment.stop] = source[rows]
            else:
                target[part] = source[rows.start, :partial]


def _pieces(segment: Segment, world_size: int) -> Iterator[tuple[slice, int, slice]]:
    """Yield (rows of the bucket, 0, gradient slice) for the whole shards, then (row, elements, slice) for a partial."""
    shard_numel, numel = segment.shard_numel, segment.record.numel
    whole = min(world_size, numel // shard_numel)
    if whole:
        yield slice(0, whole), 0, slice(0, whole * shard_numel)
    partial = min(numel - whole * shard_numel, segment.stop) - segment.first
    if whole < world_size and partial > 0:
        base = whole * shard_numel + segment.first
        yield slice(whole, whole + 1), partial, slice(base, base + partial)


class PendingGather(Protocol):
    """A pending gather of a bucket."""

    work: Work
    """Must be waited for before `finish`."""

    def finish(self) -> None:
        """Copy the received values into the allocated `full` of the parameters."""


class PendingReduction(Protocol):
    """A pending reduce-scatter of a bucket."""

    bucket: Bucket

    def done(self) -> bool:
        """Return whether `finish` would not block."""

    def finish(self) -> torch.Tensor:
        """Wait, and return the mean of this rank's rows, [cols]."""


class WireFormat(Protocol):
    """An encoding in which some parameters or their gradients are sent."""

    align_numel: int
    """Parameters may be cut at multiples of this many columns of a bucket."""

    def takes(self, record: ParameterRecord) -> bool:
        """Return whether the parameter is sent in this format."""


class Gathers(WireFormat, Protocol):
    """Gathers some parameters in a format other than their own dtype."""

    def start(self, world: World, bucket: Bucket, rows: Rows) -> PendingGather:
        """Start gathering a bucket (all ranks, in the same order)."""


class Reducer(WireFormat, Protocol):
    """Reduces some gradients in a format other than their own dtype (stages 2 and 3)."""

    def start(self, bucket: Bucket, matrix: torch.Tensor, kind: Kind) -> PendingReduction:
        """Start reducing `matrix` [world, cols] (all ranks, in the same order)."""

    def release(self) -> None:
        """Destroy its process groups; no reduction may be pending."""


class Replica(Protocol):
    """A replica of the parameters, sharded over fewer ranks; they are gathered from it until their values change."""

    @property
    def world(self) -> World:
        """The ranks that share the replica."""

    def grid(self, record: ParameterRecord) -> Grid:
        """Return the partition of a parameter over these ranks."""

    def has(self, records: Iterable[ParameterRecord]) -> bool:
        """Return whether all of them can be gathered from it."""

    def rows(self, record: ParameterRecord) -> torch.Tensor:
        """Return this rank's rows of a parameter, 1-D, followed by padding of undefined values."""

    def keep(self, records: Sequence[ParameterRecord]) -> None:
        """Store this rank's rows of parameters whose `full` has all values."""

    def expire(self) -> None:
        """Invalidate the rows of trained parameters, which a step changes."""

    def free(self) -> None:
        """Invalidate all rows, and free their buffers."""

    def release(self) -> None:
        """Destroy its process groups; no gather may be pending. A second call does nothing."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows, excluding padding."""


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """The exchanges of a run. See [Note: exchanges]."""

    gathers: Gathers | None = None
    """Gathers the parameters that it takes."""
    replica: Replica | None = None
    reducer: Reducer | None = None
    """Reduces the gradients that it takes."""


Maker = Callable[[Exchanges, Config, Sharding, World], Exchanges]
"""Returns the exchanges, some of them replaced (all ranks)."""

_makers: list[Maker] = []


def register(maker: Maker) -> None:
    """Let `maker` replace exchanges of future runs."""
    _makers.append(maker)


def exchanges_of(config: Config, sharding: Sharding, world: World) -> Exchanges:
    """Return the exchanges of a run on several ranks (all ranks)."""
    exchanges = Exchanges()
    for maker in _makers:
        exchanges = maker(exchanges, config, sharding, world)
    return exchanges


@dataclass(frozen=True, kw_only=True)
class GradientRules:
    """How gradients are averaged, and where they wait for the update. The bits depend only on `types` and `exchanges`."""

    each_backward: bool
    """Reduce gradients in each backward as they arrive, and keep this rank's rows (stages 2 and 3); else keep whole
    gradients, and reduce them once per step. See [Note: when gradients are reduced]."""
    bucket_numel: int
    """Maximum size of one reduction."""
    scatter: bool = True
    """Send each rank only its rows of a sharded gradient; else the whole gradient. This and `overlap` can be turned off if a
    backward has no gathers (stages 1 and 2): otherwise a rank that waits for a reduction could block another's gather."""
    overlap: bool = True
    """Continue while a reduction is pending."""
    types: GradientTypes[torch.dtype] = field(default_factory=lambda: GradientTypes(summed=torch.float32))
    to_host: frozenset[ParameterRecord] = frozenset()
    """Parameters whose gradients wait in host memory, whichever device computes them."""
    spills: bool = False
    """Whether any rank has gradients on disk: all ranks then agree on disk errors before the norm."""
    keeps_rows: bool = True
    """Keep the rows' buffers between steps; else the update frees them."""
    exchanges: Exchanges
    squares_at_once: bool = False
    """Sum squares as gradients become final: an update may consume them before the norm is needed."""

    def reduced(self, record: ParameterRecord) -> torch.dtype:
        """Return the dtype in which a gradient is sent between ranks."""
        return self.types.reduced(record.dtype)


class Reduction(PendingReduction):
    """The default reduce-scatter. See [Note: the mean]."""

    def __init__(self, world: World, bucket: Bucket, matrix: torch.Tensor, kind: Kind) -> None:
        self.bucket = bucket
        self._send = matrix
        self._native = world.backend != "gloo"
        self._out = matrix.new_empty(bucket.cols) if self._native else torch.empty_like(matrix)
        start = world.reduce_scatter_mean if self._native else world.all_to_all
        self._work = start(self._out, matrix, kind=kind)

    def done(self) -> bool:
        return self._work.is_completed()

    def finish(self) -> torch.Tensor:
        self._work.wait()
        return self._out if self._native else mean_of_rows(self._out)


def rows_in(bucket: Bucket, mean: torch.Tensor) -> Iterator[tuple[Segment, slice, torch.Tensor]]:
    """Yield (segment, slice of this rank's rows, their part of `mean` [cols]) for each segment of a reduced bucket."""
    for segment in bucket.segments:
        first, stop = segment.record.owned_range
        rows = slice(*(min(stop - first, column) for column in (segment.first, segment.stop)))
        yield segment, rows, mean[segment.offset : segment.offset + rows.stop - rows.start]


def mean_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the mean of `rows` [world, cols] over the first dimension, summed in order in fp32; overwrites its first row."""
    scale = 1.0 / rows.shape[0]
    for first in range(0, rows.shape[1], _SUM_NUMEL):
        tile = rows[:, first : first + _SUM_NUMEL]
        total = tile[0].float() if rows.dtype != torch.float32 else tile[0].clone()
        for row in tile[1:]:
            total.add_(row)
        tile[0] = total.mul_(scale)
    return rows[0]


def _grouped(
    gradients: Iterable[tuple[torch.Tensor, torch.dtype]], limit_numel: int
) -> Iterator[tuple[list[torch.Tensor], torch.dtype]]:
    """Yield groups of pieces of gradients, 1-D, of at most `limit_numel` elements and one dtype; large ones separately."""
    small: list[torch.Tensor] = []
    remaining, small_dtype = 0, torch.float32
    for gradient, dtype in gradients:
        if gradient.numel() >= _MIN_SEPARATE_NUMEL:
            yield from (([piece], dtype) for piece in torch.split(gradient, limit_numel))
            continue
        for piece in torch.split(gradient, limit_numel):
            if small and (piece.numel() > remaining or dtype != small_dtype):
                yield small, small_dtype
                small = []
            if not small:
                remaining, small_dtype = limit_numel, dtype
            small.append(piece)
            remaining -= piece.numel()
    if small:
        yield small, small_dtype


def mean_in_place(
    world: World, gradients: Iterable[tuple[torch.Tensor, torch.dtype]], limit_numel: int, *, overlap: bool
) -> int:
    """Replace gradients, 1-D, with their mean over two ranks, sent in these dtypes; return how many reductions overlapped."""
    pending: deque[tuple[list[torch.Tensor], torch.Tensor, Work]] = deque()
    overlapped = 0

    def finish() -> None:
        parts, total, work = pending.popleft()
        work.wait()
        total.mul_(0.5)
        if total is not parts[0]:
            for part, mean in zip(parts, torch.split(total, [part.numel() for part in parts]), strict=True):
                part.copy_(mean)

    for parts, dtype in _grouped(gradients, limit_numel):
        is_copy = len(parts) > 1 or parts[0].dtype != dtype
        total = torch.cat([part.to(dtype) for part in parts]) if is_copy else parts[0]
        pending.append((parts, total, world.all_reduce(total, kind="all_reduce")))
        overlapped += len(pending) > 1
        if len(pending) > _MAX_IN_PLACE or not overlap:
            finish()
    while pending:
        finish()
    return overlapped


class Reductions:
    """Pending reductions of gradients, oldest first; a backward's reductions have their own process group."""

    def __init__(self, world: World, rules: GradientRules) -> None:
        self._world = world.on_new_group() if rules.each_backward else world
        self._rules = rules
        self._limit_numel = bucket_limit(self._world, rules.bucket_numel)
        self._pending: deque[tuple[PendingReduction, Put]] = deque()

    def start(self, values: dict[ParameterRecord, torch.Tensor | None], put: Put) -> Iterator[Bucket]:
        """Start reducing gradients, None for zeros, and clear `values` (all ranks, in the same order); yield each bucket.
        `put` is called with this rank's rows of it once they are reduced."""
        scatter = self._rules.scatter

        def take(bucket: Bucket, mean: torch.Tensor) -> None:
            put(bucket, mean if scatter else self._gather(mean)[bucket.segments[0].record.state_shard])

        for reduction in self._begin(values, scatter=scatter):
            self._pending.append((reduction, take))
            yield reduction.bucket
            if not (self._rules.overlap and scatter):
                self._finish_oldest()
        values.clear()
        while self._pending and self._pending[0][0].done():
            self._finish_oldest()

    def replace(self, values: Mapping[ParameterRecord, torch.Tensor], *, scatter: bool) -> int:
        """Replace whole gradients, 1-D [numel], of any dtype, with their mean over ranks (all ranks); with `scatter`, only
        this rank's rows. Return how many reductions overlapped."""
        overlapped, world, overlap = 0, self._world, self._rules.overlap
        if not scatter:
            sent = {record: (flat, self._rules.reduced(record)) for record, flat in values.items()}
            types = (torch.float32, torch.bfloat16) if world.world_size == 2 and world.backend == "gloo" else ()
            in_place = {record for record, (_, dtype) in sent.items() if dtype in types}  # see [Note: the mean]
            gradients = [sent[record] for record in sent if record in in_place and record.numel]
            overlapped = mean_in_place(world, gradients, self._limit_numel, overlap=overlap)
            values = {record: flat for record, flat in values.items() if record not in in_place}

        def take(bucket: Bucket, mean: torch.Tensor) -> None:
            if not scatter:
                unpack(bucket, self._gather(mean), values.__getitem__)
                return
            for segment, rows, part in rows_in(bucket, mean):
                values[segment.record][slice(*segment.record.owned_range)][rows].copy_(part)

        try:
            for reduction in self._begin(values, scatter=scatter):
                overlapped += len(self._pending)
                self._pending.append((reduction, take))
                while len(self._pending) > int(overlap):
                    self._finish_oldest()
            self.drain()
        finally:
            self.drop()  # after an error
        return overlapped

    def _begin(
        self, values: Mapping[ParameterRecord, torch.Tensor | None], *, scatter: bool
    ) -> Iterator[PendingReduction]:
        """Start the reductions of gradients, bucket by bucket."""
        rules, world_size = self._rules, self._world.world_size
        kind: Kind = "reduce_scatter" if scatter else "all_reduce"
        limit, records = self._limit_numel, list(values)
        if (reducer := rules.exchanges.reducer) is not None:
            taken = [record for record in records if reducer.takes(record)]
            for bucket in plan_buckets(taken, world_size, limit, rules.reduced, align_numel=reducer.align_numel):
                yield reducer.start(bucket, pack(bucket, world_size, values.__getitem__), kind)
            records = [record for record in records if not reducer.takes(record)]
        for bucket in plan_buckets(records, world_size, limit, rules.reduced):
            yield Reduction(self._world, bucket, pack(bucket, world_size, values.__getitem__), kind)

    def _gather(self, mean: torch.Tensor) -> torch.Tensor:
        """Return every rank's rows of a mean, [world, cols] (all ranks)."""
        gathered = mean.new_empty(self._world.world_size, mean.numel())
        self._world.all_gather(gathered.view(-1), mean, kind="all_reduce")
        return gathered

    def _finish_oldest(self) -> None:
        reduction, take = self._pending.popleft()
        take(reduction.bucket, reduction.finish())

    def drain(self) -> None:
        """Finish all pending reductions."""
        while self._pending:
            self._finish_oldest()

    def drop(self) -> None:
        """Forget pending reductions."""
        self._pending.clear()

    def release(self) -> None:
        """Destroy the process groups; nothing may be pending."""
        if self._rules.each_backward:
            self._world.release()
        if self._rules.exchanges.reducer is not None:
            self._rules.exchanges.reducer.release()
