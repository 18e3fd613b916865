"""The exchanges between ranks for the parameters and gradients of a run.

[Note: exchanges]
By default, units are gathered by all-gathers of their rows, and gradients reduced by reduce-scatters, each over the ranks
that hold one copy of the state. `register` takes replacements: `engine/extras` has gathers and reductions in fewer bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zstore.format import Grid
from zstore.ranks.groups import Groups
from zstore.ranks.work import Kind, Work
from zstore.ranks.world import World

from ..config.config import Config
from ..params.record import ParameterRecord
from ..params.sharding import Sharding
from .collectives import Bucket, Reduce, Reducing, Reduction, TypeOf

Rows = Callable[[ParameterRecord], torch.Tensor]
"""Gives this rank's rows of a parameter with padding, 1-D [shard_numel]."""


class Gathering(Protocol):
    """A gather under way."""

    @property
    def work(self) -> Work:
        """The work to wait for before `finish`."""

    def finish(self) -> None:
        """Copy the received values into `full` of the parameters, whose memory must be there."""


class Gathers(Protocol):
    """Gathers some parameters in another form than their rows."""

    def takes(self, record: ParameterRecord) -> bool:
        """Return whether the parameter is gathered in this form."""

    def start(
        self, world: World, records: Sequence[ParameterRecord], limit_numel: int, rows: Rows
    ) -> Iterator[Gathering]:
        """Begin to gather the parameters in buckets of at most `limit_numel` elements (all ranks, in one order)."""


class Reducer(Protocol):
    """Reduces some gradients in another form than their own type (stages 2 and 3)."""

    def takes(self, record: ParameterRecord) -> bool:
        """Return whether the parameter's gradients are sent in this form."""

    def buckets(
        self, records: Sequence[ParameterRecord], world_size: int, limit_numel: int, dtype_of: TypeOf
    ) -> list[Bucket]:
        """Return buckets of at most `limit_numel` elements of gradients in the types that they have on this rank."""

    def start(self, bucket: Bucket, matrix: torch.Tensor, kind: Kind) -> Reducing:
        """Begin to reduce `matrix` [world, cols] (all ranks, in one order)."""

    def begin_backward(self) -> None:
        """Note that a backward begins."""

    @property
    def held_bytes(self) -> int:
        """Bytes of its state from step to step."""

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

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows, padding left out."""


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """The exchanges of a run. See [Note: exchanges]."""

    world: World
    """The ranks that hold one copy of the shards."""
    gathers: Gathers | None = None
    """Gathers of the parameters that it accepts; None: of none."""
    second_copy: SecondCopy | None = None
    reducer: Reducer | None = None
    """Reductions of the gradients that it accepts; None: of none."""
    reduce: Reduce = Reduction
    """Begins every other reduction of which each rank gets its rows."""
    groups: tuple[Groups, ...] = ()
    """Groups of ranks that hold one copy of the state, or of the parameters; the last ones are for reductions."""


Maker = Callable[[Exchanges, Config, Sharding, World], Exchanges]
"""Returns the exchanges with its replacements (all ranks)."""
_makers: list[Maker] = []


def register(maker: Maker) -> None:
    """Let `maker` replace exchanges of runs that are made from now on."""
    _makers.append(maker)


def exchanges_of(config: Config, sharding: Sharding, world: World) -> Exchanges:
    """Return the exchanges of a run (all ranks)."""
    found = Exchanges(world=world)
    for maker in _makers:
        found = maker(found, config, sharding, world)
    return found
