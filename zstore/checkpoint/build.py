"""The files of a checkpoint: shards, the ranks' manifests, the metadata, the record.

[Note: building a checkpoint]
In a temporary folder, whose commit is one rename (see `zstore.checkpoint.commit`):
    (each rank)  `place` for every shard file, whichever code fills it; `write_manifest`, last
    (rank 0)     the metadata; `collect` until all manifests are there; `check_complete`; `folder_syncs`; `record`
A process that writes all ranks' parts leaves rank 0's to `finish`.

[Note: pieces]
An array under 64 KiB has no file for each rank: a shard file of a few rows takes 8 KiB, and a model has hundreds of such
arrays. So each rank writes its rows of all of them, one array after the other, into few files beside its manifest. Once
every manifest is there, rank 0 reads them, stores each array as one shard, and removes them. As all of a save, that needs
no collectives, and no rank waits for it: the pins are released as soon as their rows were copied.

    manifest/rank-<rank>.pieces-<group>     rows of the group's arrays in their order, without padding; their crc32c (u32)

A group is arrays of 8 MiB together, which bounds the memory that either side takes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from crc32c import crc32c

from ..errors import CheckpointError, CorruptionError, RankError
from ..format.arrays import Bytes
from ..io.files import Files, make_read_only
from ..io.pool import Workers, helpful_threads
from ..io.queue import Priority
from ..io.shards import FillRuns, ShardSummary, write_shard
from .format import COMPLETE, Manifest, Record, read_json, sha256
from .metadata import encode_documents
from .names import MANIFEST_FOLDER, METADATA_FILE, manifest_file, tag_folder
from .plan import CheckpointPlan, KnownFile, PinnedShard, SaveRequest


class CheckpointBuilder:
    """Builds the checkpoint `plan` in the temporary folder `folder`. See [Note: building a checkpoint]."""

    def __init__(
        self,
        plan: CheckpointPlan,
        folder: Path,
        files: Files,
        earlier: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.folder = folder
        self._earlier = earlier
        """By folder, the `zarr.json` of the same array in an earlier checkpoint."""
        self._ranks = range(plan.world_size)
        self._plan = plan
        self._files = files
        self._made: set[str] = set()
        """Folders that exist."""
        self._written: list[str] = []
        """Files that are not durable yet."""
        self._found: dict[int, str] = {}
        """Digests of the manifests that were read, by rank."""
        self.written_bytes = self.linked_bytes = 0
        """Of the shard files in these manifests."""

    @cached_property
    def _texts(self) -> Mapping[str, bytes]:
        """Bytes of all documents, by folder."""
        plan = self._plan
        return encode_documents(plan.specs, {name: plan.grid(name) for name in plan.specs}, plan.codec)

    def check_names(self) -> None:
        """Raise UsageError if two arrays would share a folder."""
        self._texts  # noqa: B018

    @cached_property
    def metadata_sha256(self) -> str:
        """SHA-256 of the root's metadata, which names all arrays. Raises as `check_names` does."""
        return sha256(self._texts[""])

    @cached_property
    def _layout(self) -> str:
        return self._plan.layout_digest()

    # -- each rank --------------------------------------------------------------------------------------------------

    def place(self, name: str, shard: int) -> Path:
        """Return the path of a shard file; makes its folder."""
        path = self._plan.shard_path(name, shard)
        self._make_folder(os.path.dirname(path))
        return self.folder / path

    def _make_folder(self, folder: str) -> None:
        """Make an array's folder, for its first shard or its metadata, whichever comes first."""
        if folder not in self._made:
            self._files.make_folder(os.path.join(self.folder, folder))
            self._made.add(folder)

    def write_manifest(
        self,
        rank: int,
        outcome: str,
        summaries: Sequence[ShardSummary],
        rank_state: Mapping[str, Any],
        *,
        sync: bool = True,
    ) -> None:
        """Write a rank's manifest: the last thing that it does, once its shard files are durable. Without `sync` it is made
        durable by `finish`.

        Raises CheckpointError if the outcome is to be "complete" and a shard of the rank is not in `summaries`.
        """
        if outcome == COMPLETE:
            self._check_shards(rank, summaries)
        manifest = Manifest(
            id=self._plan.save_id,
            rank=rank,
            world_size=self._plan.world_size,
            outcome=outcome,
            shards=tuple(summaries),
            rank_state=rank_state,
            layout=self._layout if outcome == COMPLETE else "",
        )
        # Written atomically: rank 0 reads it as soon as it has its name.
        path = self.folder / manifest_file(rank)
        part = path.with_suffix(".part")
        self._files.write_small(part, manifest.encode(), sync=sync)
        make_read_only(part)
        self._files.rename(part, path)

    def _check_shards(self, rank: int, summaries: Sequence[ShardSummary]) -> None:
        """Each rank checks its own shards: rank 0 alone could not check those of thousands of ranks."""
        stored = {each.array: each.file_bytes for each in summaries if each.shard == rank}
        strange = [(each.array, each.shard) for each in summaries if each.shard != rank]
        for name in self._plan.specs:
            expected = self._plan.file_bytes(name, rank)
            found = stored.pop(name, 0)
            # The size of a compressed file is not known beforehand.
            if found != expected and (self._plan.codec is None or not found or not expected):
                raise CheckpointError(
                    f"array {name!r}: no rank stored shard {rank} with the expected {expected} bytes; every rank must pin "
                    "its shard of every array"
                )
        strange += [(name, rank) for name in stored]
        if strange:
            raise CheckpointError(f"shards that belong to no array were stored: {sorted(strange)[:5]}")

    # -- rank 0 -----------------------------------------------------------------------------------------------------

    def metadata_tasks(self) -> Iterator[Callable[[], None]]:
        """Yield a task for each `zarr.json` that writes it."""

        def write(folder: str) -> None:
            self._make_folder(folder)
            path = os.path.join(self.folder, folder, METADATA_FILE)
            if self._link_earlier(folder, path):
                self._written.append(path)
            else:
                self._files.write_small(path, self._texts[folder], sync=False)
                self._finish_file(path)

        return (partial(write, folder) for folder in self._texts)

    def _link_earlier(self, folder: str, path: str) -> bool:
        """Link an earlier checkpoint's document if it is the same; to make a file takes several times as long."""
        earlier = self._earlier.get(folder)
        if earlier is None:
            return False
        try:
            with open(earlier, "rb") as file:
                if file.read() != self._texts[folder]:
                    return False
                self._files.link(earlier, path)
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    return True
            self._files.unlink(path)  # it was replaced meanwhile
        except OSError:  # removed since, on another file system, or with all the names that a file may have
            pass
        return False

    def _finish_file(self, path: str | Path) -> None:
        self._written.append(str(path))
        make_read_only(path)

    def syncs(self) -> Iterator[Callable[[], None]]:
        """Yield a task for each file that was written that makes it durable: many at once, since drives coalesce concurrent
        flushes."""
        written, self._written = self._written, []
        return (partial(self._files.sync_file, path) for path in written)

    def collect(self) -> bool:
        """Read the manifests that came since the last call; return whether those of all ranks have come.

        Raises RankError as soon as one says that its rank failed, CheckpointError for one of another save or model.
        """
        for rank in self._arrived():
            path = self.folder / manifest_file(rank)
            data = read_json(path)
            # Each rank checked its own shards: their list, which may have millions of entries, is not read.
            manifest = Manifest.decode_head(data, str(path))
            if manifest.outcome != COMPLETE:
                raise RankError(f"rank {rank} could not save its part of {self.folder}", {rank: manifest.outcome})
            if (manifest.id, manifest.rank) != (self._plan.save_id, rank):
                raise CheckpointError(f"{path} belongs to another save or rank; save again")
            if manifest.layout != self._layout:
                raise CheckpointError(
                    f"rank {rank} saved other arrays than rank 0, or cut them in another way: every rank needs the same model"
                )
            self._found[rank] = sha256(data)
            self.linked_bytes += Manifest.sum_bytes(data, linked=True)
            self.written_bytes += Manifest.sum_bytes(data, linked=False)
        return not self.missing_ranks()

    def _arrived(self) -> list[int]:
        """Return the ranks whose manifest has come and was not read yet."""
        names = set(os.listdir(self.folder / MANIFEST_FOLDER))
        return [rank for rank in self.missing_ranks() if os.path.basename(manifest_file(rank)) in names]

    def missing_ranks(self) -> list[int]:
        """Return the ranks whose manifest is not there yet."""
        return [rank for rank in self._ranks if rank not in self._found]

    def check_complete(self) -> None:
        """Raise CheckpointError unless every shard of every array belongs to a rank that checked that it stored it."""
        for name in self._plan.specs:
            num_shards = self._plan.grid(name).num_shards
            if num_shards > self._plan.world_size:
                raise CheckpointError(
                    f"array {name!r}: no rank stored shard {self._plan.world_size} of {num_shards}; rank r stores shard "
                    "r, so an array has at most as many as there are ranks"
                )

    def folder_syncs(self, *, manifests: bool = True, arrays: bool = True) -> Iterator[Callable[[], None]]:
        """Yield a task for each folder below this one that makes the names in it durable, once all are there: that of the
        manifests, and those of arrays and groups."""
        # Not by a walk: a folder has a file for each rank. Names in the folder itself are made durable with the record.
        folders = [MANIFEST_FOLDER] if manifests else []
        folders += filter(None, self._texts) if arrays else []
        return (partial(self._files.sync_folder, self.folder / folder) for folder in folders)

    def record(self, state: Mapping[str, Any], *, training_world_size: int | None = None) -> Record:
        """Return the commit record, once all manifests are there."""
        plan = self._plan
        return Record(
            id=plan.save_id,
            tag=plan.tag,
            step=plan.step,
            world_size=plan.world_size,
            training_world_size=training_world_size or plan.world_size,
            run=plan.run_id,
            metadata_sha256=self.metadata_sha256,
            manifest_sha256=tuple(self._found[rank] for rank in range(plan.world_size)),
            state=state,
        )

    def finish(self, state: Mapping[str, Any], *, training_world_size: int | None = None, sync: bool = True) -> Record:
        """Complete a checkpoint whose shard files and manifests are all there, and return its commit record. Without `sync`
        the caller makes everything durable."""
        if not sync:
            for write in self.metadata_tasks():
                write()
            self.collect()
            self.check_complete()
            return self.record(state, training_world_size=training_world_size)
        manifests = [self.folder / manifest_file(rank) for rank in self._ranks]
        with Workers(min(4, helpful_threads(0, 2 * len(self._texts))), "zstore-build") as workers:
            workers.run(self.metadata_tasks(), here=True)
            self.collect()
            self.check_complete()
            # One wave: drives coalesce concurrent flushes.
            own = (partial(self._files.sync_file, path) for path in manifests)
            workers.run(chain[Callable[[], None]](own, self.syncs(), self.folder_syncs()), here=True)
        return self.record(state, training_world_size=training_world_size)


_GROUP_BYTES = 8 * 1024 * 1024
_CRC = struct.Struct("<I")


class RankPart(CheckpointBuilder):
    """One rank's part of the save `request` in its temporary folder: shards, and pieces of small arrays.

    `check_alive` is called before each shard and stops the save by raising.
    """

    def __init__(self, request: SaveRequest, folder: Path, check_alive: Callable[[], None]) -> None:
        super().__init__(request, folder, request.resources.files, request.known_documents())
        self._request = request
        self._check_alive = check_alive
        self._resources = replace(request.resources, sync=False)
        self._target = request.folder / tag_folder(request.tag)
        self.known: dict[str, KnownFile] = {}
        """Files that the next save may link, once this one is committed."""
        self._groups: list[list[str]] = []
        """Names whose pieces travel together."""
        nbytes = _GROUP_BYTES
        for name in sorted(request.pieces):
            size = request.specs[name].nbytes
            if nbytes + size > _GROUP_BYTES:
                self._groups.append([])
                nbytes = 0
            self._groups[-1].append(name)
            nbytes += size

    def tasks(self) -> Iterator[Callable[[], ShardSummary | None]]:
        """Yield a task for each group of pieces and each shard file of this rank; those in memory first, since an updater
        waits for them."""
        request = self._request
        yield from (partial(self._write_rows, group) for group in self._own_groups())
        own = [name for name in request.pins if name not in request.pieces and request.file_bytes(name, request.rank)]
        own.sort(key=lambda name: request.pins[name].tier == "disk")
        yield from (partial(self._publish, name, request.pins[name]) for name in own)
        if request.rank == 0:
            yield from (partial(self._write_small, name) for name in request.small if request.file_bytes(name, 0))

    # -- shards -----------------------------------------------------------------------------------------------------

    def _publish(self, name: str, pin: PinnedShard) -> ShardSummary:
        request = self._request
        self._check_alive()
        path = self.place(name, request.rank)
        version = pin.version
        summary = self._link_known(name, pin, path)
        if summary is None:
            summary = pin.publish(self._resources, path, request.grid(name), request.rank, Priority.CHECKPOINT)
        # Released at once: an updater of this shard may be waiting.
        pin.release()
        self._finish_file(path)
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
        return self._store_whole(name, np.ascontiguousarray(self._request.small[name]).reshape(-1).view(np.uint8))

    def _store_whole(self, name: str, data: Bytes) -> ShardSummary:
        """Store an array that is one shard, rank 0's."""
        self._check_alive()
        path, spec = self.place(name, 0), self._request.specs[name]
        fill = FillRuns.of(data, spec.itemsize)
        summary = write_shard(self._resources, path, spec, self._request.grid(name), 0, fill)
        self._finish_file(path)
        return summary

    # -- pieces -----------------------------------------------------------------------------------------------------

    def pieces_of_rank(self) -> list[Path]:
        """Return the files of pieces that this rank writes."""
        return [self._pieces_file(group, self._request.rank) for group in self._own_groups()]

    def all_pieces(self) -> list[Path]:
        """Return the files of pieces that `assembly_tasks` need."""
        return [path for group in range(len(self._groups)) for path in self._pieces_files(group)]

    def assembly_tasks(self) -> list[Callable[[], list[ShardSummary]]]:
        """Return a task for each group that stores its arrays whole, and removes the ranks' pieces."""
        return [partial(self._assemble, group) for group in range(len(self._groups))]

    def _own_groups(self) -> list[int]:
        return [group for group in range(len(self._groups)) if self._num_bytes(group, self._request.rank)]

    def _sources(self, group: int) -> range:
        # The first ranks have the rows; of many ranks most have none of small arrays.
        return range(max(self._request.pieces[name].num_shards for name in self._groups[group]))

    def _pieces_files(self, group: int) -> list[Path]:
        return [self._pieces_file(group, rank) for rank in self._sources(group)]

    def _pieces_file(self, group: int, rank: int) -> Path:
        return (self.folder / manifest_file(rank)).with_suffix(f".pieces-{group}")

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
        self._files.write_small(self._pieces_file(group, request.rank), whole, sync=False)

    def _assemble(self, group: int) -> list[ShardSummary]:
        request, names = self._request, self._groups[group]
        shards: dict[str, Bytes] = {name: np.empty(request.specs[name].nbytes, np.uint8) for name in names}
        for rank in self._sources(group):
            data = self._read_rows(group, rank)
            at = 0
            for name in names:
                first, stop = self._span(name, rank)
                if first < stop:
                    shards[name][first:stop] = data[at : at + stop - first]
                    at += stop - first
        found = [self._store_whole(name, values) for name, values in shards.items()]
        for path in self._pieces_files(group):
            self._files.unlink(path)
        return found

    def _read_rows(self, group: int, rank: int) -> Bytes:
        path, nbytes = self._pieces_file(group, rank), self._num_bytes(group, rank)
        data = path.read_bytes()
        if len(data) != nbytes + _CRC.size or _CRC.unpack(data[nbytes:])[0] != crc32c(data[:nbytes]):
            raise CorruptionError(
                f"{path} is not what rank {rank} wrote ({len(data)} bytes, expected {nbytes + _CRC.size}): the folder "
                "is damaged, or something else writes there; save again"
            )
        return np.frombuffer(data, np.uint8)[:nbytes]
