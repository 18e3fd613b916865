"""Rank 0's part of a save by torch.distributed.checkpoint: the plan of all files, and the commit."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData

from zstore.checkpoint import COMPLETE, CheckpointBuilder, CheckpointPlan, Committer, new_save_id, sweep
from zstore.errors import CheckpointError, UsageError
from zstore.format import ArraySpec, client_array, make_grid, tiles
from zstore.interop.dcp_state import STATE, DcpState, name_arrays
from zstore.interop.dcp_state import Path as KeyPath
from zstore.io import Files, Flush, ShardSummary, make_read_only
from zstore.io.tensors import dtype_name

from .work import PIECES_FOLDER, ArrayLayout, RankWork, box_of


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
    """One checkpoint on its way. Calls: `begin`, then `commit`; `abandon` at any time, and at the end."""

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
        """Makes durable all that ranks write, so that they do not; None: each rank does so, file by file."""
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
            held = sum(box.numel for box in boxes)
            raise UsageError(
                f"{key!r} has {spec.numel} elements, but the ranks hold {held}, or some twice: it is sharded in a way that "
                "torch.distributed.checkpoint does not describe; redistribute it to Shard or Replicate"
            )
        return ArrayLayout.of(spec, boxes, len(self._plans))

    def begin(self, *, overwrite: bool) -> list[SavePlan]:
        """Make the temporary folder, remove those of dead saves, and return the plan of each rank. Raises
        CheckpointExistsError."""
        self._committer.check(overwrite=overwrite)
        needed = sum(layout.spec.nbytes * (2 if layout.boxes else 1) for layout in self._layouts.values())
        self._files.require_room(self._committer.folder, needed, f"the checkpoint needs {needed} bytes")
        self._committer.begin()
        sweep(self._files, self._committer.folder)
        self._flush = Flush.of(self._files, self._folder)
        return [
            dataclasses.replace(plan, storage_data=self._share(rank, plan)) for rank, plan in enumerate(self._plans)
        ]

    def _share(self, rank: int, plan: SavePlan) -> RankWork:
        mine = {item.index.fqn for item in plan.items}
        return RankWork(
            folder=str(self._folder),
            rank=rank,
            arrays={key: each for key, each in self._layouts.items() if key in mine or each.is_owned_by(rank)},
            names={key: self._names[key] for key in mine if key not in self._layouts},
            sync=self._flush is None,
        )

    # -- committing --------------------------------------------------------------------------------------------------

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
        """Return by rank, whose manifest names them, the shards of that number; makes their files read-only."""
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
        self._committer.abort("the save was given up", alone=True)
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
    """Return the path of every entry, by its key; the key alone if the planner keeps no paths."""
    kept: dict[str, KeyPath] = {}
    for plan in plans:
        if isinstance(plan.planner_data, dict):
            kept |= plan.planner_data
    keys = dict.fromkeys(item.index.fqn for plan in plans for item in plan.items)
    return {key: kept.get(key, (key,)) for key in keys}
