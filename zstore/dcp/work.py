"""One rank's work for a save by torch.distributed.checkpoint: its shards, pieces for others, shards that it puts together.

[Note: pieces and shards]
One rank writes a shard. If the pieces of a tensor are the shards of some grid (rows, as FSDP cuts them), each rank writes
those that it holds. If not (columns, several dims), the ranks put their pieces into files, and each shard is put together
by one rank, its owner.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch.distributed.checkpoint.planner import TensorWriteData

from zstore.checkpoint import abort_reason, array_path, shard_file
from zstore.errors import CheckpointError
from zstore.format import ArraySpec, Box, Bytes, Grid, gather, grid_of_rows, make_grid
from zstore.io import Files, Fill, FillRuns, IoResources, OpenFile, ShardSummary, write_shard
from zstore.io.closing import wait_until

PIECES_FOLDER = "pieces"
"""In the temporary folder of a save: pieces on their way from rank to rank. Gone before the commit."""
TIMEOUT_S = 1800.0
"""How long a rank waits for pieces of others."""


@dataclass(frozen=True, kw_only=True)
class ArrayLayout:
    """How an array is written. See [Note: pieces and shards]."""

    spec: ArraySpec
    grid: Grid
    boxes: tuple[Box, ...] = ()
    """All pieces, if pieces pass through files; empty if every rank writes its own shards."""

    def is_owned_by(self, rank: int) -> bool:
        """Return whether a rank puts a shard together out of pieces."""
        return bool(self.boxes) and self.grid.shard_valid_numel(rank) > 0

    @staticmethod
    def of(spec: ArraySpec, boxes: Sequence[Box], world_size: int) -> ArrayLayout:
        """Return how an array in `boxes`, which tile it, is written."""
        pieces = tuple(box for box in boxes if box.numel)
        if len(pieces) <= 1:
            return ArrayLayout(spec=spec, grid=make_grid(spec.stored_shape, 1))
        runs = [next(box.overlap(0, spec.numel)) for box in pieces]
        shard_numel = max(run.numel for run in runs)
        are_rows = (
            len(pieces) <= world_size
            and shard_numel % spec.row_numel == 0
            and all(run.numel == box.numel for run, box in zip(runs, pieces, strict=True))
            and all(run.at % shard_numel == 0 for run in runs)
        )
        if are_rows and (grid := grid_of_rows(spec.stored_shape, shard_numel // spec.row_numel)) is not None:
            return ArrayLayout(spec=spec, grid=grid)
        return ArrayLayout(spec=spec, grid=make_grid(spec.stored_shape, world_size), boxes=pieces)


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """A rank's instructions for a save that all ranks share."""

    folder: str
    """The save's temporary folder."""
    rank: int
    arrays: dict[str, ArrayLayout]
    """By DCP's key: the tensors of this rank's plan, and those of which it owns a shard."""
    names: dict[str, str]
    """Array by DCP's key, of entries that are no tensors."""
    sync: bool = True
    """Whether ranks make their files durable; else rank 0 does, all at once."""


class RankWriter:
    """Writes one rank's part of a save."""

    def __init__(self, share: RankWork, resources: IoResources) -> None:
        self.share, self.resources, self.folder = share, resources, Path(share.folder)
        self._buffered = Files(direct=False)

    def check(self) -> None:
        """Raise CheckpointError if another rank gave up the save, or this one does not see the folder that rank 0 made."""
        for path in (self.folder / PIECES_FOLDER).glob("failed-*.json"):
            if (reason := abort_reason(path)) is not None:
                raise CheckpointError(f"another rank gave up the save: {reason}")
        if not self.folder.is_dir():
            raise CheckpointError(
                f"rank {self.share.rank} does not see {self.folder}, which rank 0 made: the save was given up, or the folder "
                "is local to a machine; give one that all ranks share"
            )

    def write_box(self, spec: ArraySpec, grid: Grid, box: Box, data: Bytes) -> ShardSummary:
        """Write the shard that `box` is; `data` are its elements' bytes."""
        run = next(box.overlap(0, spec.numel))
        return self._write(spec, grid, run.at // grid.shard_numel, FillRuns.of(data, spec.itemsize, run.at))

    def _write(self, spec: ArraySpec, grid: Grid, shard: int, fill: Fill | FillRuns) -> ShardSummary:
        path = self.folder / array_path(spec.name) / shard_file(len(spec.stored_shape), shard)
        self.resources.files.make_folder(path.parent)
        return write_shard(replace(self.resources, sync=self.share.sync), path, spec, grid, shard, fill)

    # -- pieces for others -------------------------------------------------------------------------------------------

    def write_piece(self, layout: ArrayLayout, box: Box, data: Bytes) -> None:
        """Put this rank's piece of an array into a file, for the owners of its shards."""
        path = self._piece_path(layout, box)
        self._buffered.make_folder(path.parent)
        part = path.with_suffix(".part")
        with self._buffered.opened(part, write=True, create=True) as file:
            self._buffered.write_from(file, data, 0)
        self._buffered.rename(part, path)

    def _piece_path(self, layout: ArrayLayout, box: Box) -> Path:
        return self.folder / PIECES_FOLDER / array_path(layout.spec.name) / f"piece-{layout.boxes.index(box)}"

    def assemble_shard(self, layout: ArrayLayout) -> ShardSummary:
        """Write this rank's shard of an array out of all ranks' pieces; waits for them."""
        spec, grid, shard = layout.spec, layout.grid, self.share.rank
        base = shard * grid.shard_numel
        end = base + grid.shard_valid_numel(shard)
        touching = (box for box in layout.boxes if next(box.overlap(base, end), None) is not None)
        pieces = [(self._piece_path(layout, box), box) for box in touching]
        with contextlib.ExitStack() as opened:
            for path, _ in pieces:
                failure = f"no rank wrote {path} within {TIMEOUT_S:g} s: the save is given up"
                wait_until(path.exists, TIMEOUT_S, lambda failure=failure: failure, check=self.check)  # type: ignore[misc]
            files = [(opened.enter_context(self._buffered.opened(path)), box) for path, box in pieces]

            def read(file: OpenFile, start: int, out: Bytes) -> None:
                self._buffered.read_into(file, out, start * spec.itemsize)

            def fill(low: int, high: int, out: Bytes) -> None:
                filled = sum(gather(box, low, high, spec.itemsize, partial(read, file), out) for file, box in files)
                if filled != high - low:
                    raise CheckpointError(
                        f"array {spec.name!r}: the pieces of all ranks have {filled} elements in [{low}, {high}), expected "
                        f"{high - low}: they differ from those that rank 0 planned"
                    )

            return self._write(spec, grid, shard, fill)

    def give_up(self, error: BaseException) -> None:
        """Tell ranks that wait for this one's pieces that none will come. Never raises."""
        with contextlib.suppress(OSError):
            folder = self.folder / PIECES_FOLDER
            folder.mkdir(exist_ok=True)
            reason = f"rank {self.share.rank}: {type(error).__name__}: {error}"
            path = folder / f"failed-{self.share.rank}.json"
            self._buffered.write_small(path, json.dumps({"reason": reason}).encode(), sync=False)


def box_of(piece: TensorWriteData) -> Box:
    """Return which part of its array a piece is."""
    return Box(tuple(piece.size), tuple(piece.chunk.offsets), tuple(piece.chunk.sizes))
