"""The exchanges between ranks for the parameters and gradients of a run.

[Note: exchanges]
By default, units are gathered by all-gathers of their rows, and gradients reduced by reduce-scatters, each over all ranks.
`register` takes replacements: `engine/extras` has gathers and reductions in fewer bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from zstore.format import Grid
from zstore.io.memory import dtype_name
from zstore.ranks.world import Kind, World

from ..config.config import Config
from ..params.record import ParameterRecord
from ..params.sharding import GradientTypes, Sharding, sums_in_place
from .collectives import (
    Bucket,
    Gathering,
    Reducing,
    Reduction,
    Rows,
    bucket_limit,
    mean_in_place,
    pack,
    plan_buckets,
    rows_in,
    unpack,
)

Put = Callable[[Bucket, torch.Tensor], None]
"""Takes the mean of this rank's rows of a bucket, [cols]; see `rows_in`."""


class WireForm(Protocol):
    """Another form than their own type in which the values of some parameters, or their gradients, are sent."""

    align_numel: int
    """Columns of a bucket at whose multiples a parameter may be cut."""

    def takes(self, record: ParameterRecord) -> bool:
        """Return whether the parameter is sent in this form."""


class Gathers(WireForm, Protocol):
    """Gathers some parameters in another form than their rows."""

    def start(self, world: World, bucket: Bucket, rows: Rows) -> Gathering:
        """Begin to gather the parameters of a bucket (all ranks, in one order)."""


class Reducer(WireForm, Protocol):
    """Reduces some gradients in another form than their own type (stages 2 and 3)."""

    def start(self, bucket: Bucket, matrix: torch.Tensor, kind: Kind) -> Reducing:
        """Begin to reduce `matrix` [world, cols] (all ranks, in one order)."""

    def release(self) -> None:
        """Destroy its process groups, once nothing is under way."""


class SecondCopy(Protocol):
    """A second copy of the parameters, sharded over fewer ranks, from which they are gathered until their values change."""

    @property
    def world(self) -> World:
        """The ranks that hold all values together."""

    def grid(self, record: ParameterRecord) -> Grid:
        """Return how these ranks divide a parameter."""

    def has(self, records: Iterable[ParameterRecord]) -> bool:
        """Return whether all of them can be gathered from it."""

    def rows(self, record: ParameterRecord) -> torch.Tensor:
        """Return this rank's rows of a parameter, 1-D with padding, of undefined values."""

    def keep(self, records: Sequence[ParameterRecord]) -> None:
        """Keep this rank's rows of parameters whose `full` has all values."""

    def expire(self) -> None:
        """Note that a step changes the trained parameters."""

    def free(self) -> None:
        """Forget everything, and free the memory."""

    def release(self) -> None:
        """Destroy its process groups, once no gather is under way; a second call does nothing."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows, padding left out."""


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """The exchanges of a run. See [Note: exchanges]."""

    gathers: Gathers | None = None
    """Gathers of the parameters that it accepts; None: of none."""
    second_copy: SecondCopy | None = None
    reducer: Reducer | None = None
    """Reductions of the gradients that it accepts; None: of none."""


Maker = Callable[[Exchanges, Config, Sharding, World], Exchanges]
"""Returns the exchanges with its replacements (all ranks)."""
_makers: list[Maker] = []


def register(maker: Maker) -> None:
    """Let `maker` replace exchanges of runs that are made from now on."""
    _makers.append(maker)


def exchanges_of(config: Config, sharding: Sharding, world: World) -> Exchanges:
    """Return the exchanges of a run (all ranks)."""
    found = Exchanges()
    for maker in _makers:
        found = maker(found, config, sharding, world)
    return found


@dataclass(frozen=True, kw_only=True)
class GradientRules:
    """How gradients are averaged over the ranks and where they wait for the update. The bits depend on `types` and `exchanges`
    alone."""

    each_backward: bool
    """Reduce gradients in each backward as they come, and hold this rank's rows (stages 2 and 3); else hold whole ones, and
    reduce them once a step. See [Note: when gradients are reduced]."""
    bucket_numel: int
    """Most elements of one reduction."""
    scatter: bool = True
    """Each rank gets its rows of a sharded gradient alone; else all of it. This and `overlap` may be chosen if nothing
    else is gathered in a backward (stages 1 and 2): otherwise a rank that waits for a reduction might hold up the gather
    that another one waits for."""
    overlap: bool = True
    """Go on while a reduction is under way."""
    types: GradientTypes[torch.dtype] = field(default_factory=lambda: GradientTypes(summed=torch.float32))
    to_host: frozenset[ParameterRecord] = frozenset()
    """Parameters whose rows wait in host memory, wherever the device is."""
    spills: bool = False
    """Whether gradients wait on disk on some rank: then all ranks learn of an error there before the norm is taken."""
    keeps_rows: bool = True
    """Keep the rows' memory from step to step; else it is freed as soon as an update took it."""
    exchanges: Exchanges
    squares_at_once: bool = False
    """Take sums of squares as gradients become final: an update may take them before the norm is needed."""

    def reduced(self, record: ParameterRecord) -> torch.dtype:
        """Return the type in which a gradient is exchanged between ranks."""
        return self.types.reduced(record.dtype)


class Reductions:
    """Reductions of gradients under way, the oldest first: on a process group of their own if they are in a backward."""

    def __init__(self, world: World, rules: GradientRules) -> None:
        self._world = world.second() if rules.each_backward else world
        self._rules = rules
        self._under_way: deque[tuple[Reducing, Put]] = deque()

    def start(self, values: dict[ParameterRecord, torch.Tensor | None], put: Put) -> Iterator[Bucket]:
        """Begin to reduce gradients, None for zeros, and forget `values` (all ranks, in one order); yield each bucket that is
        under way. `put` gets this rank's rows when it is done."""
        scatter = self._rules.scatter

        def take(bucket: Bucket, mean: torch.Tensor) -> None:
            put(bucket, mean if scatter else self._gather(mean)[bucket.segments[0].record.state_shard])

        for reduction in self._begin(values, scatter=scatter):
            self._under_way.append((reduction, take))
            yield reduction.bucket
            if not (self._rules.overlap and scatter):
                self._finish_oldest()
        values.clear()
        while self._under_way and self._under_way[0][0].done():
            self._finish_oldest()

    def replace(self, values: Mapping[ParameterRecord, torch.Tensor], *, scatter: bool) -> int:
        """Replace whole gradients, 1-D [numel], by their mean over ranks, with `scatter` this rank's rows alone (all ranks).

        They are sent in the type of the exchange, whatever theirs is. Return how many reductions overlapped with others.
        """
        overlapped, world, overlap = 0, self._world, self._rules.overlap
        if not scatter:
            sent = {record: (flat, self._rules.reduced(record)) for record, flat in values.items()}
            native = world.backend != "gloo"
            in_place = {r for r in sent if sums_in_place(dtype_name(sent[r][1]), world.world_size, native=native)}
            limit = bucket_limit(world, self._rules.bucket_numel)
            overlapped = mean_in_place(
                world, [sent[r] for r in sent if r in in_place and r.numel], limit, overlap=overlap
            )
            values = {record: flat for record, flat in values.items() if record not in in_place}

        def take(bucket: Bucket, mean: torch.Tensor) -> None:
            if not scatter:
                unpack(bucket, self._gather(mean), values.__getitem__)
                return
            for segment, rows, part in rows_in(bucket, mean):
                values[segment.record][slice(*segment.record.owned_range)][rows].copy_(part)

        try:
            for reduction in self._begin(values, scatter=scatter):
                overlapped += len(self._under_way)
                self._under_way.append((reduction, take))
                while len(self._under_way) > int(overlap):
                    self._finish_oldest()
            self.drain()
        finally:
            self.drop()  # after an error
        return overlapped

    def _begin(self, values: Mapping[ParameterRecord, torch.Tensor | None], *, scatter: bool) -> Iterator[Reducing]:
        """Begin the reductions of gradients, bucket by bucket."""
        rules, world_size = self._rules, self._world.world_size
        kind: Kind = "reduce_scatter" if scatter else "all_reduce"
        limit = bucket_limit(self._world, rules.bucket_numel)
        records = list(values)
        if (reducer := rules.exchanges.reducer) is not None:
            taken = [record for record in records if reducer.takes(record)]
            for bucket in plan_buckets(taken, world_size, limit, rules.reduced, align_numel=reducer.align_numel):
                yield reducer.start(bucket, pack(bucket, world_size, values.__getitem__), kind)
            records = [record for record in records if not reducer.takes(record)]
        for bucket in plan_buckets(records, world_size, limit, rules.reduced):
            yield Reduction(self._world, bucket, pack(bucket, world_size, values.__getitem__), kind)

    def _gather(self, mean: torch.Tensor) -> torch.Tensor:
        """Return every rank's rows of a mean, [world, cols] (all ranks)."""
        everyone = mean.new_empty(self._world.world_size, mean.numel())
        self._world.all_gather(everyone.view(-1), mean, kind="all_reduce")
        return everyone

    def _finish_oldest(self) -> None:
        reduction, take = self._under_way.popleft()
        take(reduction.bucket, reduction.finish())

    def drain(self) -> None:
        """Wait until none is under way."""
        while self._under_way:
            self._finish_oldest()

    def drop(self) -> None:
        """Forget those under way."""
        self._under_way.clear()

    def release(self) -> None:
        """Destroy the process groups, once nothing is under way."""
        if self._rules.each_backward:
            self._world.release()
        if self._rules.exchanges.reducer is not None:
            self._rules.exchanges.reducer.release()
