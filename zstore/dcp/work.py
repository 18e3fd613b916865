"""One rank's work for a save by torch.distributed.checkpoint: its chunks, pieces for others, shards that it owns."""

from __future__ import annotations

import contextlib
import errno
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from torch.distributed.checkpoint.planner import TensorWriteData

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
    ShardWriter,
    make_shard_file,
    write_shard,
)
from zstore.ranks.rendezvous import Rendezvous

PIECES_FOLDER = "pieces"
"""In the temporary folder of a save: pieces on their way from rank to rank. Gone before the commit."""


@dataclass(frozen=True, kw_only=True)
class Wrote:
    """Chunks `[first_chunk, first_chunk + len(crcs))` of a shard, which a rank wrote."""

    array: str
    shard: int
    first_chunk: int
    crcs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """A rank's instructions for a save that all ranks share."""

    save_id: str
    folder: str
    """The save's temporary folder."""
    rank: int
    world_size: int
    arrays: dict[str, ArrayLayout]
    """By DCP's key: the tensors of this rank's plan, and those of which it owns a shard."""
    names: dict[str, str]
    """Array by DCP's key, of entries that are no tensors."""
    timeout_s: float
    sync: bool = True
    """Whether ranks make their files durable; else rank 0 does, all at once."""


@dataclass
class RankWriter:
    """Writes one rank's part of a save."""

    share: RankWork
    resources: IoResources
    _buffered: Files = field(default_factory=lambda: Files(direct=False))
    _written: list[Path] = field(default_factory=list)
    """Shard files that are not durable yet."""

    def __post_init__(self) -> None:
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
                is_whole = part.stop - part.first == grid.shard_valid_numel(part.shard)
                write = self._write_whole if is_whole else self._write_chunks
                wrote.append(write(spec, grid, part.shard, (part.first_chunk, part.stop_chunk), rests))
        self._written += [self.shard_path(spec, shard) for shard in {each.shard for each in wrote}]
        return wrote

    def syncs(self) -> list[Callable[[], None]]:
        """Return a task for each shard file that makes it durable: many at once, for drives coalesce concurrent flushes."""
        written, self._written = self._written, []
        return [partial(self.resources.files.sync_file, path) for path in written if self.share.sync]

    def require_room(self, layouts: Iterable[tuple[ArrayLayout, Box]]) -> None:
        """Raise DiskFullError if the disk has no room for these boxes."""
        needed = 0
        for layout, box in layouts:
            spec, grid = layout.spec, layout.grid
            if layout.passes_through_files:
                needed += 2 * box.numel * spec.itemsize
            else:
                needed += -(-box.numel // grid.chunk_numel) * layout_of(grid, 0, spec.dtype).slot_bytes
        if needed:
            text = f"rank {self.share.rank}'s part of the checkpoint needs {needed} bytes"
            self.resources.files.require_room(self.folder, needed, text)

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
            for path, _ in pieces:
                self._wait_for(path)
            files = [(opened.enter_context(self._buffered.opened(path)), box) for path, box in pieces]

            def fill(low: int, high: int, out: Bytes) -> None:
                filled = 0
                for file, box in files:
                    filled += gather(box, low, high, spec.itemsize, partial(self._read_piece, file, spec.itemsize), out)
                if filled != high - low:
                    raise CheckpointError(
                        f"array {spec.name!r}: the pieces of all ranks have {filled} elements in [{low}, {high}), expected "
                        f"{high - low}: they differ from those that rank 0 planned"
                    )

            wrote = self._write_whole(spec, grid, shard, (0, grid.present_chunks(shard)), fill)
        self._written.append(self.shard_path(spec, shard))
        return [wrote]

    def _read_piece(self, file: OpenFile, itemsize: int, start: int, out: Bytes) -> None:
        self._buffered.read_into(file, out, start * itemsize)

    def _wait_for(self, piece: Path) -> None:
        """Return once a piece is there; raises CheckpointError if none comes."""
        share = self.share
        self._rendezvous.wait_until(
            piece.exists,
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


def box_of(piece: TensorWriteData) -> Box:
    """Return which part of its array a piece is."""
    return Box(tuple(piece.size), tuple(piece.chunk.offsets), tuple(piece.chunk.sizes))


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
