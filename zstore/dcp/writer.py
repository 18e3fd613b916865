"""The writer that torch.distributed.checkpoint saves through: a checkpoint of zstore's format.

[Note: who does what in a save by DCP]
    (rank 0)    prepare_global_plan    names, layouts, room; makes the temporary folder
    (all)       write_data             shards that this rank has; pieces for others; shards that it owns
    (rank 0)    finish                 manifests, metadata, record; renames the folder to its tag
DCP gathers errors and reports them to every rank; after an error before `finish`, no checkpoint is committed. Files
written by then are removed by the next save through this writer, or when the writer or the process ends.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from zstore.checkpoint import tag_text
from zstore.errors import UsageError, shown
from zstore.format import ArraySpec, Box, make_grid
from zstore.interop.dcp_state import BYTES, PICKLE, NotPlainError, encode_value, step_of
from zstore.io import Files, UserPath, Workers, open_resources, user_path
from zstore.io.closing import make_finalizer
from zstore.io.memory import bytes_of, dtype_name

from .save import EntryReport, RankWork, RankWriter, Save, box_of

_of_thread = threading.local()


class Writer(StorageWriter):
    """Writes the checkpoint `path`, a new folder, in a folder of checkpoints that all ranks share.

    `step` is the record's step; by default the number at the end of `path`, as in `step-100`, else 0. An existing
    checkpoint is refused unless `overwrite`. Raises UsageError for a URL.
    """

    def __init__(
        self,
        path: UserPath,
        *,
        step: int | None = None,
        overwrite: bool = False,
        num_threads: int = 4,
        _files: Files | None = None,
    ) -> None:
        self._files = _files
        self._step = step
        self._overwrite = overwrite
        self._num_threads = num_threads
        self._save: Save | None = None
        self._forget: Callable[[], None] | None = None
        self._path = _folder_of(path)

    def reset(self, checkpoint_id: UserPath | None = None) -> None:
        """Begin another checkpoint, at `checkpoint_id` if given (all ranks)."""
        self._abandon()
        if checkpoint_id is not None:
            self._path = _folder_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Give up a save that did not end (all ranks)."""
        self._abandon()
        if not kwargs.get("use_collectives", True):
            raise UsageError("zstore.dcp.Writer writes one checkpoint of all ranks: leave out use_collectives=False")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged: rank 0 checks all of them (all ranks)."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose names and layouts, and begin the checkpoint (rank 0)."""
        step = step_of(self._path.name) if self._step is None else self._step
        self._save = Save(self._path, step, plans, self._files)
        self._forget = make_finalizer(self, self._save.abandon)
        if threading.current_thread() is not threading.main_thread():
            # The thread of `async_save` ends after the save, or its failure on any rank, which only the future reports.
            _of_thread.marker = marker = set[None]()
            weakref.finalize(marker, self._forget).atexit = False  # it does nothing after `finish`
            del marker  # an error's traceback may keep this frame
        return self._save.begin(overwrite=self._overwrite)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; done when this returns (all ranks)."""
        work = plan.storage_data
        if not isinstance(work, RankWork):
            raise UsageError("zstore.dcp.Writer was given a plan that it has not prepared")
        future: Future[list[WriteResult]] = Future()
        with open_resources(num_threads=self._num_threads, files=self._files) as resources:
            writer = RankWriter(work, resources)
            try:
                writer.check()
                with Workers(self._num_threads, f"zstore-dcp-{work.rank}") as workers:
                    future.set_result(_write(writer, plan, planner, workers))
            except BaseException as error:
                writer.give_up(error)
                raise
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint (rank 0)."""
        if self._save is None:
            raise UsageError("finish() without a save: it is called on rank 0 only, after prepare_global_plan()")
        try:
            self._save.commit([each.storage_data for rank in results for each in rank])
        finally:
            self._abandon()

    # ----------------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process has no part in a running save.
        return self.__dict__ | {"_save": None, "_forget": None}

    def _abandon(self) -> None:
        """Remove the files of a running save, if any; a committed one stays."""
        forget, self._forget, self._save = self._forget, None, None
        if forget is not None:
            forget()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: UserPath) -> bool:
        """Return whether checkpoints can be written to that place."""
        return "://" not in os.fspath(checkpoint_id)


def _folder_of(path: UserPath) -> Path:
    """Return the checkpoint's own folder. Raises UsageError if `path` cannot be one."""
    text = os.fspath(path)
    if "://" in text:
        raise UsageError(
            f"{shown(text)}: DCP saves to a folder that all ranks share; send what it saved there to a URL with "
            "`zstore reshard FOLDER URL`"
        )
    folder = user_path(path)
    tag_text(folder.name)
    return folder


def _write(writer: RankWriter, plan: SavePlan, planner: SavePlanner, workers: Workers) -> list[WriteResult]:
    # Pieces first: other ranks wait for them. A batch takes the CPU memory of a few tensors.
    def goes_last(item: WriteItem) -> bool:
        return item.tensor_data is None or not writer.work.arrays[item.index.fqn].boxes

    items = sorted(plan.items, key=goes_last)
    results = workers.run([partial(_write_item, writer, item, planner) for item in items], in_caller=True)
    owned = [each for each in writer.work.arrays.values() if each.is_owned_by(writer.work.rank)]
    for wrote in workers.run([partial(writer.assemble_shard, layout) for layout in owned], in_caller=True):
        results.append(WriteResult(MetadataIndex(wrote.array), 0, EntryReport(wrote=wrote)))
    return results


@torch.no_grad()
def _write_item(writer: RankWriter, item: WriteItem, planner: SavePlanner) -> WriteResult:
    written = item.tensor_data
    if item.type == WriteItemType.BYTE_IO or written is None:
        return _write_value(writer, item, planner)
    layout = writer.work.arrays[item.index.fqn]
    box = box_of(written)
    tensor: Any = planner.resolve_data(item)
    data, wrote = bytes_of(tensor), None
    if data.size != box.numel * layout.spec.itemsize or dtype_name(tensor.dtype) != layout.spec.dtype:
        raise UsageError(
            f"{item.index.fqn!r}: the plan has {box.numel} elements of {layout.spec.dtype} at {box.offsets}, the state dict a "
            f"tensor of shape {tuple(tensor.shape)} in {tensor.dtype}"
        )
    if box.numel and layout.boxes:
        writer.write_piece(layout, box, data)
    elif box.numel:
        wrote = writer.write_box(layout.spec, layout.grid, box, data)
    return WriteResult(item.index, data.size, EntryReport(wrote=wrote))


def _write_value(writer: RankWriter, item: WriteItem, planner: SavePlanner) -> WriteResult:
    key, value = item.index.fqn, cast("Any", ...)
    # Only a planner that pickles the very objects of the state dict lets them be looked at instead.
    names = ("lookup_object", "resolve_data", "transform_object")
    own = (getattr(type(planner), name, None) is getattr(DefaultSavePlanner, name) for name in names)
    if isinstance(planner, DefaultSavePlanner) and all(own):
        value = planner.lookup_object(item.index)
    if type(value) is bytes:
        kind, content = BYTES, value
    else:
        with contextlib.suppress(NotPlainError):
            return WriteResult(item.index, 0, EntryReport(key=key, value=encode_value(value), is_value=True))
        pickled: Any = planner.resolve_data(item)
        if not isinstance(pickled, io.BytesIO):
            raise UsageError(f"{key!r}: expected bytes from the planner, got a {type(pickled).__name__}")
        kind, content = PICKLE, pickled.getvalue()
    data = np.frombuffer(content, np.uint8)
    spec = ArraySpec(name=writer.work.names[key], shape=(data.size,), dtype="uint8")
    grid, box = make_grid(spec.stored_shape, 1), Box.whole(spec.shape)
    wrote = writer.write_box(spec, grid, box, data) if data.size else None
    return WriteResult(item.index, data.size, EntryReport(key=key, kind=kind, opaque=spec, wrote=wrote))
