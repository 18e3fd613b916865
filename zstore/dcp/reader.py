"""The reader that torch.distributed.checkpoint loads through: any checkpoint that zstore reads.

[Note: one chunk]
DCP is told that every tensor is stored in one piece, so that it requests each block of a rank once. The blocks
are read as flat ranges, each stored chunk of them once and verified, ahead of their use and in bounded memory.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

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

from zstore.checkpoint import MEMORY_BYTES, ArraySource, Range, ReadAhead, Span, open_checkpoint
from zstore.errors import UsageError
from zstore.format import Box, flat_ranges
from zstore.interop.dcp_names import key_of
from zstore.interop.dcp_values import PICKLE, DcpState, decode_value
from zstore.io import UserPath, Workers, is_url, user_location
from zstore.io.closing import closing_with
from zstore.io.tensors import torch_dtype
from zstore.open.sources import open_source

_MOST_TAKEN = 4
"""Spans that are held at a time: fewer than are read ahead."""
_GAP_BYTES = 1024 * 1024
"""Ranges that are closer are read in one: chunks are at most about that large."""


class Reader(StorageReader):
    """Reads the checkpoint at `path`: its own folder or URL, or one of checkpoints and a `tag` (default: the newest).

    Any checkpoint that zstore opens can be read, those of an engine or other software too; without a mapping of DCP's own,
    weights are found under "model", optimizer state under "optimizer". Entries that are pickles are refused unless
    `trust_pickles`: DCP would run their code.
    """

    def __init__(
        self,
        path: UserPath,
        tag: str | float | None = None,
        *,
        trust_pickles: bool = False,
        num_threads: int = 4,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._storage_options = storage_options
        self.path = user_location(path)
        self.load_id = uuid4().hex
        """Of the load that is under way, or was last."""
        self._tag = tag
        self._trust_pickles = trust_pickles
        self._num_threads = num_threads
        self._source: ArraySource | None = None
        self._forget: Callable[[], None] | None = None
        self._arrays: dict[str, str] = {}
        self._state = DcpState(paths={})

    # -- DCP's calls, in their order ---------------------------------------------------------------------------------

    def reset(self, checkpoint_id: UserPath | None = None) -> None:
        """Begin to read another checkpoint, at `checkpoint_id` if it is given (all ranks)."""
        self.close()
        self.load_id = uuid4().hex
        if checkpoint_id is not None:
            self.path, self._tag = user_location(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open the checkpoint and return its metadata (all ranks)."""
        source = self._open()
        self._state = DcpState.of(source.record.state, source.arrays)
        self._arrays = {key_of(path): name for name, path in self._state.paths.items()}
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            key: BytesStorageMetadata() if name in self._state.opaque else self._describe(source, name)
            for key, name in self._arrays.items()
        }
        entries |= {key_of(path): BytesStorageMetadata() for path, _ in self._state.values}
        paths = {key_of(path): path for path in (*self._state.paths.values(), *(p for p, _ in self._state.values))}
        ids = StorageMeta(checkpoint_id=source.location, save_id=source.record.id, load_id=self.load_id)
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
        """Leave the plans as they are: each rank reads its own (rank 0)."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all that the plan asks for; done when this returns (all ranks)."""
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
                planner.load_bytes(item, self._opaque(source, self._arrays[key]))
        _read_blocks(source, blocks, self._num_threads)
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
            # Nothing else closes a load that DCP gives up before the end.
            self._forget = closing_with(self, self._source.close)
        return self._source

    def _describe(self, source: ArraySource, name: str) -> TensorStorageMetadata:
        spec = source.arrays[name].spec
        size = torch.Size(spec.shape)
        return TensorStorageMetadata(
            properties=TensorProperties(dtype=torch_dtype(spec.dtype)),
            size=size,
            chunks=[ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)],
        )

    def _opaque(self, source: ArraySource, name: str) -> io.BytesIO:
        content = source.read_array(name).tobytes()
        return io.BytesIO(content) if self._state.opaque[name] == PICKLE else _pickled(content)

    def close(self) -> None:
        """Close the checkpoint; a second call does nothing."""
        forget, self._forget, self._source = self._forget, None, None
        if forget is not None:
            forget()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: UserPath) -> bool:
        """Tell whether checkpoints can be read there; whether one is there shows when it is opened."""
        return True

    @property
    def checkpoint_id(self) -> str:
        """Path or URL of the checkpoint."""
        return self.path


def _pickled(value: object) -> io.BytesIO:
    """Return plain data as DCP's planner takes it."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


@dataclass
class _BlockRead:
    """A block of an array on its way into a tensor of the state dict."""

    source: ArraySource
    name: str
    item: ReadItem
    planner: LoadPlanner

    def __post_init__(self) -> None:
        spec = self.source.arrays[self.name].spec
        self.box = Box(spec.shape, tuple(self.item.storage_offsets), tuple(self.item.lengths))
        self.itemsize = spec.itemsize
        with torch.no_grad():
            target: torch.Tensor = self.planner.resolve_tensor(self.item)
        # A tensor subclass takes its values by `copy_`, whatever its storage.
        self._is_plain = type(target) in (torch.Tensor, torch.nn.Parameter)
        self._target = target.detach() if self._is_plain else target
        self._buffer = self._target

    def ranges(self) -> list[Range]:
        """Return the flat ranges to read."""
        most = MEMORY_BYTES // 6 // self.itemsize
        return [(self.name, *each) for each in flat_ranges(self.box, most, _GAP_BYTES // self.itemsize)]

    def begin(self) -> None:
        """Make the memory that the block is read into."""
        dtype = torch_dtype(self.source.arrays[self.name].spec.dtype)
        target = self._target
        direct = self._is_plain and target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype
        self._buffer = target if direct else torch.empty(tuple(self.item.lengths), dtype=dtype)

    def put(self, ahead: ReadAhead, span: Span) -> None:
        """Take the block's part of a span, and release that; of disjoint ones from several threads."""
        out: Any = self._buffer.reshape(-1).view(torch.uint8).numpy()
        size = self._buffer.itemsize
        for at, in_box, numel in self.box.overlap(span.first, span.stop):
            start = (at - span.first) * size
            out[in_box * size : (in_box + numel) * size] = span.data[start : start + numel * size]
        ahead.release(span)

    def finish(self) -> None:
        """Copy the block into its tensor, and commit it, once all its spans were put."""
        if self._buffer is not self._target:
            self._target.copy_(self._buffer.reshape(self._target.shape))
            self._buffer = self._target
        self.planner.commit_tensor(self.item, self._target)


def _read_blocks(source: ArraySource, blocks: list[_BlockRead], num_threads: int) -> None:
    """Read blocks one after the other, each by several threads."""
    ranges = [[each for each in block.ranges() if each[1] < each[2]] for block in blocks]
    with ExitStack() as opened:
        ahead = opened.enter_context(ReadAhead(source, [each for of_block in ranges for each in of_block]))
        workers = opened.enter_context(Workers(num_threads, "zstore-dcp-load"))
        for block, of_block in zip(blocks, ranges, strict=True):
            left = sum(stop - first for _, first, stop in of_block)
            block.begin()
            while left:
                batch: list[Span] = []
                while left and len(batch) < _MOST_TAKEN and (span := ahead.take()) is not None:
                    batch.append(span)
                    left -= span.stop - span.first
                workers.run([partial(block.put, ahead, span) for span in batch])
            block.finish()
