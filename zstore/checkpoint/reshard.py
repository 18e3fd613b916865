"""The same state laid out for another number of ranks, or compressed, in bounded memory: one reads ahead, one writes, in one
order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..errors import UsageError
from ..format.arrays import ArraySpec, Grid, grid_in_checkpoint, make_grid
from ..format.codecs import CODECS, Codec
from ..io.archives import write_packed
from ..io.files import make_read_only
from ..io.pool import Workers
from ..io.queue import Priority, in_order
from ..io.shards import IoResources, ShardSummary, ShardWriter, open_resources
from .build import CheckpointBuilder, CheckpointPlan
from .commit import Committer
from .format import COMPLETE
from .layout import new_save_id
from .lookahead import Range, ReadAhead
from .reader import ArraySource

_WHOLE = ("buffer/", "client/")
"""Groups of arrays that rank 0 stores whole, at every world size."""
_MOST_BEHIND = 8
"""Shard files that are being written at a time; their buffers are those of the resources."""


def reshard_checkpoint(
    reader: ArraySource,
    folder: Path,
    world_size: int | None = None,
    advance: Callable[[int], None] | None = None,
    *,
    codec: str = "none",
    before_commit: Callable[[Path], None] | None = None,
) -> Path:
    """Write `reader`'s checkpoint into `folder` under its tag, laid out for `world_size` ranks (default: as many as it has).

    `codec`, one of `zstore.format.codecs.CODECS`, makes it an archive: its chunks are compressed. The record stays as it
    was except for the layout; states of single ranks (RNG) are kept if the world size is, and left out otherwise.
    `advance` is called with the bytes that were written, before compression. Returns the tag's folder. Raises
    CheckpointExistsError if `folder` has that tag. `before_commit` may put files into the tag's folder.
    """
    world_size = reader.record.world_size if world_size is None else world_size
    if world_size < 1:
        raise UsageError(f"world size must be at least 1, got {world_size}")
    if codec not in CODECS:
        raise UsageError(f"expected one of {', '.join(CODECS)} as codec, got {codec!r}")
    with open_resources(files=reader.resources.files, pool_bytes=reader.resources.pool.nbytes) as resources:
        reshard = _Reshard(reader, resources, folder, (world_size, CODECS[codec]))
        return reshard.run(advance or (lambda _: None), before_commit or (lambda _: None))


class _Reshard:
    """One resharding."""

    def __init__(
        self, reader: ArraySource, resources: IoResources, folder: Path, made: tuple[int, Codec | None]
    ) -> None:
        world_size, codec = made
        self._reader = reader
        self._resources = replace(resources, sync=False)
        self._folder = folder
        # Another program's checkpoint has neither our grids nor our ranks' states.
        self._keeps_layout = world_size == reader.record.world_size and reader.record.id != ""
        specs = {name: array.spec for name, array in reader.arrays.items()}
        self._plan = CheckpointPlan(
            tag=reader.tag,
            step=reader.record.step,
            world_size=world_size,
            save_id=new_save_id(),
            run_id=reader.record.run,
            specs=specs,
            grids={name: self._grid(specs, name, world_size) for name in specs},
            codec=codec,
        )

    def _grid(self, specs: Mapping[str, ArraySpec], name: str, world_size: int) -> Grid:
        if self._keeps_layout:
            return self._reader.arrays[name].grid
        shape = specs[name].stored_shape
        grid = make_grid(shape, 1 if name.startswith(_WHOLE) else world_size)
        return grid_in_checkpoint(shape, specs[name].itemsize, grid)

    def run(self, advance: Callable[[int], None], before_commit: Callable[[Path], None]) -> Path:
        """Write, commit and return the tag's folder."""
        plan, files, record = self._plan, self._resources.files, self._reader.record
        committer = Committer(files, self._folder, plan.tag, plan.save_id)
        committer.check(overwrite=False)
        committer.begin()
        builder = CheckpointBuilder(plan, committer.temporary, files)
        try:
            if plan.codec is None:  # nobody knows how small an archive becomes
                needed = plan.shard_bytes
                files.require_room(self._folder, needed, f"the checkpoint needs {needed} bytes")
            self._write_ranks(builder, advance)
            committed = builder.finish(record.state, training_world_size=record.training_world_size)
            before_commit(builder.folder)
            committer.commit(committed)
        except BaseException as error:
            committer.abort(str(error), alone=True)
            raise
        finally:
            committer.close()
        return committer.target

    def _write_ranks(self, builder: CheckpointBuilder, advance: Callable[[int], None]) -> None:
        """Write the shards and the manifest of each rank of the new layout."""
        plan, files = self._plan, self._resources.files
        by_rank = {
            rank: [name for name, grid in plan.grids.items() if grid.shard_valid_numel(rank) > 0]
            for rank in range(plan.world_size)
        }
        # One order for reading and filling, and one shard at a time: see [Note: spans]. They are written behind.
        ranges: list[Range] = []
        for rank, name in ((rank, name) for rank, names in by_rank.items() for name in names):
            first = rank * plan.grids[name].shard_numel
            ranges.append((name, first, first + plan.grids[name].shard_valid_numel(rank)))
        with ReadAhead(self._reader, ranges) as ahead, Workers(4, "zstore-reshard") as workers:
            for rank, names in by_rank.items():
                summaries = self._write(rank, names, builder, ahead, advance)
                # Many at once, and not one by one as they are written: drives coalesce concurrent flushes.
                written = [builder.folder / plan.shard_path(name, rank) for name in names]
                workers.run([partial(files.sync_file, path) for path in written])
                rank_state = self._reader.rank_state(rank) if self._keeps_layout else {}
                builder.write_manifest(rank, COMPLETE, summaries, rank_state)

    def _write(
        self,
        rank: int,
        names: Sequence[str],
        builder: CheckpointBuilder,
        ahead: ReadAhead,
        advance: Callable[[int], None],
    ) -> list[ShardSummary]:
        """Write a rank's shard files of the new layout, with values from the old one."""
        res, plan, codec = self._resources, self._plan, self._plan.codec
        asked = (
            (builder.place(name, rank), plan.specs[name], plan.grids[name], partial(ahead.read, name)) for name in names
        )
        if codec is None:
            begun = (
                ShardWriter(res, path, spec, grid, rank, Priority.CHECKPOINT).create(fill, here=True)
                for path, spec, grid, fill in asked
            )
            shards = in_order(begun, _MOST_BEHIND)
        else:
            shards = (write_packed(res, path, codec, spec, grid, rank, fill) for path, spec, grid, fill in asked)
        summaries: list[ShardSummary] = []
        with contextlib.closing(shards) as written:
            for summary in written:
                spec, grid = plan.specs[summary.array], plan.grids[summary.array]
                make_read_only(builder.folder / plan.shard_path(spec.name, rank))
                advance(grid.shard_valid_numel(rank) * spec.itemsize)
                summaries.append(summary)
        return summaries
