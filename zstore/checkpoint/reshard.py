"""The same state laid out for another number of ranks, or compressed, in bounded memory: one reads ahead, one writes, in one
order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..errors import DiskFullError, UsageError
from ..format.arrays import model_array
from ..format.codecs import CODECS, MAX_BLOSC_BYTES, Codec
from ..format.partition import Grid, grid_in_checkpoint, make_grid
from ..io.archives import write_packed
from ..io.pool import Crew
from ..io.queue import Priority
from ..io.shards import IoResources, ShardSummary, checksum_shard, open_resources, write_shard
from ..store.tiers import LocalShard
from ..store.tiers.base import Bytes
from .commit import Committer
from .format import COMPLETE
from .gather import Gatherer
from .lookahead import Range, ReadAhead
from .names import new_save_id
from .publish import Publisher
from .request import SaveRequest
from .source import ArraySource
from .split import TIE

_WHOLE = ("buffer/", "client/")
"""Groups of arrays that rank 0 stores whole, at every world size."""


class _StoredShard:
    """A shard of the new layout, with values from the old one: to a publisher, a pinned shard."""

    tier = "stored"
    version: int | None = None

    def __init__(
        self, ahead: ReadAhead, local: LocalShard, codec: Codec | None, advance: Callable[[int], None]
    ) -> None:
        self.local = local
        self._codec = codec
        self._ahead = ahead
        self._advance = advance

    def publish(self, res: IoResources, path: str | Path, grid: Grid, shard: int, priority: Priority) -> ShardSummary:
        """Write the shard file; see `PinnedShard.publish`."""
        fill = partial(self._ahead.read, self.local.spec.name)
        spec = self.local.spec
        if self._codec is None:
            summary = write_shard(res, path, spec, grid, shard, fill, priority)
        else:
            summary = write_packed(res, path, self._codec, spec, grid, shard, fill)
        self._advance(self.local.nbytes)
        return summary

    def copy_into(self, out: Bytes, grid: Grid, shard: int) -> None:
        """See `PinnedShard.copy_into`."""
        first = shard * grid.shard_numel
        self._ahead.read(self.local.spec.name, first, first + grid.shard_valid_numel(shard), out)

    def checksums(self, res: IoResources, grid: Grid, shard: int) -> tuple[int, ...]:
        """See `PinnedShard.checksums`."""
        return checksum_shard(res, self.local.spec, grid, shard, partial(self._ahead.read, self.local.spec.name))

    def release(self) -> None:
        """Nothing is held."""


def reshard_checkpoint(
    reader: ArraySource,
    folder: Path,
    world_size: int | None = None,
    advance: Callable[[int], None] | None = None,
    *,
    codec: str = "none",
) -> Path:
    """Write `reader`'s checkpoint into `folder` under its tag, laid out for `world_size` ranks (default: as many as it has).

    `codec`, one of `zstore.format.codecs.CODECS`, makes it an archive: its chunks are compressed. The record stays what it
    was but for the layout; what belongs to single ranks (RNG states) stays where the world size does, and is left out else.
    `advance` is told the bytes that were written, before compression. Returns the tag's folder. Raises
    CheckpointExistsError where `folder` has that tag.
    """
    world_size = reader.record.world_size if world_size is None else world_size
    if world_size < 1:
        raise UsageError(f"world size must be at least 1, got {world_size}")
    if codec not in CODECS:
        raise UsageError(f"expected one of {', '.join(CODECS)} as codec, got {codec!r}")
    with open_resources(files=reader.resources.files, pool_bytes=reader.resources.pool.nbytes) as resources:
        job = _Job(reader, resources, folder, world_size, CODECS[codec])
        return job.run(advance or (lambda _: None))


class _Job:
    """One resharding."""

    def __init__(
        self, reader: ArraySource, resources: IoResources, folder: Path, world_size: int, codec: Codec | None
    ) -> None:
        self._reader = reader
        self._resources = resources
        self._folder = folder
        self._world_size = world_size
        self._codec = codec
        self._save_id = new_save_id()
        # Another program's checkpoint has neither our grids nor our ranks' states.
        self._keeps_layout = world_size == reader.record.world_size and reader.record.id != ""
        self._specs = {name: array.spec for name, array in reader.arrays.items()}
        self._grids = {name: self._grid(name) for name in self._specs}
        if codec is not None and codec.name == "blosc":
            self._check_chunks()

    def _grid(self, name: str) -> Grid:
        if self._keeps_layout:
            return self._reader.arrays[name].grid
        spec = self._specs[name]
        return grid_in_checkpoint(spec.stored_shape, spec.itemsize, self._grid_of_ranks(name))

    def _grid_of_ranks(self, name: str) -> Grid:
        if name.startswith(_WHOLE):
            return make_grid(self._specs[name].stored_shape, 1)
        group, _, fqn = name.rpartition(f"{TIE}/")
        if fqn and not group and model_array(fqn) in self._specs:
            return make_grid(self._specs[model_array(fqn)].stored_shape, self._world_size).packed()
        return make_grid(self._specs[name].stored_shape, self._world_size)

    def _check_chunks(self) -> None:
        for name, grid in self._grids.items():
            if grid.chunk_numel * self._specs[name].itemsize > MAX_BLOSC_BYTES:
                raise UsageError(
                    f"array {name!r} has chunks of over {MAX_BLOSC_BYTES} bytes, which blosc cannot have: use zstd"
                )

    def _request(self, rank: int, pins: dict[str, _StoredShard]) -> SaveRequest:
        record = self._reader.record
        return SaveRequest(
            resources=self._resources,
            folder=self._folder,
            tag=self._reader.tag,
            step=record.step,
            rank=rank,
            world_size=self._world_size,
            save_id=self._save_id,
            specs=self._specs,
            grids=self._grids,
            pins=pins,
            run_id=record.run,
            codec=self._codec,
        )

    def run(self, advance: Callable[[int], None]) -> Path:
        """Write, commit and return the tag's folder."""
        committer = Committer(self._resources.files, self._folder, self._reader.tag, self._save_id)
        committer.check(overwrite=False)
        committer.begin()
        try:
            self._check_room(committer.temporary)
            # One order for reading and writing, and one shard at a time: see [Note: spans].
            with ReadAhead(self._reader, self._ranges()) as ahead:
                for rank in range(self._world_size):
                    self._write_rank(rank, committer.temporary, ahead, advance)
            gatherer = Gatherer(self._request(0, {}), committer.temporary)
            with Crew(4, "zstore-reshard") as crew:
                gatherer.write_metadata(crew)
                gatherer.collect()
                gatherer.check_complete()
                gatherer.sync_folders(crew)
            record = self._reader.record
            committer.commit(gatherer.record(record.state, training_world_size=record.training_world_size))
        except BaseException as error:
            committer.abort(str(error), alone=True)
            raise
        finally:
            committer.close()
        return committer.target

    def _ranges(self) -> list[Range]:
        return [
            (name, rank * grid.shard_numel, rank * grid.shard_numel + grid.shard_valid_numel(rank))
            for rank in range(self._world_size)
            for name, grid in self._grids.items()
            if grid.shard_valid_numel(rank) > 0
        ]

    def _write_rank(self, rank: int, folder: Path, ahead: ReadAhead, advance: Callable[[int], None]) -> None:
        pins = {
            name: _StoredShard(ahead, LocalShard(self._specs[name], grid, rank), self._codec, advance)
            for name, grid in self._grids.items()
            if grid.shard_valid_numel(rank) > 0
        }
        publisher = Publisher(self._request(rank, pins), folder, lambda: None)
        rank_state = self._reader.rank_state(rank) if self._keeps_layout else {}
        publisher.write_manifest(COMPLETE, [task() for task in publisher.tasks()], rank_state)

    def _check_room(self, folder: Path) -> None:
        if self._codec is not None:
            return  # nobody knows how small an archive becomes
        request = self._request(0, {})
        needed = sum(
            request.file_bytes(name, shard) for name, grid in self._grids.items() for shard in range(grid.num_shards)
        )
        free = self._resources.files.free_bytes(folder)
        if needed > free:
            raise DiskFullError(
                f"the checkpoint needs {needed} bytes, but only {free} are free: make room, or write elsewhere",
                path=str(self._folder),
                nbytes=needed,
            )
