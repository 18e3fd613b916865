"""The shard files of one rank's part of a save: links, or copies, of its pinned shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ..errors import CorruptionError, StorageError
from ..format.arrays import Bytes
from ..io.archives import open_shard_file
from ..io.files import make_read_only
from ..io.queue import Priority
from ..io.shards import FillRuns, ShardSummary, checksum_shard, write_shard
from ..store.tiers import PinnedShard
from .build import CheckpointBuilder
from .names import tag_folder
from .request import SaveRequest
from .reuse import KnownFile

_ANY_VERSION = -1
"""Of a file whose content is compared, whatever versions the ranks' shards have."""


class Publisher:
    """Puts the shards of `request` at the paths of `builder`; `check_alive` is called before each and stops the save by
    raising."""

    def __init__(self, request: SaveRequest, builder: CheckpointBuilder, check_alive: Callable[[], None]) -> None:
        self._request = request
        self._builder = builder
        self._check_alive = check_alive
        self._files = request.resources.files
        self._resources = replace(request.resources, sync=False)
        self._written: list[str] = []
        """Shard files that are not durable yet."""
        self._target = request.folder / tag_folder(request.tag)
        self.known: dict[str, KnownFile] = {}
        """Files that the next save may link, once this one is committed."""

    def tasks(self) -> Iterator[Callable[[], ShardSummary]]:
        """Yield a task for each shard file of this rank; those in memory first, since an updater waits for them."""
        request = self._request
        own = [name for name in request.pins if name not in request.pieces and request.file_bytes(name, request.rank)]
        own.sort(key=lambda name: request.pins[name].tier == "disk")
        yield from (partial(self._publish, name, request.pins[name]) for name in own)
        if request.rank == 0:
            yield from (partial(self._write_small, name) for name in request.small if request.file_bytes(name, 0))

    def syncs(self) -> Iterator[Callable[[], None]]:
        """Yield a task for each shard file that makes it durable: many at once, since drives coalesce concurrent flushes."""
        written, self._written = self._written, []
        return (partial(self._files.sync_file, path) for path in written)

    def _publish(self, name: str, pin: PinnedShard) -> ShardSummary:
        request = self._request
        path = self._place(name, request.rank)
        version = pin.version
        summary = self._link_known(name, pin, path)
        if summary is None:
            summary = pin.publish(self._resources, path, request.grid(name), request.rank, Priority.CHECKPOINT)
        # Released at once: an updater of this shard may be waiting.
        pin.release()
        return self._noted(summary, path, version)

    def _link_known(self, name: str, pin: PinnedShard, path: Path) -> ShardSummary | None:
        """Link an earlier checkpoint's file that holds the same; None if there is none. See [Note: links of unchanged
        shards]."""
        request = self._request
        known = request.unchanged(name)
        if known is None or not known.link(self._files, path):
            return None
        if pin.checksums(request.resources, request.grid(name), request.rank) != known.crcs:
            self._files.unlink(path)
            return None
        file_bytes = request.file_bytes(name, request.rank)
        return ShardSummary(name, request.rank, file_bytes, known.crcs, linked=True)

    def _write_small(self, name: str) -> ShardSummary:
        data = np.ascontiguousarray(self._request.small[name]).reshape(-1).view(np.uint8)
        path = self._place(name, 0)
        summary = self._write_whole(name, data, path)
        self._written_at(path)
        return summary

    def _write_whole(self, name: str, data: Bytes, path: Path, shard: int = 0) -> ShardSummary:
        spec, grid = self._request.specs[name], self._request.grid(name)
        fill = FillRuns.of(data, spec.itemsize, shard * grid.shard_numel)
        return write_shard(self._resources, path, spec, grid, shard, fill)

    def store_joined(self, name: str, data: Bytes) -> ShardSummary:
        """Store this rank's shard of an array, which was put together from the ranks' pieces: link the last checkpoint's file
        if that holds the same, otherwise write it."""
        rank = self._request.rank
        path = self._place(name, rank)
        summary = self._link_equal(name, data, path) or self._write_whole(name, data, path, rank)
        return self._noted(summary, path, _ANY_VERSION)

    def _link_equal(self, name: str, data: Bytes, path: Path) -> ShardSummary | None:
        """Link an earlier checkpoint's file of the same bytes; None if there is none.

        The array has no version, since each rank knows its own piece alone; but it is small enough to compare it all.
        """
        request = self._request
        known, spec, grid, rank = request.known.get(name), request.specs[name], request.grid(name), request.rank
        first = rank * grid.shard_numel
        fill = FillRuns.of(data, spec.itemsize, first)
        if known is None or known.crcs != checksum_shard(request.resources, spec, grid, rank, fill):
            return None
        if not known.link(self._files, path):
            return None
        stored = np.empty_like(data)
        try:
            file = open_shard_file(self._resources, str(path), (spec, grid, None), rank)
            file.read(first, first + grid.shard_valid_numel(rank), stored)
        except (CorruptionError, StorageError):
            stored = stored[:0]
        if not np.array_equal(stored, data):
            self._files.unlink(path)
            return None
        return ShardSummary(name, rank, request.file_bytes(name, rank), known.crcs, linked=True)

    def _place(self, name: str, shard: int) -> Path:
        self._check_alive()
        return self._builder.place(name, shard)

    def _noted(self, summary: ShardSummary, path: Path, version: int | None) -> ShardSummary:
        """Note a shard file of this rank, for the syncs and for the next save; return its summary."""
        self._written_at(path)
        later = self._target / self._request.shard_path(summary.array, summary.shard)
        if known := KnownFile.of(later, version=version, crcs=summary.crcs, written_as=path):
            self.known[summary.array] = known
        return summary

    def _written_at(self, path: Path) -> None:
        self._written.append(str(path))
        make_read_only(path)
