"""A second copy of the parameters, sharded within groups of ranks (ZeRO++ hpZ, `zero_hpz_partition_size`).

[Note: the secondary shards]
State, and the parameters' own rows, are sharded over all ranks. When a parameter was gathered from all, each rank keeps
the shard of its place in its group: the ranks of a group together have all values. Until those change, the parameter
is gathered from these, within the group: by the backward, and by the micro-batches that follow. A step makes the secondary
shards of trained parameters old, and the next gather is over all ranks again; those of frozen parameters stay. They hold
gathered bits, so a gather from them has the same bits.

They are in the device's memory, wherever the parameters are stored. Whether there are any is the same on all ranks: they
come with a gather, and go when all ranks change values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from zstore.format import Grid
from zstore.ranks.world import World, make_groups

from ...params.record import ParameterRecord
from ...zero.exchanges import SecondCopy


class SecondaryShards(SecondCopy):
    """The secondary shards of this rank, one of several groups of `size` ranks. See [Note: the secondary shards]."""

    def __init__(self, world: World, size: int) -> None:
        self._within, self._between = make_groups(world, size)
        self._rows: dict[ParameterRecord, torch.Tensor] = {}
        self._current: set[ParameterRecord] = set()
        """Parameters whose rows have the present values."""

    @property
    def world(self) -> World:
        return self._within

    def grid(self, record: ParameterRecord) -> Grid:
        return record.grid.joined(self._between.world_size)  # cuts are among those of all ranks

    def has(self, records: Iterable[ParameterRecord]) -> bool:
        return all(record in self._current for record in records)

    def rows(self, record: ParameterRecord) -> torch.Tensor:
        return self._rows[record]

    def keep(self, records: Sequence[ParameterRecord]) -> None:
        for record in records:
            if record not in self._current:
                numel = self.grid(record).shard_numel
                mine = record.padded_full(self.world.world_size * numel)[self.world.rank * numel :][:numel]
                if record in self._rows:
                    self._rows[record].copy_(mine)
                else:
                    self._rows[record] = mine.clone()
                self._current.add(record)

    def expire(self) -> None:
        # Their rows are out of date, and the memory stays for new ones.
        self._current = {record for record in self._current if record.group is None}

    def free(self) -> None:
        self._current.clear()
        self._rows.clear()

    def release(self) -> None:
        self._within.release()
        self._between.release()

    @property
    def held_bytes(self) -> int:
        found = 0
        for record, rows in self._rows.items():
            found += self.grid(record).shard_valid_numel(self.world.rank) * rows.element_size()
        return found
