"""Small arrays that rank 0 stores whole: rows travel through files of the save's temporary folder.

[Note: pieces]
An array under 64 KiB has no file for each rank: a shard file of a few rows takes 8 KiB, and a model has hundreds of such
arrays. So each rank writes its rows of all of them, one array after the other, into few files beside its manifest. Once
every manifest is there, rank 0 reads them, stores each array as one shard, and removes them. As all of a save, that needs
no collectives, and no rank waits for it: the pins are released as soon as their rows were copied.

    manifest/rank-<rank>.pieces-<group>     rows of the group's arrays in their order, without padding; their crc32c (u32)

A group is arrays of 8 MiB together, which bounds the memory that either side takes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from crc32c import crc32c

from ..errors import CorruptionError
from ..format.arrays import Bytes
from ..io.shards import ShardSummary
from .names import manifest_file
from .request import SaveRequest

Store = Callable[[str, Bytes], ShardSummary]
"""Stores an array whole, given its values."""

_GROUP_BYTES = 8 * 1024 * 1024
_CRC = struct.Struct("<I")


class Pieces:
    """The pieces of the save `request` in its temporary folder `folder`. See [Note: pieces]."""

    def __init__(self, request: SaveRequest, folder: Path) -> None:
        self._request = request
        self._folder = folder
        self._groups: list[list[str]] = []
        """Names that travel together."""
        nbytes = _GROUP_BYTES
        for name in sorted(request.pieces):
            size = request.specs[name].nbytes
            if nbytes + size > _GROUP_BYTES:
                self._groups.append([])
                nbytes = 0
            self._groups[-1].append(name)
            nbytes += size

    def tasks(self) -> list[Callable[[], None]]:
        """Return a task for each group that leaves this rank's rows of it for rank 0, and releases their pins."""
        return [partial(self._write_rows, group) for group in self._own()]

    def own_files(self) -> list[Path]:
        """Return the files that `tasks` write."""
        return [self._path(group, self._request.rank) for group in self._own()]

    def all_files(self) -> list[Path]:
        """Return the files that `assembly_tasks` need."""
        return [path for group in range(len(self._groups)) for path in self._paths(group)]

    def assembly_tasks(self, store: Store) -> list[Callable[[], list[ShardSummary]]]:
        """Return a task for each group that stores its arrays whole with `store`, and removes the ranks' pieces."""
        return [partial(self._assemble, group, store) for group in range(len(self._groups))]

    def _own(self) -> list[int]:
        return [group for group in range(len(self._groups)) if self._num_bytes(group, self._request.rank)]

    def _sources(self, group: int) -> range:
        # The first ranks have the rows; of many ranks most have none of small arrays.
        return range(max(self._request.pieces[name].num_shards for name in self._groups[group]))

    def _paths(self, group: int) -> list[Path]:
        return [self._path(group, rank) for rank in self._sources(group)]

    def _path(self, group: int, rank: int) -> Path:
        return (self._folder / manifest_file(rank)).with_suffix(f".pieces-{group}")

    def _span(self, name: str, rank: int) -> tuple[int, int]:
        """Return the bytes `[first, stop)` of the array that are rank `rank`'s."""
        grid, itemsize = self._request.pieces[name], self._request.specs[name].itemsize
        first = min(rank * grid.shard_numel, grid.rows * grid.row_numel)
        return first * itemsize, (first + grid.shard_valid_numel(rank)) * itemsize

    def _num_bytes(self, group: int, rank: int) -> int:
        return sum(stop - first for first, stop in (self._span(name, rank) for name in self._groups[group]))

    def _write_rows(self, group: int) -> None:
        request = self._request
        data: Bytes = np.empty(self._num_bytes(group, request.rank), np.uint8)
        at = 0
        for name in self._groups[group]:
            first, stop = self._span(name, request.rank)
            if first < stop:
                request.pins[name].copy_into(data[at : at + stop - first], request.pieces[name], request.rank)
                at += stop - first
                # Released at once: an updater of this shard may be waiting.
                request.pins[name].release()
        # It need not be durable: it is gone before the commit.
        whole = data.tobytes()
        whole += _CRC.pack(crc32c(whole))
        request.resources.files.write_small(self._path(group, request.rank), whole, sync=False)

    def _assemble(self, group: int, store: Store) -> list[ShardSummary]:
        request, names = self._request, self._groups[group]
        shards: dict[str, Bytes] = {name: np.empty(request.specs[name].nbytes, np.uint8) for name in names}
        for rank in self._sources(group):
            data = self._read(group, rank)
            at = 0
            for name in names:
                first, stop = self._span(name, rank)
                if first < stop:
                    shards[name][first:stop] = data[at : at + stop - first]
                    at += stop - first
        found = [store(name, values) for name, values in shards.items()]
        for path in self._paths(group):
            request.resources.files.unlink(path)
        return found

    def _read(self, group: int, rank: int) -> Bytes:
        path, nbytes = self._path(group, rank), self._num_bytes(group, rank)
        data = path.read_bytes()
        if len(data) != nbytes + _CRC.size or _CRC.unpack(data[nbytes:])[0] != crc32c(data[:nbytes]):
            raise CorruptionError(
                f"{path} is not what rank {rank} wrote ({len(data)} bytes, expected {nbytes + _CRC.size}): the folder "
                "is damaged, or something else writes there; save again"
            )
        return np.frombuffer(data, np.uint8)[:nbytes]
