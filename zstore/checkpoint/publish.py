"""The shard files of one rank's part of a save: links, or copies, of its pinned shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ..format.arrays import Bytes
from ..io.files import make_read_only
from ..io.queue import Priority
from ..io.shards import FillRuns, ShardSummary, write_shard
from ..store.tiers import PinnedShard
from .build import CheckpointBuilder
from .names import tag_folder
from .request import SaveRequest
from .reuse import KnownFile


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
        self._written_at(path)
        later = self._target / request.shard_path(name, request.rank)
        if known := KnownFile.of(later, version=version, crcs=summary.crcs, written_as=path):
            self.known[name] = known
        return summary

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
        return self.store_whole(name, np.ascontiguousarray(self._request.small[name]).reshape(-1).view(np.uint8))

    def store_whole(self, name: str, data: Bytes) -> ShardSummary:
        """Store an array that is one shard, rank 0's."""
        path, spec = self._place(name, 0), self._request.specs[name]
        fill = FillRuns.of(data, spec.itemsize)
        summary = write_shard(self._resources, path, spec, self._request.grid(name), 0, fill)
        self._written_at(path)
        return summary

    def _place(self, name: str, shard: int) -> Path:
        self._check_alive()
        return self._builder.place(name, shard)

    def _written_at(self, path: Path) -> None:
        self._written.append(str(path))
        make_read_only(path)
