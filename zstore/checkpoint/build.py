"""The plan of a checkpoint (its arrays, their grids, the run it belongs to), and a builder of its files: shards, the ranks'
manifests, the metadata, the record. Also resharding: building a checkpoint from another one for a number of ranks.

[Note: building a checkpoint]
In a temporary folder, which one rename commits (see `zstore.checkpoint.commit`):
    (each rank)  `new_path` for every shard file, which the caller fills; finally `write_manifest`
    (rank 0)     the metadata; `collect` until all manifests exist; `check_complete`; `folder_syncs`; `record`
A process that writes all ranks' parts calls `finish` for rank 0's steps.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy.typing as npt

from ..errors import CheckpointError, RankError, UsageError
from ..format.arrays import ArraySpec, Grid, grid_in_checkpoint, make_grid
from ..format.codecs import CODECS, Codec
from ..format.shardfile import layout_of
from ..io.archives import write_packed
from ..io.files import Files, make_read_only
from ..io.machine import Workers, helpful_threads
from ..io.queue import Priority, in_order
from ..io.shards import IoResources, ShardSummary, ShardWriter, open_resources
from .commit import Committer
from .format import COMPLETE, Manifest, Record, read_json, sha256
from .layout import MANIFEST_FOLDER, METADATA_FILE, array_path, encode_documents, manifest_file, new_save_id, shard_file
from .lookahead import Range, ReadAhead
from .reader import ArraySource


# See [Note: objects of a save].
@lru_cache(maxsize=2)
def _layout_digest(specs: Sequence[ArraySpec], grids: Sequence[Grid], pieces: Sequence[Grid | None]) -> str:
    described: list[str] = []
    for spec, grid, piece in zip(specs, grids, pieces, strict=True):
        cut = [grid.shard_rows, grid.chunk_rows, grid.chunk_cols, *([] if piece is None else [piece.shard_rows])]
        described.append(json.dumps([spec.name, spec.shape, spec.dtype, *cut], separators=(",", ":")))
    return sha256(f"[{','.join(described)}]".encode())


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """The plan of a checkpoint, the same on every rank. Rank r stores shard r of each array's grid."""

    tag: str
    step: int
    world_size: int
    save_id: str
    """From `new_save_id()` of rank 0, the same on every rank."""
    run_id: str = ""
    """Id of the training run, kept by a resume; a save replaces a checkpoint of its run and tag. Required for `keep`."""
    specs: Mapping[str, ArraySpec]
    """All arrays of the checkpoint; ranks other than 0 may omit the arrays in `small`."""
    grids: Mapping[str, Grid]
    """The grid of each array in the checkpoint; arrays in `small` may be omitted (one shard)."""
    pieces: Mapping[str, Grid] = field(default_factory=dict)
    """The ranks' grids of arrays that are one shard in `grids`: each rank passes its rows to rank 0."""
    small: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Values of arrays that rank 0 stores as one shard: module buffers, the client's tensors."""
    codec: Codec | None = None
    """Codec of an archive's chunks; an archive has no arrays in `small`."""

    def grid(self, name: str) -> Grid:
        """Return the grid of the array in the checkpoint."""
        return self.grids[name] if name in self.grids else make_grid(self.specs[name].stored_shape, 1)

    def file_bytes(self, name: str, shard: int) -> int:
        """Return the uncompressed bytes of a shard's file; 0 if the shard has no rows and therefore no file."""
        layout = layout_of(self.grid(name), shard, self.specs[name].dtype)
        return layout.file_bytes if layout.num_present else 0

    def shard_path(self, name: str, shard: int) -> str:
        """Return the path of a shard's file inside the checkpoint."""
        return f"{array_path(name)}/{shard_file(len(self.specs[name].stored_shape), shard)}"


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
        self._earlier_documents = earlier
        """Paths of the `zarr.json` of the same arrays in earlier checkpoints, by folder."""
        self._ranks = range(plan.world_size)
        self.plan = plan
        self._files = files
        self._created_folders: set[str] = set()
        """Folders that have been created."""
        self._unsynced: list[str] = []
        """Files that are not durable yet."""
        self._manifest_digests: dict[int, str] = {}
        """Digests of the manifests read so far, by rank."""
        self.written_bytes = self.linked_bytes = 0
        """Bytes of the shard files in these manifests."""

    @cached_property
    def _documents(self) -> Mapping[str, bytes]:
        """Bytes of all documents, by folder."""
        plan = self.plan
        return encode_documents(plan.specs, {name: plan.grid(name) for name in plan.specs}, plan.codec)

    def check_names(self) -> None:
        """Raise UsageError if two arrays would share a folder."""
        self._documents  # noqa: B018

    @cached_property
    def _layout_id(self) -> str:
        """SHA-256, hex, of all arrays except `small` and their grids: ranks with the same one agree on every shard."""
        plan = self.plan
        names = sorted(plan.specs.keys() - plan.small.keys())
        grids, pieces = (tuple(map(lookup, names)) for lookup in (plan.grid, plan.pieces.get))
        return _layout_digest(tuple(plan.specs[name] for name in names), grids, pieces)

    def new_path(self, name: str, shard: int) -> Path:
        """Return the path of a shard file, after creating its folder."""
        path = self.plan.shard_path(name, shard)
        self._make_folder(os.path.dirname(path))
        return self.folder / path

    def _make_folder(self, folder: str) -> None:
        """Create an array's folder, unless it was created for another file."""
        if folder not in self._created_folders:
            self._files.make_folder(os.path.join(self.folder, folder))
            self._created_folders.add(folder)

    def write_manifest(
        self,
        rank: int,
        outcome: str,
        summaries: Sequence[ShardSummary],
        rank_state: Mapping[str, Any],
        *,
        sync: bool = True,
    ) -> None:
        """Write a rank's manifest, after its shard files are durable. Without `sync`, `finish` makes it durable. Raises
        CheckpointError if the outcome is "complete" and `summaries` lacks a shard of the rank."""
        if outcome == COMPLETE:
            self._check_shards(rank, summaries)
        manifest = Manifest(
            id=self.plan.save_id,
            rank=rank,
            world_size=self.plan.world_size,
            outcome=outcome,
            shards=tuple(summaries),
            rank_state=rank_state,
            layout=self._layout_id if outcome == COMPLETE else "",
        )
        # Written atomically: rank 0 reads it as soon as it has its final name.
        path = self.folder / manifest_file(rank)
        part = path.with_suffix(".part")
        self._files.write_small(part, manifest.encode(), sync=sync)
        make_read_only(part)
        self._files.rename(part, path)

    def _check_shards(self, rank: int, summaries: Sequence[ShardSummary]) -> None:
        """Check that the rank stored all its shards. Each rank does that, as rank 0 cannot check thousands of ranks."""
        stored = {summary.array: summary.file_bytes for summary in summaries if summary.shard == rank}
        unexpected = [(summary.array, summary.shard) for summary in summaries if summary.shard != rank]
        for name in self.plan.specs:
            expected = self.plan.file_bytes(name, rank)
            file_bytes = stored.pop(name, 0)
            # The size of a compressed file is not known beforehand.
            if file_bytes != expected and (self.plan.codec is None or not file_bytes or not expected):
                raise CheckpointError(
                    f"array {name!r}: no rank stored shard {rank} with the expected {expected} bytes; every rank must pin "
                    "its shard of every array"
                )
        unexpected += [(name, rank) for name in stored]
        if unexpected:
            raise CheckpointError(f"shards that belong to no array were stored: {sorted(unexpected)[:5]}")

    def metadata_tasks(self) -> Iterator[Callable[[], None]]:
        """Yield a task for each `zarr.json` that writes it."""

        def write(folder: str) -> None:
            self._make_folder(folder)
            path = os.path.join(self.folder, folder, METADATA_FILE)
            if self._link_earlier(folder, path):
                self._unsynced.append(path)
            else:
                self._files.write_small(path, self._documents[folder], sync=False)
                self._finish_file(path)

        return (partial(write, folder) for folder in self._documents)

    def _link_earlier(self, folder: str, path: str) -> bool:
        """Link an earlier checkpoint's document if it is equal, which is much faster than writing a new file."""
        earlier_path = self._earlier_documents.get(folder)
        if earlier_path is None:
            return False
        try:
            with open(earlier_path, "rb") as file:
                if file.read() != self._documents[folder]:
                    return False
                self._files.link(earlier_path, path)
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    return True
            self._files.unlink(path)  # it was replaced since it was opened
        except OSError:  # removed, on another file system, or at the limit of links
            pass
        return False

    def _finish_file(self, path: str | Path) -> None:
        self._unsynced.append(str(path))
        make_read_only(path)

    def syncs(self) -> Iterator[Callable[[], None]]:
        """Return a task for each written file that makes it durable, to be run concurrently: drives coalesce flushes."""
        written, self._unsynced = self._unsynced, []
        return (partial(self._files.sync_file, path) for path in written)

    def collect(self) -> bool:
        """Read the manifests that were written since the last call; return whether there is one of every rank. Raises
        RankError if one says that its rank failed, CheckpointError if one belongs to another save or model."""
        for rank in self._new_manifests():
            path = self.folder / manifest_file(rank)
            data = read_json(path)
            # Each rank has checked its own shards; the list of shards, which may have millions of entries, is not read.
            manifest = Manifest.decode_head(data, str(path))
            if manifest.outcome != COMPLETE:
                raise RankError(f"rank {rank} could not save its part of {self.folder}", {rank: manifest.outcome})
            if (manifest.id, manifest.rank) != (self.plan.save_id, rank):
                raise CheckpointError(f"{path} belongs to another save or rank; save again")
            if manifest.layout != self._layout_id:
                raise CheckpointError(
                    f"rank {rank} saved different arrays than rank 0, or with different grids: every rank needs the same model"
                )
            self._manifest_digests[rank] = sha256(data)
            self.linked_bytes += Manifest.sum_bytes(data, linked=True)
            self.written_bytes += Manifest.sum_bytes(data, linked=False)
        return not self.missing_ranks()

    def _new_manifests(self) -> list[int]:
        """Return the ranks whose manifest was written but not read yet."""
        names = set(os.listdir(self.folder / MANIFEST_FOLDER))
        return [rank for rank in self.missing_ranks() if os.path.basename(manifest_file(rank)) in names]

    def missing_ranks(self) -> list[int]:
        """Return the ranks whose manifest has not been read yet."""
        return [rank for rank in self._ranks if rank not in self._manifest_digests]

    def check_complete(self) -> None:
        """Raise CheckpointError unless every shard of every array belongs to a rank. Each rank has checked its shards."""
        for name in self.plan.specs:
            num_shards = self.plan.grid(name).num_shards
            if num_shards > self.plan.world_size:
                raise CheckpointError(
                    f"array {name!r}: no rank stored shard {self.plan.world_size} of {num_shards}; rank r stores shard "
                    "r, so an array has at most as many as there are ranks"
                )

    def folder_syncs(self, *, manifests: bool = True, arrays: bool = True) -> Iterator[Callable[[], None]]:
        """Return a task for each complete subfolder (manifests, arrays, groups) that makes its entries durable."""
        # No directory walk: a folder has a file per rank. Entries of the folder itself are made durable with the record.
        folders = [MANIFEST_FOLDER] if manifests else []
        folders += filter(None, self._documents) if arrays else []
        return (partial(self._files.sync_folder, self.folder / folder) for folder in folders)

    def record(self, state: Mapping[str, Any], *, training_world_size: int | None = None) -> Record:
        """Return the commit record; called after `collect` has read all manifests."""
        plan = self.plan
        return Record(
            id=plan.save_id,
            tag=plan.tag,
            step=plan.step,
            world_size=plan.world_size,
            training_world_size=training_world_size or plan.world_size,
            run=plan.run_id,
            metadata_sha256=sha256(self._documents[""]),
            manifest_sha256=tuple(self._manifest_digests[rank] for rank in range(plan.world_size)),
            state=state,
        )

    def finish(self, state: Mapping[str, Any], *, training_world_size: int | None = None, sync: bool = True) -> Record:
        """Complete a checkpoint that has all shard files and manifests, and return its commit record. Without `sync`, the
        caller makes the files durable."""
        with Workers(min(4, helpful_threads(0, 2 * len(self._documents))), "zstore-build") as workers:
            workers.run(self.metadata_tasks(), in_caller=True)
            self.collect()
            self.check_complete()
            if sync:  # all together: drives coalesce concurrent flushes
                syncs = (partial(self._files.sync_file, self.folder / manifest_file(rank)) for rank in self._ranks)
                workers.run(chain[Callable[[], None]](syncs, self.syncs(), self.folder_syncs()), in_caller=True)
        return self.record(state, training_world_size=training_world_size)


_WHOLE = ("buffer/", "client/")
"""Groups of arrays that rank 0 stores as one shard, at every world size."""
_MAX_UNFINISHED = 8
"""Shard files written concurrently, with buffers from the resources."""


def reshard_checkpoint(
    reader: ArraySource,
    folder: Path,
    world_size: int | None = None,
    advance: Callable[[int], None] = lambda _: None,
    *,
    codec: str = "none",
    before_commit: Callable[[Path], None] = lambda _: None,
) -> Path:
    """Write `reader`'s checkpoint into `folder` under its tag, laid out for `world_size` ranks (default: as many as it has).

    `codec`, one of `zstore.format.codecs.CODECS`, compresses the chunks, which makes an archive. In the record, only the
    layout changes; the states of ranks (RNG) are kept if the world size is unchanged, else omitted. Memory is bounded.
    `advance` is called with the number of bytes written, before compression; `before_commit` may add files to the
    tag's folder. Returns the tag's folder. Raises CheckpointExistsError if `folder` has that tag.
    """
    record = reader.record
    world_size = record.world_size if world_size is None else world_size
    if world_size < 1:
        raise UsageError(f"world size must be at least 1, got {world_size}")
    if codec not in CODECS:
        raise UsageError(f"expected one of {', '.join(CODECS)} as codec, got {codec!r}")
    # A checkpoint of other software has neither zstore's grids nor ranks' states.
    keeps_layout = world_size == record.world_size and record.id != ""
    arrays = reader.arrays
    plan = CheckpointPlan(
        tag=reader.tag,
        step=record.step,
        world_size=world_size,
        save_id=new_save_id(),
        run_id=record.run,
        specs={name: array.spec for name, array in arrays.items()},
        grids={
            name: array.grid if keeps_layout else _new_grid(array.spec, world_size) for name, array in arrays.items()
        },
        codec=CODECS[codec],
    )
    with open_resources(files=reader.resources.files, pool_bytes=reader.resources.pool.nbytes) as resources:
        committer = Committer(resources.files, folder, plan.tag, plan.save_id)
        committer.check(overwrite=False)
        committer.begin()
        builder = CheckpointBuilder(plan, committer.temporary, resources.files)
        try:
            if plan.codec is None:  # the size of an archive is not known in advance
                needed = sum(
                    plan.file_bytes(name, n) for name, grid in plan.grids.items() for n in range(grid.num_shards)
                )
                resources.files.require_room(folder, needed, f"the checkpoint needs {needed} bytes")
            _write_ranks(
                builder, replace(resources, sync=False), reader, advance, reader.rank_state if keeps_layout else None
            )
            committed = builder.finish(record.state, training_world_size=record.training_world_size)
            before_commit(builder.folder)
            committer.commit(committed)
        except BaseException as error:
            committer.abort(str(error), is_only_rank=True)
            raise
        finally:
            committer.close()
        return committer.target


def _new_grid(spec: ArraySpec, world_size: int) -> Grid:
    grid = make_grid(spec.stored_shape, 1 if spec.name.startswith(_WHOLE) else world_size)
    return grid_in_checkpoint(spec.stored_shape, spec.itemsize, grid)


def _write_ranks(
    builder: CheckpointBuilder,
    res: IoResources,
    reader: ArraySource,
    advance: Callable[[int], None],
    state_of: Callable[[int], Mapping[str, Any]] | None,
) -> None:
    """Write the shards and the manifest of each rank of the new layout, with values from `reader`."""
    plan = builder.plan
    by_rank = {
        rank: [name for name, grid in plan.grids.items() if grid.shard_valid_numel(rank) > 0]
        for rank in range(plan.world_size)
    }
    # Shards are read and filled in this order, one at a time (see [Note: spans]), and written in the background.
    ranges: list[Range] = []
    for rank, name in ((rank, name) for rank, names in by_rank.items() for name in names):
        first = rank * plan.grids[name].shard_numel
        ranges.append((name, first, first + plan.grids[name].shard_valid_numel(rank)))
    with ReadAhead(reader, ranges) as ahead, Workers(4, "zstore-reshard") as workers:
        for rank, names in by_rank.items():
            summaries: list[ShardSummary] = []
            with contextlib.closing(_write_shards(builder, res, rank, names, ahead)) as shards:
                for summary in shards:
                    spec, grid = plan.specs[summary.array], plan.grids[summary.array]
                    make_read_only(builder.folder / plan.shard_path(spec.name, rank))
                    advance(grid.shard_valid_numel(rank) * spec.itemsize)
                    summaries.append(summary)
            # Concurrently: drives coalesce concurrent flushes.
            written = [builder.folder / plan.shard_path(name, rank) for name in names]
            workers.run([partial(res.files.sync_file, path) for path in written])
            builder.write_manifest(rank, COMPLETE, summaries, {} if state_of is None else state_of(rank))


def _write_shards(
    builder: CheckpointBuilder, res: IoResources, rank: int, names: Sequence[str], ahead: ReadAhead
) -> Generator[ShardSummary]:
    """Write a rank's shard files, and yield a summary of each, in order."""
    plan, codec = builder.plan, builder.plan.codec
    shards = (
        (builder.new_path(name, rank), plan.specs[name], plan.grids[name], partial(ahead.read, name)) for name in names
    )
    if codec is not None:
        return (write_packed(res, path, codec, spec, grid, rank, fill) for path, spec, grid, fill in shards)
    started = (
        ShardWriter(res, path, spec, grid, rank, Priority.CHECKPOINT).create(fill, in_caller=True)
        for path, spec, grid, fill in shards
    )
    return in_order(started, _MAX_UNFINISHED)
