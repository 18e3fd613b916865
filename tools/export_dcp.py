"""A checkpoint as a folder of torch.distributed.checkpoint. Torch is needed for its metadata, no tensor of it made.

[Note: blocks]
Tensors are cut along dim 0 into blocks of about 256 MiB, for DCP loads a block whole before it takes its part of it.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zstore.checkpoint.lookahead import ReadAhead
from zstore.checkpoint.source import ArraySource
from zstore.format.arrays import numpy_dtype
from zstore.interop.dcp_names import Path as KeyPath
from zstore.interop.dcp_names import key_of
from zstore.interop.dcp_values import PICKLE, DcpState, decode_value
from zstore.interop.torch_archive import Tensor, write_archive
from zstore.io.files import Files
from zstore.io.sink import FileSink
from zstore.weights.from_checkpoint import whole_dtype

from .export import Advance, values_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

DATA_FILE = "__0_0.distcp"
_BLOCK_BYTES = 256 * 1024 * 1024


def write_dcp(source: ArraySource, folder: Path, advance: Advance) -> list[str]:
    """Write all that the checkpoint has into `folder`, durably; return the files' names."""
    files, nbytes = Files(), sum(array.spec.nbytes for array in source.arrays.values())
    files.require_room(folder, nbytes, f"the checkpoint needs {nbytes} bytes")
    job = _Job(source, advance)
    with ExitStack() as opened:
        sink = FileSink(files, folder / DATA_FILE, opened)
        job.write_tensors(sink)
        job.write_values(sink)
        sink.finish()
    files = Files(direct=False)
    files.write_small(folder / ".metadata", job.metadata(folder))
    return [DATA_FILE, ".metadata"]


class _Job:
    """One checkpoint on its way."""

    def __init__(self, source: ArraySource, advance: Advance) -> None:
        self._source = source
        self._advance = advance
        self._state = DcpState.of(source.record.state, source.arrays)
        self._tensors = {n: path for n, path in self._state.paths.items() if n not in self._state.opaque}
        self._stored: list[tuple[str, tuple[int, ...] | None, int, int]] = []
        """Key, offsets, and where it lies."""

    def write_tensors(self, sink: FileSink) -> None:
        """Write every block of every tensor, and of tied ones that they are there again."""
        source = self._source
        ranges = [(name, 0, numel) for name in self._tensors if (numel := source.arrays[name].spec.numel)]
        with ReadAhead(source, self._cut(ranges)) as ahead:
            for name, path in self._tensors.items():
                for offsets, sizes in _blocks(source.arrays[name].spec.shape, whole_dtype(source, name)):
                    self._write_block(sink, ahead, name, (offsets, sizes))
                    at, nbytes = self._stored.pop()[2:]
                    for each in self._all_paths(name, path):
                        self._stored.append((key_of(each), offsets, at, nbytes))

    def _cut(self, ranges: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
        """Return the ranges cut where blocks are."""
        cut: list[tuple[str, int, int]] = []
        for name, _, _ in ranges:
            first = 0
            for _, sizes in _blocks(self._source.arrays[name].spec.shape, whole_dtype(self._source, name)):
                cut.append((name, first, first + math.prod(sizes)))
                first += math.prod(sizes)
        return cut

    def _write_block(
        self, sink: FileSink, ahead: ReadAhead, name: str, block: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> None:
        offsets, sizes = block
        dtype = whole_dtype(self._source, name)
        tensor = Tensor(0, sizes, dtype)
        values = values_of(self._source, ahead, name, tensor.numel, dtype, self._advance)
        start = sink.offset
        nbytes = write_archive(sink, tensor, [(tensor.nbytes, (data for data, _ in values))])
        self._stored.append((name, offsets, start, nbytes))

    def write_values(self, sink: FileSink) -> None:
        """Write what is no tensor."""
        for path, value in self._state.values:
            self._write_value(sink, path, decode_value(value))
        for name, kind in self._state.opaque.items():
            content = self._source.read_array(name).tobytes()
            path = self._state.paths[name]
            if kind != PICKLE:
                self._write_value(sink, path, content)
            else:
                self._stored.append((key_of(path), None, sink.offset, len(content)))
                sink.write(content)
            self._advance(len(content))

    def _write_value(self, sink: FileSink, path: KeyPath, value: Any) -> None:
        start = sink.offset
        self._stored.append((key_of(path), None, start, write_archive(sink, value)))

    def _all_paths(self, name: str, path: KeyPath) -> Iterator[KeyPath]:
        yield path
        if not name.startswith("model/"):
            return
        for alias in self._source.arrays[name].spec.aliases:
            yield (*path[:-1], alias)

    def metadata(self, folder: Path) -> bytes:
        """Return the content of `.metadata`."""
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

        entries: dict[str, Any] = {}
        paths: dict[str, KeyPath] = {}
        for name, path in self._tensors.items():
            for each in self._all_paths(name, path):
                entries[key_of(each)], paths[key_of(each)] = self._described(name), each
        for path in (*(path for path, _ in self._state.values), *(self._state.paths[n] for n in self._state.opaque)):
            entries[key_of(path)], paths[key_of(path)] = BytesStorageMetadata(), path
        storage = {
            MetadataIndex(key, offsets): _StorageInfo(DATA_FILE, at, nbytes)
            for key, offsets, at, nbytes in self._stored
        }
        return pickle.dumps(Metadata(entries, planner_data=paths, storage_data=storage))

    def _described(self, name: str) -> TensorStorageMetadata:
        import torch
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            TensorProperties,
            TensorStorageMetadata,
        )

        shape = self._source.arrays[name].spec.shape
        dtype = whole_dtype(self._source, name)
        chunks: list[ChunkStorageMetadata] = [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for offsets, sizes in _blocks(shape, dtype)
        ]
        return TensorStorageMetadata(
            properties=TensorProperties(dtype=getattr(torch, dtype)), size=torch.Size(shape), chunks=chunks
        )


def _blocks(shape: tuple[int, ...], dtype: str) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and sizes of a tensor's blocks. See [Note: blocks]."""
    if not shape or math.prod(shape) == 0:
        yield (0,) * len(shape), shape
        return
    each = math.prod(shape[1:]) * np.dtype(numpy_dtype(dtype)).itemsize
    rows = max(1, _BLOCK_BYTES // each)
    for first in range(0, shape[0], rows):
        yield (first, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - first), *shape[1:])
