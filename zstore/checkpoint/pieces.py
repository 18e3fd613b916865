"""Small arrays, and small shards of huge worlds, that fewer ranks store than hold them: rows travel through files of the
save's temporary folder.

[Note: pieces]
An array under 64 KiB has no file for each rank: a shard file of a few rows takes 8 KiB, and a model has hundreds of such
arrays. So each rank writes its rows of all of them, one array after the other, into few files beside its manifest. Once
every manifest is there, rank 0 reads them, stores each array as one shard, and removes them. As all of a save, that needs
no collectives, and no rank waits for it: the pins are released as soon as their rows were copied.

    manifest/rank-<rank>.pieces-<group>     rows of the group's arrays in their order, without padding; their crc32c (u32)

A group is arrays of 8 MiB together, which bounds the memory that either side takes.

Of worlds of 512 ranks and more, a larger array of which each rank holds less than 64 KiB has fewer shards than ranks (see
`grid_in_checkpoint`). Shard s of its grid has the rows of several neighbouring ranks, which leave them in such files, too, and
rank s, which stores it, waits for those files alone. They get their names once they are whole.
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
"""Stores this rank's shard of an array, given its values."""

_GROUP_BYTES = 8 * 1024 * 1024
_CRC = struct.Struct("<I")


class Pieces:
    """The pieces of the save `request` in its temporary folder `folder`. See [Note: pieces]."""

    def __init__(self, request: SaveRequest, folder: Path) -> None:
        self._request = request
        self._folder = folder
        self._groups: list[list[str]] = []
        """Names that travel together; of one group every shard has the pieces of as many ranks."""
        self._ranks_per_shard: list[int] = []
        """By group; 0: of all ranks."""
        nbytes = _GROUP_BYTES
        for ranks, name in sorted((self._ranks_of_shard(name), name) for name in request.pieces):
            size = min(request.specs[name].nbytes, request.grid(name).shard_numel * request.specs[name].itemsize)
            if nbytes + size > _GROUP_BYTES or self._ranks_per_shard[-1] != ranks:
                self._groups.append([])
                self._ranks_per_shard.append(ranks)
                nbytes = 0
            self._groups[-1].append(name)
            nbytes += size
        self._awaited = self.awaited()

    def _ranks_of_shard(self, name: str) -> int:
        """Return how many ranks' pieces make a shard of an array; 0 for one that rank 0 stores whole."""
        grid, held = self._request.grid(name), self._request.pieces[name]
        return grid.shard_rows // held.shard_rows if grid.num_shards > 1 else 0

    def tasks(self) -> list[Callable[[], None]]:
        """Return a task for each group that leaves this rank's rows of it for who stores them, and releases their pins."""
        rank = self._request.rank
        return [partial(self._write_rows, group) for group in range(len(self._groups)) if self._num_bytes(group, rank)]

    def assembly_tasks(self, store: Store) -> list[Callable[[], list[ShardSummary]]]:
        """Return a task for each group that stores its arrays whole with `store`, and removes the ranks' pieces."""
        whole = [group for group, ranks in enumerate(self._ranks_per_shard) if not ranks]
        return [partial(self._assemble, group, store) for group in whole]

    def joining_tasks(self, store: Store) -> list[Callable[[], list[ShardSummary]]]:
        """Return a task for each group that stores this rank's shards of it with `store`, once they `have_come`, and removes
        its neighbours' pieces."""
        return [partial(self._assemble, group, store) for group in self._joined()]

    def have_come(self) -> bool:
        """Return whether the files are there that `joining_tasks` need."""
        self._awaited = [path for path in self._awaited if not path.exists()]
        return not self._awaited

    def for_others(self) -> list[Path]:
        """Return the files of rows that `tasks` left for other ranks."""
        rank = self._request.rank
        owners = [rank // ranks if ranks else 0 for ranks in self._ranks_per_shard]
        groups = [group for group, owner in enumerate(owners) if owner != rank and self._num_bytes(group, rank)]
        return [self._path(group, rank) for group in groups]

    def awaited(self) -> list[Path]:
        """Return the files that `joining_tasks` need."""
        return [path for group in self._joined() for path in self._paths(group)]

    def of_others(self) -> list[Path]:
        """Return the files that `assembly_tasks` need."""
        return [path for group, ranks in enumerate(self._ranks_per_shard) if not ranks for path in self._paths(group)]

    def missing_text(self) -> str:
        """Return a sentence about the missing files."""
        rank, awaited = self._request.rank, self._awaited
        return f"rank {rank} waits for {len(awaited)} files of other ranks, such as {awaited[0]}, which nobody wrote"

    def _joined(self) -> list[int]:
        """Return the groups of which this rank stores shards that others hold pieces of."""
        return [group for group, ranks in enumerate(self._ranks_per_shard) if ranks and self._sources(group)]

    def _sources(self, group: int) -> range:
        """Return the ranks whose pieces of a group this rank puts together."""
        # The first ranks have the rows; of thousands of ranks most have none of small arrays.
        stop = max(self._request.pieces[name].num_shards for name in self._groups[group])
        ranks = self._ranks_per_shard[group] or stop
        return range(self._request.rank * ranks, min((self._request.rank + 1) * ranks, stop))

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
        files, path = request.resources.files, self._path(group, request.rank)
        if not self._ranks_per_shard[group]:  # nobody looks before the manifest is there
            files.write_small(path, whole, sync=False)
            return
        part = path.with_name(f"{path.name}.part")
        files.write_small(part, whole, sync=False)
        files.rename(part, path)

    def _assemble(self, group: int, store: Store) -> list[ShardSummary]:
        request, names = self._request, self._groups[group]
        shards: dict[str, Bytes] = {}
        bases: dict[str, int] = {}
        for name in names:
            grid, itemsize = request.grid(name), request.specs[name].itemsize
            bases[name] = request.rank * grid.shard_numel * itemsize
            if numel := grid.shard_valid_numel(request.rank):
                shards[name] = np.empty(numel * itemsize, np.uint8)
        for rank in self._sources(group):
            data = self._read(group, rank)
            at = 0
            for name in names:
                first, stop = self._span(name, rank)
                if first < stop:
                    shards[name][first - bases[name] : stop - bases[name]] = data[at : at + stop - first]
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
