"""The reader that torch.distributed.checkpoint loads through: any checkpoint that zstore reads.

[Note: one chunk]
The metadata says that every tensor is stored in one piece, so that it requests each block of a rank once. The blocks
are read as flat ranges, each stored chunk of them once and verified, ahead of their use and in bounded memory.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from zstore.checkpoint import MEMORY_BYTES, ArraySource, Range, ReadAhead, open_checkpoint
from zstore.errors import UsageError
from zstore.format import ArraySpec, Box, flat_ranges
from zstore.interop.dcp_state import PICKLE, DcpState, decode_value, key_of
from zstore.io import UserPath, is_url, user_location
from zstore.io.closing import make_finalizer
from zstore.io.memory import torch_dtype
from zstore.open.sources import open_source

_GAP_BYTES = 1024 * 1024
"""Ranges closer than this are read together: chunks are at most about this large."""


class Reader(StorageReader):
    """Reads the checkpoint at `path`: its own folder or URL, or a folder of checkpoints and a `tag` (default: the newest).

    Any checkpoint that zstore opens can be read, including an engine's or other software's; without DCP's own mapping,
    weights are found under "model", optimizer state under "optimizer". Entries that are pickles are refused unless
    `trust_pickles`: DCP would run their code.
    """

    def __init__(
        self,
        path: UserPath,
        tag: str | float | None = None,
        *,
        trust_pickles: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._storage_options = storage_options
        self.path = user_location(path)
        self._tag = tag
        self._trust_pickles = trust_pickles
        self._source: ArraySource | None = None
        self._forget: Callable[[], None] | None = None
        self._arrays: dict[str, str] = {}
        self._state = DcpState(paths={})

    def reset(self, checkpoint_id: UserPath | None = None) -> None:
        """Start reading another checkpoint, at `checkpoint_id` if given (all ranks)."""
        self.close()
        if checkpoint_id is not None:
            self.path, self._tag = user_location(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open the checkpoint and return its metadata (all ranks)."""
        source = self._open()
        self._state = DcpState.of(source.record.state, source.arrays)
        self._arrays = {key_of(path): name for name, path in self._state.paths.items()}
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            key: BytesStorageMetadata() if name in self._state.opaque else _describe(source.arrays[name].spec)
            for key, name in self._arrays.items()
        }
        entries |= {key_of(path): BytesStorageMetadata() for path, _ in self._state.values}
        paths = {key_of(path): path for path in (*self._state.paths.values(), *(p for p, _ in self._state.values))}
        ids = StorageMeta(checkpoint_id=source.location, save_id=source.record.id)
        return Metadata(entries, planner_data=paths, storage_meta=ids, version=CURRENT_DCP_VERSION)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keep nothing: the checkpoint is open (all ranks)."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Refuse pickles that are not trusted (all ranks)."""
        for item in plan.items:
            key = item.storage_index.fqn
            if self._state.opaque.get(self._arrays.get(key, "")) == PICKLE and not self._trust_pickles:
                raise UsageError(
                    f"{key!r} in {self.path} is a pickle, which torch.distributed.checkpoint would run: leave it out of the "
                    "state dict, or pass zstore.dcp.Reader(..., trust_pickles=True) if you trust its author"
                )
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged: each rank reads its own (rank 0)."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything in the plan; done when this returns (all ranks)."""
        source = self._open()
        values = {key_of(path): value for path, value in self._state.values}
        blocks: list[_BlockRead] = []
        for item in plan.items:
            key = item.storage_index.fqn
            if item.type != LoadItemType.BYTE_IO:
                blocks.append(_BlockRead(source, self._arrays[key], item, planner))
            elif key in values:
                planner.load_bytes(item, _pickled(decode_value(values[key])))
            else:
                content = source.read_array(self._arrays[key]).tobytes()
                is_pickle = self._state.opaque[self._arrays[key]] == PICKLE
                planner.load_bytes(item, io.BytesIO(content) if is_pickle else _pickled(content))
        with ReadAhead(source, [each for block in blocks for each in block.ranges]) as ahead:
            for block in blocks:
                block.read(ahead)
        self.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # ----------------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process opens the checkpoint itself.
        return self.__dict__ | {"_source": None, "_forget": None}

    def _open(self) -> ArraySource:
        if self._source is None or self._source.is_forked:
            path = Path(self.path)
            if self._tag is None and not is_url(self.path) and not path.exists() and path.parent.is_dir():
                # A tag may have another name on disk.
                self._source = open_checkpoint(path.parent, path.name)
            else:
                self._source = open_source(self.path, self._tag, storage_options=self._storage_options)
            # Closes a load that DCP abandons before the end.
            self._forget = make_finalizer(self, self._source.close)
        return self._source

    def close(self) -> None:
        """Close the checkpoint; a second call does nothing."""
        forget, self._forget, self._source = self._forget, None, None
        if forget is not None:
            forget()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: UserPath) -> bool:
        """Return True: any path or URL may be opened."""
        return True


def _describe(spec: ArraySpec) -> TensorStorageMetadata:
    """Return a tensor's metadata for DCP. See [Note: one chunk]."""
    size = torch.Size(spec.shape)
    chunks = [ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)]
    return TensorStorageMetadata(properties=TensorProperties(dtype=torch_dtype(spec.dtype)), size=size, chunks=chunks)


def _pickled(value: object) -> io.BytesIO:
    """Return plain data as DCP's planner takes it."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


class _BlockRead:
    """A block of an array on its way into a tensor of the state dict."""

    def __init__(self, source: ArraySource, name: str, item: ReadItem, planner: LoadPlanner) -> None:
        spec = source.arrays[name].spec
        self._source, self._name, self._item, self._planner = source, name, item, planner
        self._box = Box(spec.shape, tuple(item.storage_offsets), tuple(item.lengths))
        max_numel = MEMORY_BYTES // 6 // spec.itemsize
        found = flat_ranges(self._box, max_numel, _GAP_BYTES // spec.itemsize)
        self.ranges: list[Range] = [(name, *each) for each in found if each[0] < each[1]]
        """The flat ranges to read."""

    def read(self, ahead: ReadAhead) -> None:
        """Take the ranges, which are next in `ahead`, and commit the tensor."""
        dtype = torch_dtype(self._source.arrays[self._name].spec.dtype)
        with torch.no_grad():
            target: torch.Tensor = self._planner.resolve_tensor(self._item)
            # A tensor subclass takes its values by `copy_`, whatever its storage.
            if type(target) in (torch.Tensor, torch.nn.Parameter):
                target = target.detach()
            direct = type(target) is torch.Tensor and target.device.type == "cpu" and target.dtype == dtype
            if direct and target.is_contiguous():
                self._fill(target, ahead)
            else:
                block = torch.empty(tuple(self._item.lengths), dtype=dtype)
                self._fill(block, ahead)
                target.copy_(block.reshape(target.shape))
            self._planner.commit_tensor(self._item, target)

    def _fill(self, block: torch.Tensor, ahead: ReadAhead) -> None:
        out = block.reshape(-1).view(torch.uint8).numpy()
        size, remaining = block.itemsize, sum(stop - first for _, first, stop in self.ranges)
        while remaining and (span := ahead.take()) is not None:
            for at, in_box, numel in self._box.overlap(span.first, span.stop):
                start = (at - span.first) * size
                out[in_box * size : (in_box + numel) * size] = span.data[start : start + numel * size]
            remaining -= span.stop - span.first
            ahead.release(span)
