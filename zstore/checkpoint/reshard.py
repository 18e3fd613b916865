"""The same state laid out for another number of ranks, or compressed, in bounded memory: one reads ahead, one writes, in one
order."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..format.arrays import ArraySpec, model_array
from ..format.codecs import CODECS, MAX_BLOSC_BYTES, Codec
from ..format.partition import Grid, grid_in_checkpoint, make_grid
from ..io.archives import write_packed
from ..io.files import make_read_only
from ..io.pool import Workers
from ..io.queue import Priority, in_order
from ..io.shards import IoResources, ShardSummary, ShardWriter, open_resources
from ..ranks.division import items_of
from ..ranks.team import ALONE, Team
from .build import CheckpointBuilder
from .commit import Committer, require_shared
from .format import COMPLETE
from .lookahead import Range, ReadAhead
from .moments import block_numel, codes_of_scales, scales_spec
from .names import new_save_id
from .plan import CheckpointPlan
from .source import ArraySource
from .split import TIE

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
    team: Team = ALONE,
) -> Path:
    """Write `reader`'s checkpoint into `folder` under its tag, laid out for `world_size` ranks (default: as many as it has).

    `codec`, one of `zstore.format.codecs.CODECS`, makes it an archive: its chunks are compressed. The record stays as it
    was except for the layout; states of single ranks (RNG) are kept if the world size is, and left out otherwise.
    `advance` is called with the bytes that were written, before compression. Returns the tag's folder. Raises
    CheckpointExistsError if `folder` has that tag. The ranks of `team` write whole shard files, about the same bytes each,
    and rank 0 commits (all ranks).
    """
    world_size = reader.record.world_size if world_size is None else world_size
    if world_size < 1:
        raise UsageError(f"world size must be at least 1, got {world_size}")
    if codec not in CODECS:
        raise UsageError(f"expected one of {', '.join(CODECS)} as codec, got {codec!r}")
    with open_resources(files=reader.resources.files, pool_bytes=reader.resources.pool.nbytes) as resources:
        reshard = _Reshard(reader, resources, folder, (world_size, CODECS[codec]), team)
        return reshard.run(advance or (lambda _: None))


class _Reshard:
    """One resharding."""

    def __init__(
        self, reader: ArraySource, resources: IoResources, folder: Path, made: tuple[int, Codec | None], team: Team
    ) -> None:
        world_size, codec = made
        self._team = team
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
            save_id=team.broadcast_object(new_save_id()),
            run_id=reader.record.run,
            specs=specs,
            grids={name: self._grid(specs, name, world_size) for name in specs},
            codec=codec,
        )
        if codec is not None and codec.name == "blosc":
            self._check_chunks()

    def _grid(self, specs: Mapping[str, ArraySpec], name: str, world_size: int) -> Grid:
        if self._keeps_layout:
            return self._reader.arrays[name].grid
        shape = specs[name].stored_shape
        grid = make_grid(shape, 1 if name.startswith(_WHOLE) else world_size)
        group, _, fqn = name.rpartition(f"{TIE}/")
        codes = codes_of_scales(name)
        if fqn and not group and model_array(fqn) in specs:
            grid = make_grid(specs[model_array(fqn)].stored_shape, world_size).packed()
        elif codes is not None and codes in specs and specs[name] == scales_spec(specs[codes]):
            whole = specs[codes].stored_shape
            grid = make_grid(whole, world_size).packed(block_numel(whole))
        return grid_in_checkpoint(shape, specs[name].itemsize, grid, world_size)

    def _check_chunks(self) -> None:
        for name, grid in self._plan.grids.items():
            if grid.chunk_numel * self._plan.specs[name].itemsize > MAX_BLOSC_BYTES:
                raise UsageError(
                    f"array {name!r} has chunks of over {MAX_BLOSC_BYTES} bytes, which blosc cannot have: use zstd"
                )

    def run(self, advance: Callable[[int], None]) -> Path:
        """Write, commit and return the tag's folder."""
        plan, files, record, team = self._plan, self._resources.files, self._reader.record, self._team
        committer = Committer(files, self._folder, plan.tag, plan.save_id)
        with team.agreeing():
            if team.rank == 0:
                committer.check(overwrite=False)
                committer.begin()
        builder = CheckpointBuilder(plan, committer.temporary, files)
        try:
            with team.agreeing():
                require_shared(committer.temporary, team)
                if plan.codec is None and team.rank == 0:  # nobody knows how small an archive becomes
                    plan.require_room(files, self._folder)
            with team.agreeing():
                left = self._write_shards(builder, advance)
            told = team.all_gather_object([asdict(summary) for summaries in left.values() for summary in summaries])
            with team.agreeing():
                self._write_manifests(builder, told)
            with team.agreeing():
                if team.rank == 0:
                    committer.commit(builder.finish(record.state, training_world_size=record.training_world_size))
        except BaseException as error:
            if team.rank == 0:
                committer.abort(str(error), alone=True)
            raise
        finally:
            committer.close()
        return committer.target

    @cached_property
    def _shards(self) -> list[tuple[int, str]]:
        """All shards of the new layout, by rank."""
        grids = self._plan.grids
        ranks = range(self._plan.world_size)
        return [(rank, name) for rank in ranks for name, grid in grids.items() if grid.shard_valid_numel(rank) > 0]

    @cached_property
    def _mine(self) -> range:
        """Which of them this process writes."""
        specs, grids = self._plan.specs, self._plan.grids
        sizes = (grids[name].shard_valid_numel(rank) * specs[name].itemsize for rank, name in self._shards)
        own = items_of(sizes, self._team.rank, self._team.world_size)
        return range(own[0], own[-1] + 1) if own else range(0)

    def _write_shards(
        self, builder: CheckpointBuilder, advance: Callable[[int], None]
    ) -> dict[int, list[ShardSummary]]:
        """Write this process's shards, and the manifests of those ranks of which it has all. Return the summaries of the
        shards of other ranks, by rank."""
        plan, files = self._plan, self._resources.files
        by_rank: dict[int, list[str]] = {}
        for number in self._mine:
            rank, name = self._shards[number]
            by_rank.setdefault(rank, []).append(name)
        counts = Counter(rank for rank, _ in self._shards)
        left: dict[int, list[ShardSummary]] = {}
        # One order for reading and filling, and one shard at a time: see [Note: spans]. They are written behind.
        ranges = [self._range(rank, name) for rank, names in by_rank.items() for name in names]
        with ReadAhead(self._reader, ranges) as ahead, Workers(4, "zstore-reshard") as workers:
            for rank, names in by_rank.items():
                summaries = self._write(rank, names, builder, ahead, advance)
                # Many at once, and not one by one as they are written: drives coalesce concurrent flushes.
                written = [builder.folder / plan.shard_path(name, rank) for name in names]
                workers.run([partial(files.sync_file, path) for path in written])
                if len(names) == counts[rank]:
                    self._write_manifest(builder, rank, summaries)
                else:
                    left[rank] = summaries
        return left

    def _write_manifests(self, builder: CheckpointBuilder, told: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Write the manifests of ranks whose shards several processes wrote, which the one that has the first of them does;
        and on rank 0 those of ranks that have none. `told` are the summaries of such shards."""
        shared: dict[int, list[ShardSummary]] = {}
        for each in (each for part in told for each in part):
            summary = ShardSummary(**{**each, "crcs": tuple(each["crcs"])})
            shared.setdefault(summary.shard, []).append(summary)
        for number in self._mine:
            rank = self._shards[number][0]
            is_first = number == 0 or self._shards[number - 1][0] != rank
            if is_first and rank in shared:
                self._write_manifest(builder, rank, shared[rank])
        if self._team.rank == 0:
            for rank in sorted({*range(self._plan.world_size)} - {rank for rank, _ in self._shards}):
                self._write_manifest(builder, rank, [])

    def _write_manifest(self, builder: CheckpointBuilder, rank: int, summaries: Sequence[ShardSummary]) -> None:
        rank_state = self._reader.rank_state(rank) if self._keeps_layout else {}
        builder.write_manifest(rank, COMPLETE, summaries, rank_state)

    def _range(self, rank: int, name: str) -> Range:
        grid = self._plan.grids[name]
        first = rank * grid.shard_numel
        return name, first, first + grid.shard_valid_numel(rank)

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
