"""One rank's work for a save by torch.distributed.checkpoint: its chunks, pieces for others, shards that it owns."""

from __future__ import annotations

import contextlib
import errno
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from zstore.checkpoint import array_path, shard_file
from zstore.errors import CheckpointError, StorageError
from zstore.format import ArrayLayout, ArraySpec, Box, Bytes, Grid, gather, layout_of, plan_reads
from zstore.io import (
    Files,
    Fill,
    FillRuns,
    IoResources,
    OpenFile,
    Priority,
    ShardReader,
    ShardWriter,
    Workers,
    make_shard_file,
    write_shard,
)
from zstore.ranks.rendezvous import Rendezvous
from zstore.remote.packs import Extent
from zstore.store import PinnedShard

from .previous import Previous
from .resting import shard_of

PIECES_FOLDER = "pieces"
"""In the temporary folder of a save: pieces on their way from rank to rank. Gone before the commit."""


@dataclass(frozen=True, kw_only=True)
class Wrote:
    """Chunks `[first_chunk, first_chunk + len(crcs))` of a shard, which a rank wrote."""

    array: str
    shard: int
    first_chunk: int
    crcs: tuple[int, ...]
    linked: bool = False
    """Whether the shard file is a link to one that was there."""
    place: tuple[Extent, str] | None = None
    """Of a version: place and SHA-256 of the shard file."""


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """A rank's instructions for a save that all ranks share."""

    save_id: str
    folder: str
    """The save's temporary folder, if ranks share one."""
    rank: int
    world_size: int
    arrays: dict[str, ArrayLayout]
    """By DCP's key: the tensors of this rank's plan, and those of which it owns a shard."""
    names: dict[str, str]
    """Array by DCP's key, of entries that are no tensors."""
    timeout_s: float
    url: str = ""
    """The folder that files are uploaded to; empty if ranks share one."""
    version: Mapping[str, Any] | None = None
    """The facts by which a rank joins the upload of a version; None if it is none."""
    previous: str = ""
    """Folder of the checkpoint whose unchanged shards are linked; empty if there is none."""
    sync: bool = True
    """Whether ranks make their files durable; else rank 0 does, all at once."""


@dataclass
class RankWriter:
    """Writes one rank's part of a save."""

    share: RankWork
    resources: IoResources
    _buffered: Files = field(default_factory=lambda: Files(direct=False))
    _previous: Previous | None = None
    _written: list[Path] = field(default_factory=list)
    """Shard files that are not durable yet."""

    def __post_init__(self) -> None:
        if self.share.previous:
            resources = replace(self.resources, sync=self.share.sync)
            self._previous = Previous(Path(self.share.previous), resources)
        self._rendezvous = Rendezvous(self.folder / PIECES_FOLDER, self._buffered, self.check_others)

    @cached_property
    def folder(self) -> Path:
        """The save's temporary folder."""
        return Path(self.share.folder)

    def check_folder(self) -> None:
        """Raise CheckpointError if this rank does not see the folder that rank 0 made."""
        if not self.folder.is_dir():
            raise CheckpointError(
                f"rank {self.share.rank} does not see {self.folder}, which rank 0 made: the folder is local to a machine; give "
                "one that all ranks share"
            )

    # -- chunks that this rank holds whole ---------------------------------------------------------------------------

    def write_box(self, spec: ArraySpec, grid: Grid, box: Box, data: Bytes) -> list[Wrote]:
        """Write the chunks of which `box` is made; `data` are its elements' bytes. They are durable after `syncs`."""
        wrote: list[Wrote] = []
        for run in box.overlap(0, spec.numel):
            rests = FillRuns.of(data[run.in_box * spec.itemsize :], spec.itemsize, run.at)
            for part in plan_reads(grid, run.at, run.at + run.numel):
                chunks = part.first_chunk, part.stop_chunk
                # If several ranks write a shard, none knows whether all of it is unchanged.
                is_whole = part.stop - part.first == grid.shard_valid_numel(part.shard)
                linked = self._link(spec, grid, part.shard, rests.fill) if is_whole else None
                write = self._write_whole if is_whole else self._write_chunks
                wrote.append(linked or write(spec, grid, part.shard, chunks, rests))
        for shard in {each.shard for each in wrote if not each.linked}:
            self.deliver(self.shard_path(spec, shard))
        return wrote

    def deliver(self, path: Path) -> None:
        """Note a shard file that this rank wrote its part of."""
        self._written.append(path)

    def syncs(self) -> list[Callable[[], None]]:
        """Return a task for each shard file that makes it durable: many at once, for drives coalesce concurrent flushes."""
        written, self._written = self._written, []
        return [partial(self.resources.files.sync_file, path) for path in written if self.share.sync]

    def complete(self, wrote: Sequence[Wrote], opaque: Iterable[ArraySpec], workers: Workers) -> list[Wrote]:
        """End this rank's part, once all of it is written, arrays of bytes that are not in its plan among it; return the parts
        as rank 0 is to have them."""
        workers.run(self.syncs(), here=True)
        return list(wrote)

    def _link(self, spec: ArraySpec, grid: Grid, shard: int, fill: Fill) -> Wrote | None:
        """Link the shard's file of the checkpoint before, if that holds the same; else None."""
        if self._previous is None:
            return None
        crcs = self._previous.link(spec, grid, shard, fill, self.shard_path(spec, shard))
        return None if crcs is None else Wrote(array=spec.name, shard=shard, first_chunk=0, crcs=crcs, linked=True)

    def publish(self, spec: ArraySpec, grid: Grid, box: Box, pin: PinnedShard) -> Wrote | None:
        """Make the shard file of a pinned tensor in such a file: a link if that is on this file system.

        None if no shard of the checkpoint is that file.
        """
        local = pin.local
        shard = shard_of(local, spec, grid, box)
        if shard is None:
            return None
        path = self.shard_path(spec, shard)
        self.resources.files.make_folder(path.parent)
        summary = pin.publish(self.resources, path, local.grid, local.shard, Priority.CHECKPOINT)
        return Wrote(array=spec.name, shard=shard, first_chunk=0, crcs=summary.crcs, linked=summary.linked)

    def require_room(self, layouts: Iterable[tuple[ArrayLayout, Box]]) -> None:
        """Raise DiskFullError if the disk has no room for these boxes, except for files that may be linked."""
        needed = 0
        for layout, box in layouts:
            spec, grid = layout.spec, layout.grid
            if layout.passes_through_files:
                needed += 2 * box.numel * spec.itemsize
            elif self._previous is None or not self._previous.has(spec, grid):
                needed += -(-box.numel // grid.chunk_numel) * layout_of(grid, 0, spec.dtype).slot_bytes
        if needed:
            text = f"rank {self.share.rank}'s part of the checkpoint needs {needed} bytes"
            self.resources.files.require_room(self.folder, needed, text)

    def values_of(self, pin: PinnedShard) -> Bytes:
        """Return the values of a tensor in a store, in a save that cuts the array in another way."""
        local = pin.local
        data: Bytes = np.empty(local.nbytes, np.uint8)
        path = self.folder / PIECES_FOLDER / f"resting-{self.share.rank}-{uuid.uuid4().hex}"
        self.resources.files.make_folder(path.parent)
        try:
            pin.publish(self.resources, path, local.grid, local.shard, Priority.CHECKPOINT)
            file = ShardReader(self.resources, path, local.spec, local.grid, local.shard)
            file.read(local.base, local.base + local.valid_numel, data)
        finally:
            self.resources.files.unlink(path)
        return data

    def close(self) -> None:
        """Close the checkpoint before, if there is one."""
        if self._previous is not None:
            self._previous.close()

    def shard_path(self, spec: ArraySpec, shard: int) -> Path:
        """Return the path of a shard's file."""
        return self.folder / array_path(spec.name) / shard_file(len(spec.stored_shape), shard)

    def _write_whole(
        self, spec: ArraySpec, grid: Grid, shard: int, chunks: tuple[int, int], fill: Fill | FillRuns
    ) -> Wrote:
        """Write a shard that no other rank has a part of."""
        path = self.shard_path(spec, shard)
        self.resources.files.make_folder(path.parent)
        summary = write_shard(replace(self.resources, sync=False), path, spec, grid, shard, fill)
        return Wrote(array=spec.name, shard=shard, first_chunk=0, crcs=summary.crcs)

    def _write_chunks(
        self, spec: ArraySpec, grid: Grid, shard: int, chunks: tuple[int, int], fill: Fill | FillRuns
    ) -> Wrote:
        path = self.shard_path(spec, shard)
        self._make(path, grid, shard, spec.dtype)
        writer = ShardWriter(self.resources, path, spec, grid, shard, Priority.CHECKPOINT)
        crcs = writer.write(*chunks, fill)
        return Wrote(array=spec.name, shard=shard, first_chunk=chunks[0], crcs=tuple(crcs))

    def _make(self, path: Path, grid: Grid, shard: int, dtype: str) -> None:
        """Make the shard file, unless another rank that has chunks of it was first."""
        if path.exists():
            return
        self.resources.files.make_folder(path.parent)
        try:
            make_shard_file(self.resources, path, layout_of(grid, shard, dtype))
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise

    # -- pieces for others -------------------------------------------------------------------------------------------

    def write_piece(self, layout: ArrayLayout, box: Box, data: Bytes) -> None:
        """Put this rank's piece of an array into a file, for the owners of its shards."""
        path = self.piece_path(layout, box)
        self._buffered.make_folder(path.parent)
        part = path.with_suffix(".part")
        with self._buffered.opened(part, write=True, create=True) as file:
            self._buffered.write_from(file, data, 0)
        self._buffered.rename(part, path)

    def piece_path(self, layout: ArrayLayout, box: Box) -> Path:
        """Return the path of a piece."""
        return self.folder / PIECES_FOLDER / array_path(layout.spec.name) / f"piece-{layout.boxes.index(box)}"

    def assemble_shard(self, layout: ArrayLayout) -> list[Wrote]:
        """Write this rank's shard of an array out of all ranks' pieces; waits for them."""
        spec, grid, shard = layout.spec, layout.grid, self.share.rank
        base = shard * grid.shard_numel
        end = base + grid.shard_valid_numel(shard)
        touching = (box for box in layout.boxes if next(box.overlap(base, end), None) is not None)
        pieces = [(self.piece_path(layout, box), box) for box in touching]
        with contextlib.ExitStack() as opened:
            paths = [(opened.enter_context(self.piece(path)), box) for path, box in pieces]
            files = [(opened.enter_context(self._buffered.opened(path)), box) for path, box in paths]

            def fill(low: int, high: int, out: Bytes) -> None:
                filled = 0
                for file, box in files:
                    filled += gather(box, low, high, spec.itemsize, partial(self._read_piece, file, spec.itemsize), out)
                if filled != high - low:
                    raise CheckpointError(
                        f"array {spec.name!r}: the pieces of all ranks have {filled} elements in [{low}, {high}), expected "
                        f"{high - low}: they differ from those that rank 0 planned"
                    )

            if (linked := self._link(spec, grid, shard, fill)) is not None:
                return [linked]
            wrote = self._write_whole(spec, grid, shard, (0, grid.present_chunks(shard)), fill)
        self.deliver(self.shard_path(spec, shard))
        return [wrote]

    def _read_piece(self, file: OpenFile, itemsize: int, start: int, out: Bytes) -> None:
        self._buffered.read_into(file, out, start * itemsize)

    @contextlib.contextmanager
    def piece(self, path: Path) -> Iterator[Path]:
        """Wait for a piece, and yield the file that has it."""
        self.wait_for(path.exists, path)
        yield path

    def wait_for(self, is_there: Callable[[], bool], piece: object) -> None:
        """Return once a piece is there; raises CheckpointError if none comes."""
        share = self.share
        self._rendezvous.wait_until(
            is_there,
            share.timeout_s,
            lambda: f"rank {share.rank}: no rank wrote {piece} within {share.timeout_s} s; the save is given up",
        )

    def check_others(self) -> None:
        """Raise CheckpointError if another rank gave up the save."""
        for path in self._rendezvous.folder.glob("failed-*.json"):
            if (told := self._rendezvous.posted(path.name)) is not None:
                raise CheckpointError(f"another rank gave up the save: {told.get('reason')}")
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} is gone: the save was given up, or the folder is not shared by all ranks"
            )

    def give_up(self, error: BaseException) -> None:
        """Tell ranks that wait for this one's pieces that none will come. Never raises."""
        with contextlib.suppress(OSError):
            self._rendezvous.folder.mkdir(exist_ok=True)
            reason = f"rank {self.share.rank}: {type(error).__name__}: {error}"
            self._rendezvous.post(f"failed-{self.share.rank}.json", {"reason": reason})

    def owned(self) -> list[ArrayLayout]:
        """Return the arrays of which this rank puts a shard together."""
        rank = self.share.rank
        return [
            layout
            for layout in self.share.arrays.values()
            if layout.passes_through_files and layout.grid.shard_valid_numel(rank) > 0
        ]


def assemble(grid: Grid, shard: int, name: str, parts: Sequence[Wrote]) -> tuple[int, ...]:
    """Return the checksums of all present chunks of a shard. Raises CheckpointError if some are missing or double."""
    crcs: list[int | None] = [None] * grid.present_chunks(shard)
    counts = Counter[int]()
    for part in parts:
        for i, crc in enumerate(part.crcs):
            crcs[part.first_chunk + i] = crc
            counts[part.first_chunk + i] += 1
    whole = tuple(crc for crc in crcs if crc is not None)
    if len(whole) < len(crcs) or max(counts.values(), default=0) > 1:
        raise CheckpointError(
            f"array {name!r}: chunks of shard {shard} were not written by one rank each; this is a bug"
        )
    return whole
