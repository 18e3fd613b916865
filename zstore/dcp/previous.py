"""The checkpoint before: shards of it whose values are still the same are linked, not written again.

[Note: unchanged shards]
A shard is linked if the other checkpoint has an array of that name, shape and type, cut alike, and two things hold:
the crc32c of each chunk in memory is the one that the other's manifest names, which almost always tells at the first
chunk that a shard changed; and the bytes of the file, read through the very link that was made and verified as they are
read, are those in memory. A checksum of 32 bits alone would take one in four billion changed chunks for an unchanged one.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
from crc32c import crc32c

from zstore.checkpoint import CheckpointReader, open_checkpoint
from zstore.errors import CheckpointError, CorruptionError, StorageError
from zstore.format import ArraySpec, Grid, layout_of
from zstore.io import Fill, IoResources, ShardReader, fill_chunk


class Previous:
    """The checkpoint in the folder `path`; if it cannot be read, it has nothing to link. See [Note: unchanged shards]."""

    def __init__(self, path: Path, resources: IoResources) -> None:
        self._path = path
        self._resources = resources
        self._reader: CheckpointReader | None = None
        with contextlib.suppress(CheckpointError, CorruptionError, OSError):
            self._reader = open_checkpoint(path, resources=resources)

    def has(self, spec: ArraySpec, grid: Grid) -> bool:
        """Return whether it has such an array, whatever its values are."""
        stored = None if self._reader is None else self._reader.arrays.get(spec.name)
        return stored is not None and (stored.spec, stored.grid, stored.codec) == (spec, grid, None)

    def link(self, spec: ArraySpec, grid: Grid, shard: int, fill: Fill, target: Path) -> tuple[int, ...] | None:
        """Make `target` a link to its file of that shard, and return the checksums, if the values are the same.

        None, and nothing made, if they are not, or if the file cannot be linked or is damaged. `fill` gives the
        values, see `write_shard`.
        """
        if self._reader is None or not self.has(spec, grid):
            return None
        try:
            crcs = self._reader.shard_crcs(spec.name, shard)
        except (CorruptionError, StorageError):
            return None
        chunk = np.empty(layout_of(grid, shard, spec.dtype).payload_bytes, np.uint8)
        for number, crc in enumerate(crcs):
            fill_chunk(chunk, fill, spec, grid, shard, number)
            if crc32c(chunk.data) != crc:
                return None
        files = self._resources.files
        files.make_folder(target.parent)
        try:
            files.link(self._reader.path / self._reader.array(spec.name).shard_file(shard), target)
        except OSError:
            return None
        same = False
        try:
            same = self._holds(ShardReader(self._resources, target, spec, grid, shard), fill)
            if same and self._resources.sync:
                # Its writer may not have made it durable.
                files.sync_file(target)
        finally:
            if not same:
                files.unlink(target)
        return tuple(crcs) if same else None

    def _holds(self, file: ShardReader, fill: Fill) -> bool:
        """Return whether a shard file has the values that `fill` gives."""
        spec, grid = file.spec, file.grid
        base = file.shard * grid.shard_numel
        stop = base + grid.shard_valid_numel(file.shard)
        step = max(1, self._resources.block_bytes // (grid.chunk_numel * spec.itemsize)) * grid.chunk_numel
        for first in range(base, stop, step):
            last = min(first + step, stop)
            stored, wanted = np.empty((2, (last - first) * spec.itemsize), np.uint8)
            fill(first, last, wanted)
            try:
                file.read(first, last, stored)
            except (CorruptionError, StorageError):
                return False
            if not np.array_equal(stored, wanted):
                return False
        return True

    def close(self) -> None:
        """Close the checkpoint."""
        if self._reader is not None:
            self._reader.close()
