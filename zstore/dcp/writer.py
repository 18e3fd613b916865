"""The writer that torch.distributed.checkpoint saves through: a checkpoint of zstore's format.

[Note: who does what in a save by DCP]
    (rank 0)    prepare_global_plan    names, layouts, room; makes the temporary folder
    (all)       write_data             chunks that this rank holds; pieces for others; shards that it owns
    (rank 0)    finish                 manifests, metadata, record; renames the folder to its tag
DCP gathers errors and tells every rank of them; if one comes before `finish`, there is no checkpoint. Files written
by then are removed by the next save through this writer, or when the writer or the process ends.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from zstore.checkpoint import temporary_folder
from zstore.errors import UsageError
from zstore.format import ArrayLayout, ArraySpec, Box, make_grid
from zstore.interop.dcp_names import step_of
from zstore.interop.dcp_values import BYTES, PICKLE, NotPlainError, encode_value
from zstore.io import Files, IoResources, UserPath, Workers, helpful_threads, is_url, open_resources
from zstore.io.closing import closing_with
from zstore.io.tensors import bytes_of, dtype_name

from .destination import SCRATCH_NAME, CheckpointPlace
from .ending import complete_at_the_end, told_at_the_end
from .resting import box_of, is_resting
from .save import EntryReport, Save
from .work import RankWork, RankWriter, Wrote


class Writer(StorageWriter):
    """Writes the checkpoint `path`, a folder that is made, in a folder of checkpoints that all ranks share, or at a URL.

    `step` is that of the record; by default the number that `path` ends with, as in `step-100`, else 0. An existing
    checkpoint is refused unless `overwrite`. With `link_unchanged`, shards whose values are those in the newest checkpoint
    of the folder are hard links to its files. If pieces pass between ranks, one waits `timeout_s` for another.

    To a URL each shard file is uploaded as soon as it is written, and removed from the system's folder for temporary files
    (the variable TMPDIR), which holds a few at a time; of a version it holds this rank's. `storage_options` are those of the
    fsspec file system. With `versions`, a URL without checkpoints becomes a repository of versions; if it is one, the
    checkpoint is a version in any case.
    """

    def __init__(  # noqa: PLR0913 - options of one thing, all but the first by name
        self,
        path: UserPath,
        *,
        step: int | None = None,
        overwrite: bool = False,
        link_unchanged: bool = True,
        num_threads: int = 4,
        timeout_s: float = 1800.0,
        storage_options: Mapping[str, Any] | None = None,
        versions: bool = False,
        _files: Files | None = None,
    ) -> None:
        self._files = _files
        self._step = step
        self._overwrite = overwrite
        self._link_unchanged = link_unchanged
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        self._save: Save | None = None
        self._forget: Callable[[], None] | None = None
        self._storage_options = storage_options
        self._versions = versions
        self._place = CheckpointPlace.of(path, storage_options, versions=versions)
        self.save_id = ""
        """On rank 0 the id of the checkpoint that is written, or was last, as its record has it."""

    # -- DCP's calls, in their order ---------------------------------------------------------------------------------

    def reset(self, checkpoint_id: UserPath | None = None) -> None:
        """Begin another checkpoint, at `checkpoint_id` if it is given (all ranks)."""
        self._give_up()
        if checkpoint_id is not None:
            self._place = CheckpointPlace.of(checkpoint_id, self._storage_options, versions=self._versions)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Give up a save that did not end, and complete this one if the program ends (all ranks)."""
        self._give_up()
        complete_at_the_end(self._title)
        if not kwargs.get("use_collectives", True):
            raise UsageError("zstore.dcp.Writer writes one checkpoint of all ranks: leave out use_collectives=False")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check one rank's entries as far as possible (all ranks)."""
        for item in plan.items:
            if item.tensor_data is not None:
                dtype_name(item.tensor_data.properties.dtype, item.index.fqn)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose names and layouts, and begin the checkpoint (rank 0)."""
        step = step_of(self._place.tag) if self._step is None else self._step
        self._save = Save(
            self._place, step, plans, self._timeout_s, link_unchanged=self._link_unchanged, files=self._files
        )
        self.save_id = self._save.id
        self._forget = closing_with(self, self._save.abandon)
        return self._save.begin(overwrite=self._overwrite)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; done when this returns (all ranks)."""
        share = plan.storage_data
        if not isinstance(share, RankWork):
            raise UsageError("zstore.dcp.Writer was given a plan that it has not prepared")
        with told_at_the_end(self._title):
            return self._write_data(plan, planner, share)

    def _write_data(self, plan: SavePlan, planner: SavePlanner, share: RankWork) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        num_threads = self._num_threads
        if not share.url:
            num_threads = min(num_threads, helpful_threads(_num_bytes(plan), len(plan.items) if share.sync else 0))
        opened = open_resources(num_threads=max(1, num_threads), files=self._files)
        with opened as resources, self._rank_writer(share, resources) as writer:
            try:
                writer.check_folder()
                with Workers(num_threads, f"zstore-dcp-{share.rank}") as workers:
                    future.set_result(_write(writer, plan, planner, workers))
            except BaseException as error:
                writer.give_up(error)
                raise
            finally:
                writer.close()
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint (rank 0)."""
        if self._save is None:
            raise UsageError("finish() without a save: it is called on rank 0 only, after prepare_global_plan()")
        try:
            with told_at_the_end(self._title):
                self._save.commit([each.storage_data for rank in results for each in rank])
        finally:
            self._give_up()

    # ----------------------------------------------------------------------------------------------------------------

    @property
    def _title(self) -> str:
        return f"the save of {self._place.shown}"

    @contextlib.contextmanager
    def _rank_writer(self, share: RankWork, resources: IoResources) -> Iterator[RankWriter]:
        if not share.url:
            yield RankWriter(share, resources)
            return
        # Ranks of one machine have folders of their own.
        with temporary_folder(resources.files, Path(tempfile.gettempdir()), f"{SCRATCH_NAME}-{share.rank}") as scratch:
            yield self._place.rank_writer(share, resources, scratch)

    def __getstate__(self) -> dict[str, Any]:
        # For a copy in another process: a save under way stays here.
        return self.__dict__ | {"_save": None, "_forget": None}

    def _give_up(self) -> None:
        """Forget the save under way, if any, and remove its files; one that was committed stays."""
        forget, self._forget, self._save = self._forget, None, None
        if forget is not None:
            forget()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: UserPath) -> bool:
        """Tell whether checkpoints can be written there."""
        return "://" not in os.fspath(checkpoint_id) or is_url(os.fspath(checkpoint_id))

    @property
    def checkpoint_id(self) -> str:
        """Path or URL of the checkpoint's folder."""
        return self._place.shown

    def storage_meta(self) -> StorageMeta | None:
        """Return the checkpoint's metadata for planners."""
        return StorageMeta(checkpoint_id=self._place.shown)


def _write(writer: RankWriter, plan: SavePlan, planner: SavePlanner, workers: Workers) -> list[WriteResult]:
    # Pieces first: other ranks wait for them. Each batch holds a few tensors' CPU memory at a time.
    writer.require_room(_written(writer, plan, planner))
    items = sorted(plan.items, key=lambda item: not _passes(writer, item))
    results = workers.run([partial(_write_item, writer, item, planner) for item in items], here=True)
    for wrote in workers.run([partial(writer.assemble_shard, layout) for layout in writer.owned()], here=True):
        results.append(WriteResult(MetadataIndex(wrote[0].array), 0, EntryReport(wrote=tuple(wrote))))
    reports: list[EntryReport] = [result.storage_data for result in results]
    opaque = [report.opaque for report in reports if report.opaque is not None]
    parts = iter(writer.complete([part for report in reports for part in report.wrote], opaque, workers))
    return [
        replace(result, storage_data=replace(report, wrote=tuple(islice(parts, len(report.wrote)))))
        for result, report in zip(results, reports, strict=True)
    ]


def _num_bytes(plan: SavePlan) -> int:
    items = (item.tensor_data for item in plan.items if item.tensor_data is not None)
    return sum(math.prod(each.chunk.sizes) * each.properties.dtype.itemsize for each in items)


# A DTensor gives its local part as it is if gradients are not followed.
@torch.no_grad()
def _written(writer: RankWriter, plan: SavePlan, planner: SavePlanner) -> list[tuple[ArrayLayout, Box]]:
    """Return the tensors of a plan that are not in files."""
    found: list[tuple[ArrayLayout, Box]] = []
    for item in plan.items:
        written = item.tensor_data
        if written is not None:
            value = planner.lookup_object(item.index) if isinstance(planner, DefaultSavePlanner) else None
            if not is_resting(value):
                found.append((writer.share.arrays[item.index.fqn], box_of(written)))
    return found


def _passes(writer: RankWriter, item: WriteItem) -> bool:
    return item.tensor_data is not None and writer.share.arrays[item.index.fqn].passes_through_files


@torch.no_grad()
def _write_item(writer: RankWriter, item: WriteItem, planner: SavePlanner) -> WriteResult:
    if item.type == WriteItemType.BYTE_IO:
        return _write_value(writer, item, planner)
    written = item.tensor_data
    if written is None:
        raise UsageError(f"{item.index.fqn!r} is not a tensor")
    layout = writer.share.arrays[item.index.fqn]
    box = box_of(written)
    found: Any = planner.resolve_data(item)
    pin = found.pin_shard() if box.numel and is_resting(found) else None
    wrote: list[Wrote] = []
    if pin is None:
        data = _bytes(item, found, layout.spec, box)
    else:
        try:
            published = writer.publish(layout.spec, layout.grid, box, pin)
            if published is not None:
                return WriteResult(item.index, pin.local.nbytes, EntryReport(wrote=(published,)))
            data = writer.values_of(pin)
        finally:
            pin.release()
    if not layout.passes_through_files:
        wrote = writer.write_box(layout.spec, layout.grid, box, data)
    elif box.numel:
        writer.write_piece(layout, box, data)
    return WriteResult(item.index, data.size, EntryReport(wrote=tuple(wrote)))


def _bytes(item: WriteItem, tensor: Any, spec: ArraySpec, box: Box) -> np.ndarray[Any, np.dtype[np.uint8]]:
    data = bytes_of(tensor)
    # Cached plans are compared without their types.
    if data.size != box.numel * spec.itemsize or dtype_name(tensor.dtype) != spec.dtype:
        raise UsageError(
            f"{item.index.fqn!r}: the plan has {box.numel} elements of {spec.dtype} at {box.offsets}, the state dict a tensor "
            f"of shape {tuple(tensor.shape)} in {tensor.dtype}"
        )
    return data


def _write_value(writer: RankWriter, item: WriteItem, planner: SavePlanner) -> WriteResult:
    key = item.index.fqn
    kind, content = PICKLE, b""
    if isinstance(planner, DefaultSavePlanner) and _is_plain(planner):
        value = planner.lookup_object(item.index)
        if type(value) is bytes:
            kind, content = BYTES, value
        else:
            with contextlib.suppress(NotPlainError):
                return WriteResult(item.index, 0, EntryReport(key=key, value=encode_value(value), is_value=True))
    if kind == PICKLE:
        pickled: Any = planner.resolve_data(item)
        if not isinstance(pickled, io.BytesIO):
            raise UsageError(f"{key!r}: expected bytes from the planner, got a {type(pickled).__name__}")
        content = pickled.getvalue()
    data = np.frombuffer(content, np.uint8)
    spec = ArraySpec(name=writer.share.names[key], shape=(data.size,), dtype="uint8")
    wrote = writer.write_box(spec, make_grid(spec.stored_shape, 1), Box.whole(spec.shape), data)
    return WriteResult(item.index, data.size, EntryReport(key=key, kind=kind, opaque=spec, wrote=tuple(wrote)))


def _is_plain(planner: DefaultSavePlanner) -> bool:
    """Whether the planner pickles the very objects of the state dict, so that they may be looked at instead."""
    names = ("lookup_object", "resolve_data", "transform_object")
    return all(getattr(type(planner), name) is getattr(DefaultSavePlanner, name) for name in names)
