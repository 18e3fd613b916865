"""A save by torch.distributed.checkpoint: rank 0's plan of all files and its commit, and the work of each rank.

[Note: pieces and shards]
One rank writes a shard. If the pieces of a tensor are the shards of some grid (rows, as FSDP cuts them), each rank
writes those that it has. Otherwise (columns, several dims) the ranks put their pieces into files, and each shard is put
together by one rank, its owner.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData

from zstore.checkpoint import (
    COMPLETE,
    CheckpointBuilder,
    CheckpointPlan,
    Committer,
    abort_reason,
    array_path,
    new_save_id,
    shard_file,
    sweep,
)
from zstore.errors import CheckpointError, UsageError
from zstore.format import ArraySpec, Box, Bytes, Grid, client_array, gather, grid_of_rows, make_grid, tiles
from zstore.interop.dcp_state import STATE, DcpState, name_arrays
from zstore.interop.dcp_state import Path as KeyPath
from zstore.io import Files, Fill, FillRuns, Flush, IoResources, OpenFile, ShardSummary, make_read_only, write_shard
from zstore.io.closing import wait_until
from zstore.io.memory import dtype_name

PIECES_FOLDER = "pieces"
"""Folder inside a save's temporary folder for pieces that ranks exchange. Removed before the commit."""
TIMEOUT_S = 1800.0
"""How long a rank waits for others' pieces."""


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
    """Tensors by DCP's key: the ones in this rank's plan, and the ones that it owns a shard of."""
    names: dict[str, str]
    """Array by DCP's key, of entries that are no tensors."""
    sync: bool = True
    """Whether ranks make their files durable; else rank 0 does, all at once."""


@dataclass(frozen=True, kw_only=True)
class EntryReport:
    """A rank's report to rank 0 on one entry."""

    wrote: ShardSummary | None = None
    key: str = ""
    is_value: bool = False
    value: Any = None
    """`encode_value` of an entry that is plain data."""
    kind: str = ""
    opaque: ArraySpec | None = None
    """Array of bytes, of `kind`."""


class Save:
    """A checkpoint that is being saved. Calls: `begin`, then `commit`; `abandon` at any time, and at the end."""

    def __init__(self, path: Path, step: int, plans: Sequence[SavePlan], files: Files | None = None) -> None:
        if not all(plan.usable for plan in plans):
            raise UsageError(
                "the planner left out the entries of its last save: zstore.dcp.Writer needs whole plans, so leave out "
                "enable_plan_caching=True"
            )
        self._plans = plans
        self._step = step
        self._files = files or Files()
        self.id = new_save_id()
        self._committer = Committer(self._files, path.parent, path.name, self.id)
        self._folder = self._committer.temporary
        self._flush: Flush | None = None
        """Flushes all files that ranks write, so that they need not; None: each rank does so, file by file."""
        self._tag = path.name
        self._paths = _paths(plans)
        tensors: dict[str, list[TensorWriteData]] = defaultdict(list)
        for item in (item for plan in plans for item in plan.items):
            if item.tensor_data is not None:
                tensors[item.index.fqn].append(item.tensor_data)
        self._names = _name(self._paths, tensors)
        self._layouts = {key: self._lay_out(key, pieces) for key, pieces in tensors.items()}

    def _lay_out(self, key: str, pieces: Sequence[TensorWriteData]) -> ArrayLayout:
        shape = tuple(pieces[0].size)
        dtype = dtype_name(pieces[0].properties.dtype, key)
        spec = ArraySpec(name=self._names[key], shape=shape, dtype=dtype)
        boxes = [box_of(piece) for piece in pieces]
        if not tiles(shape, boxes):
            found = sum(box.numel for box in boxes)
            raise UsageError(
                f"{key!r} has {spec.numel} elements, but the ranks have {found}, or some twice: it is sharded in a way that "
                "torch.distributed.checkpoint does not describe; redistribute it to Shard or Replicate"
            )
        return ArrayLayout.of(spec, boxes, len(self._plans))

    def begin(self, *, overwrite: bool) -> list[SavePlan]:
        """Create the temporary folder, remove dead ones, and return each rank's plan. Raises CheckpointExistsError."""
        self._committer.check(overwrite=overwrite)
        needed = sum(layout.spec.nbytes * (2 if layout.boxes else 1) for layout in self._layouts.values())
        self._files.require_room(self._committer.folder, needed, f"the checkpoint needs {needed} bytes")
        self._committer.begin()
        sweep(self._files, self._committer.folder)
        self._flush = Flush.of(self._files, self._folder)
        return [replace(plan, storage_data=self._work_of(rank, plan)) for rank, plan in enumerate(self._plans)]

    def _work_of(self, rank: int, plan: SavePlan) -> RankWork:
        planned = {item.index.fqn for item in plan.items}
        return RankWork(
            folder=str(self._folder),
            rank=rank,
            arrays={key: each for key, each in self._layouts.items() if key in planned or each.is_owned_by(rank)},
            names={key: self._names[key] for key in planned if key not in self._layouts},
            sync=self._flush is None,
        )

    def commit(self, stored: Iterable[EntryReport]) -> None:
        """Complete the checkpoint from all ranks' files, and commit it. Raises CheckpointError if a part is missing."""
        entries = list(stored)
        opaque = [entry.opaque for entry in entries if entry.opaque is not None]
        grids = {layout.spec.name: layout.grid for layout in self._layouts.values()}
        plan = CheckpointPlan(
            tag=self._tag,
            step=self._step,
            world_size=len(self._plans),
            save_id=self.id,
            specs={spec.name: spec for spec in (*(layout.spec for layout in self._layouts.values()), *opaque)},
            grids=grids | {spec.name: make_grid(spec.stored_shape, 1) for spec in opaque},
        )
        state = {STATE: self._document(entries)}
        self._files.remove_tree(self._folder / PIECES_FOLDER)
        builder = CheckpointBuilder(plan, self._folder, self._files)
        for rank, summaries in enumerate(self._summaries(plan, entries)):
            builder.write_manifest(rank, COMPLETE, summaries, {}, sync=False)
        self._committer.commit(builder.finish(state, sync=self._flush is None), self._flush)

    def _document(self, entries: Sequence[EntryReport]) -> dict[str, Any]:
        state = DcpState(paths={layout.spec.name: self._paths[key] for key, layout in self._layouts.items()})
        for entry in entries:
            path = self._paths.get(entry.key, (entry.key,))
            if entry.is_value:
                state.values.append((path, entry.value))
            elif entry.opaque is not None:
                state.opaque[entry.opaque.name] = entry.kind
                state.paths[entry.opaque.name] = path
        return state.document()

    def _summaries(self, plan: CheckpointPlan, entries: Sequence[EntryReport]) -> list[list[ShardSummary]]:
        """Return the shards by the rank whose manifest names them; makes their files read-only."""
        wrote = {(each.wrote.array, each.wrote.shard): each.wrote for each in entries if each.wrote is not None}
        summaries: list[list[ShardSummary]] = [[] for _ in self._plans]
        for name, grid in plan.grids.items():
            for shard in range(grid.num_shards):
                path, summary = self._folder / plan.shard_path(name, shard), wrote.get((name, shard))
                if summary is None or not path.is_file() or self._files.size(path) != summary.file_bytes:
                    raise CheckpointError(
                        f"array {name!r}: rank 0 does not find {path} as a rank wrote it: the folder is not the same one for "
                        "all ranks"
                    )
                make_read_only(path)
                summaries[shard].append(summary)
        return summaries

    def abandon(self) -> None:
        """Remove all files written, unless they were committed. Never raises."""
        self._committer.abort("the save was abandoned", is_only_rank=True)
        if self._flush is not None:
            self._flush.close()


def _name(paths: dict[str, KeyPath], tensors: Iterable[str]) -> dict[str, str]:
    """Return the array of each key, of tensors by their role; other entries become arrays only if they are opaque."""
    names = name_arrays({key: paths[key] for key in tensors})
    taken = set(names.values())
    for key in paths.keys() - names.keys():
        names[key] = client_array(key)
        if names[key] in taken:
            raise UsageError(f"entry {key!r} and a tensor would both be the array {names[key]!r}: rename one")
    return names


def _paths(plans: Sequence[SavePlan]) -> dict[str, KeyPath]:
    """Return the path of every entry, by its key; just the key if the planner keeps no paths."""
    kept: dict[str, KeyPath] = {}
    for plan in plans:
        if isinstance(plan.planner_data, dict):
            kept |= plan.planner_data
    keys = dict.fromkeys(item.index.fqn for plan in plans for item in plan.items)
    return {key: kept.get(key, (key,)) for key in keys}


class RankWriter:
    """Writes one rank's part of a save."""

    def __init__(self, work: RankWork, resources: IoResources) -> None:
        self.work, self.resources, self.folder = work, resources, Path(work.folder)
        self._buffered = Files(direct=False)

    def check(self) -> None:
        """Raise CheckpointError if another rank gave up the save, or this one does not see the folder that rank 0 made."""
        for path in (self.folder / PIECES_FOLDER).glob("failed-*.json"):
            if (reason := abort_reason(path)) is not None:
                raise CheckpointError(f"another rank gave up the save: {reason}")
        if not self.folder.is_dir():
            raise CheckpointError(
                f"rank {self.work.rank} does not see {self.folder}, which rank 0 made: the save was given up, or the folder "
                "is local to a machine; give one that all ranks share"
            )

    def write_box(self, spec: ArraySpec, grid: Grid, box: Box, data: Bytes) -> ShardSummary:
        """Write the shard that `box` is; `data` are its elements' bytes."""
        run = next(box.overlap(0, spec.numel))
        return self._write(spec, grid, run.at // grid.shard_numel, FillRuns.of(data, spec.itemsize, run.at))

    def _write(self, spec: ArraySpec, grid: Grid, shard: int, fill: Fill | FillRuns) -> ShardSummary:
        path = self.folder / array_path(spec.name) / shard_file(len(spec.stored_shape), shard)
        self.resources.files.make_folder(path.parent)
        return write_shard(replace(self.resources, sync=self.work.sync), path, spec, grid, shard, fill)

    def write_piece(self, layout: ArrayLayout, box: Box, data: Bytes) -> None:
        """Write this rank's piece of an array into a file, for the owners of its shards."""
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
        spec, grid, shard = layout.spec, layout.grid, self.work.rank
        base = shard * grid.shard_numel
        end = base + grid.shard_valid_numel(shard)
        touching = (box for box in layout.boxes if next(box.overlap(base, end), None) is not None)
        pieces = [(self._piece_path(layout, box), box) for box in touching]
        with contextlib.ExitStack() as opened:
            for path, _ in pieces:
                failure = f"no rank wrote {path} within {TIMEOUT_S:g} s: the save was abandoned"
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
        """Let ranks that wait for this one's pieces fail. Never raises."""
        with contextlib.suppress(OSError):
            folder = self.folder / PIECES_FOLDER
            folder.mkdir(exist_ok=True)
            reason = f"rank {self.work.rank}: {type(error).__name__}: {error}"
            path = folder / f"failed-{self.work.rank}.json"
            self._buffered.write_small(path, json.dumps({"reason": reason}).encode(), sync=False)


def box_of(piece: TensorWriteData) -> Box:
    """Return which part of its array a piece is."""
    return Box(tuple(piece.size), tuple(piece.chunk.offsets), tuple(piece.chunk.sizes))
