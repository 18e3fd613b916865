"""Rank 0's part of a save by torch.distributed.checkpoint: the plan of all files, and the commit."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData

from zstore.checkpoint import COMPLETE, CheckpointBuilder, CheckpointPlan, Committer, new_save_id, sweep
from zstore.errors import CheckpointError, UsageError
from zstore.format import ArrayLayout, ArraySpec, client_array, lay_out, make_grid, tiles
from zstore.interop.dcp_names import STATE, Names, name_arrays
from zstore.interop.dcp_names import Path as KeyPath
from zstore.interop.dcp_values import make_document
from zstore.io import Files, Flush, ShardSummary, make_read_only
from zstore.io.tensors import dtype_name

from .work import PIECES_FOLDER, RankWork, Wrote, assemble, box_of


@dataclass(frozen=True, kw_only=True)
class EntryReport:
    """A rank's report to rank 0 on one entry."""

    wrote: tuple[Wrote, ...] = ()
    key: str = ""
    is_value: bool = False
    value: Any = None
    """`encode_value` of an entry that is plain data."""
    kind: str = ""
    opaque: ArraySpec | None = None
    """Array of bytes, of `kind`."""


class Save:
    """One checkpoint on its way. Calls: `begin`, then `commit`; `abandon` at any time, and at the end."""

    def __init__(
        self,
        path: Path,
        step: int,
        plans: Sequence[SavePlan],
        timeout_s: float,
        files: Files | None = None,
    ) -> None:
        self._plans = whole_plans(plans)
        self._step = step
        self._timeout_s = timeout_s
        self._files = files or Files()
        self.id = new_save_id()
        self._committer = Committer(self._files, path.parent, path.name, self.id)
        self._folder = self._committer.temporary
        self._flush: Flush | None = None
        """Makes durable all that ranks write, so that they do not; None: each rank does so, file by file."""
        self._tag = path.name
        self._paths = _paths(self._plans)
        self._tensors = _tensors(self._plans)
        self._names = self._name()
        self._layouts = self._lay_out()

    # -- planning ----------------------------------------------------------------------------------------------------

    def _name(self) -> Names:
        """Name tensors by their role; other entries become arrays only if they turn out to be opaque."""
        names = name_arrays({key: path for key, path in self._paths.items() if key in self._tensors})
        taken = set(names.arrays.values())
        for key in self._paths.keys() - self._tensors.keys():
            names.arrays[key] = client_array(key)
            if names.arrays[key] in taken:
                raise UsageError(
                    f"entry {key!r} and a tensor would both be the array {names.arrays[key]!r}: rename one"
                )
        return names

    def _lay_out(self) -> dict[str, ArrayLayout]:
        layouts: dict[str, ArrayLayout] = {}
        for key, pieces in self._tensors.items():
            shape = tuple(pieces[0].size)
            spec = ArraySpec(
                name=self._names.arrays[key], shape=shape, dtype=dtype_name(pieces[0].properties.dtype, key)
            )
            boxes = [box_of(piece) for piece in pieces]
            if not tiles(shape, boxes):
                held = sum(box.numel for box in boxes)
                raise UsageError(
                    f"{key!r} has {spec.numel} elements, but the ranks hold {held}, or some twice: it is sharded in a way that "
                    "torch.distributed.checkpoint does not describe; redistribute it to Shard or Replicate"
                )
            layouts[key] = lay_out(spec, boxes, len(self._plans))
        return layouts

    def begin(self, *, overwrite: bool) -> list[SavePlan]:
        """Make the temporary folder, remove those of dead saves, and return the plan of each rank. Raises
        CheckpointExistsError."""
        self._committer.check(overwrite=overwrite)
        self._committer.begin()
        sweep(self._files, self._committer.folder)
        self._flush = Flush.of(self._files, self._folder)
        return [
            dataclasses.replace(plan, storage_data=self._share(rank, plan)) for rank, plan in enumerate(self._plans)
        ]

    def _share(self, rank: int, plan: SavePlan) -> RankWork:
        mine = {item.index.fqn for item in plan.items}
        return RankWork(
            save_id=self.id,
            folder=str(self._folder),
            rank=rank,
            world_size=len(self._plans),
            arrays={
                key: layout
                for key, layout in self._layouts.items()
                if key in mine or (layout.passes_through_files and layout.grid.shard_valid_numel(rank) > 0)
            },
            names={key: self._names.arrays[key] for key in mine if key not in self._layouts},
            timeout_s=self._timeout_s,
            sync=self._flush is None,
        )

    # -- committing --------------------------------------------------------------------------------------------------

    def commit(self, stored: Iterable[EntryReport]) -> None:
        """Complete the checkpoint from all ranks' files, and commit it. Raises CheckpointError if a part is missing."""
        entries = list(stored)
        state = {STATE: self._document(entries)}
        plan = self._plan([entry.opaque for entry in entries if entry.opaque is not None])
        self._files.remove_tree(self._folder / PIECES_FOLDER)
        builder = CheckpointBuilder(plan, self._folder, self._files)
        for rank, summaries in enumerate(self._summaries(plan, entries)):
            builder.write_manifest(rank, COMPLETE, summaries, {}, sync=False)
        self._committer.commit(builder.finish(state, sync=self._flush is None), self._flush)

    def _plan(self, opaque: Sequence[ArraySpec] = ()) -> CheckpointPlan:
        """Return the plan of a checkpoint of all tensors, and of arrays of bytes."""
        specs = {layout.spec.name: layout.spec for layout in self._layouts.values()}
        grids = {layout.spec.name: layout.grid for layout in self._layouts.values()}
        return CheckpointPlan(
            tag=self._tag,
            step=self._step,
            world_size=len(self._plans),
            save_id=self.id,
            specs=specs | {spec.name: spec for spec in opaque},
            grids=grids | {spec.name: make_grid(spec.stored_shape, 1) for spec in opaque},
        )

    def _document(self, entries: Sequence[EntryReport]) -> dict[str, Any]:
        values: list[tuple[KeyPath, Any]] = []
        opaque: dict[str, str] = {}
        for entry in entries:
            path = self._paths.get(entry.key, (entry.key,))
            if entry.is_value:
                values.append((path, entry.value))
            elif entry.opaque is not None:
                opaque[entry.opaque.name] = entry.kind
                self._names.paths[entry.opaque.name] = path
        return make_document(self._names, values, opaque)

    def _summaries(self, plan: CheckpointPlan, entries: Sequence[EntryReport]) -> list[list[ShardSummary]]:
        """Return by rank, whose manifest names them, the shards of that number."""
        parts: dict[tuple[str, int], list[Wrote]] = defaultdict(list)
        for entry in entries:
            for wrote in entry.wrote:
                parts[wrote.array, wrote.shard].append(wrote)
        summaries: list[list[ShardSummary]] = [[] for _ in self._plans]
        for name, grid in plan.grids.items():
            for shard in range(grid.num_shards):
                written = parts.get((name, shard), [])
                crcs = assemble(grid, shard, name, written)
                file_bytes = plan.file_bytes(name, shard)
                self._take(name, self._folder / plan.shard_path(name, shard), file_bytes)
                summaries[shard].append(ShardSummary(name, shard, file_bytes, crcs))
        return summaries

    def _take(self, name: str, path: Path, file_bytes: int) -> None:
        """Check a shard file of array `name`, and make it read-only."""
        try:
            found = self._files.size(path)
        except FileNotFoundError:
            found = -1
        if found != file_bytes:
            raise CheckpointError(
                f"array {name!r}: a rank wrote {path.name} of {file_bytes} bytes, but rank 0 finds "
                + (f"{found}" if found >= 0 else "no such file")
                + f" in {path.parent}: the folder is not the same one for all ranks"
            )
        make_read_only(path)

    def abandon(self) -> None:
        """Remove all files written, unless they were committed. Never raises."""
        self._committer.abort("the save was given up", alone=True)
        if self._flush is not None:
            self._flush.close()


def whole_plans(plans: Sequence[SavePlan]) -> Sequence[SavePlan]:
    """Return the plans, with those that the planner left out as unchanged taken from its cache.

    A planner with `enable_plan_caching` hands on only changes since its last save, on rank 0 too.
    """
    if all(plan.usable for plan in plans):
        return plans
    kept = [
        cached
        for cached in SavePlanner._cached_global_plan.values()
        if len(cached) == len(plans)
        and all(plan is whole for plan, whole in zip(plans, cached, strict=True) if plan.usable)
    ]
    if len(kept) != 1:
        raise UsageError(
            f"{len(kept)} planners of this process keep plans for {len(plans)} ranks, and zstore.dcp.Writer cannot tell whose "
            "a save is: use enable_plan_caching=True with one class of planners only"
        )
    return kept[0]


def _paths(plans: Sequence[SavePlan]) -> dict[str, KeyPath]:
    """Return the path of every entry, by its key; the key alone if the planner keeps no paths."""
    kept: dict[str, KeyPath] = {}
    for plan in plans:
        if isinstance(plan.planner_data, dict):
            kept |= plan.planner_data
    keys = dict.fromkeys(item.index.fqn for plan in plans for item in plan.items)
    return {key: kept.get(key, (key,)) for key in keys}


def _tensors(plans: Sequence[SavePlan]) -> dict[str, list[TensorWriteData]]:
    """Return the pieces of every tensor, by its key."""
    found: dict[str, list[TensorWriteData]] = defaultdict(list)
    for plan in plans:
        for item in plan.items:
            if item.tensor_data is not None:
                found[item.index.fqn].append(item.tensor_data)
    return dict(found)
