"""A checkpoint as a folder of torch.distributed.checkpoint. Torch is needed for the metadata; no tensors are made.

[Note: blocks]
Tensors are cut along dim 0 into blocks of about 256 MiB, since DCP loads a whole block before it takes its part of it.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zstore.checkpoint import ArraySource, ReadAhead
from zstore.format import numpy_dtype
from zstore.interop.dcp_names import Path as KeyPath
from zstore.interop.dcp_names import key_of
from zstore.interop.dcp_values import PICKLE, DcpState, decode_value
from zstore.interop.torch_archive import Tensor, write_archive
from zstore.io import Files, NewFile
from zstore.ranks.division import items_of
from zstore.ranks.team import ALONE, Team
from zstore.weights.from_checkpoint import whole_dtype

from .export import Advance, values_of
from .opening import array_bytes

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_BLOCK_BYTES = 256 * 1024 * 1024


def write_dcp(source: ArraySource, folder: Path, advance: Advance, team: Team = ALONE) -> list[str]:
    """Write all that the checkpoint has into `folder`, durably; return the files' names.

    The ranks of `team` write a data file each, with about the same bytes, and rank 0 the metadata (all ranks).
    """
    files, nbytes = Files(), array_bytes(source)
    with team.agreeing():
        if team.rank == 0:
            files.require_room(folder, nbytes, f"the checkpoint needs {nbytes} bytes")
    with team.agreeing(), ExitStack() as opened:
        sink = NewFile(files, folder / data_file(team.rank), opened)
        writer = _DcpWriter(source, sink, advance, team)
        writer.write_tensors()
        if team.rank == 0:
            writer.write_values()
        sink.finish()
    stored = [each for told in team.all_gather_object(writer.stored) for each in told]
    with team.agreeing():
        if team.rank == 0:
            Files(direct=False).write_small(folder / ".metadata", writer.metadata(stored))
    return [*(data_file(rank) for rank in range(team.world_size)), ".metadata"]


def data_file(rank: int) -> str:
    """Return the name of a rank's data file, as DCP's own writer gives it."""
    return f"__{rank}_0.distcp"


class _DcpWriter:
    """One checkpoint on its way into a data file, or of several ranks a part of it."""

    def __init__(self, source: ArraySource, sink: NewFile, advance: Advance, team: Team) -> None:
        self._team = team
        self._source = source
        self._sink = sink
        self._advance = advance
        self._state = DcpState.of(source.record.state, source.arrays)
        self._tensors = {n: path for n, path in self._state.paths.items() if n not in self._state.opaque}
        self._dtypes = {name: whole_dtype(source, name) for name in self._tensors}
        self._blocks = {
            name: list(_blocks(source.arrays[name].spec.shape, dtype)) for name, dtype in self._dtypes.items()
        }
        self.stored: list[tuple[str, Sequence[int] | None, str, int, int]] = []
        """Key, offsets in the tensor, file, and offset and bytes in the file, of each block or value written."""

    def write_tensors(self) -> None:
        """Write this rank's blocks of the tensors; tied tensors refer to the same bytes."""
        blocks, ranges = self._own_blocks(), list[tuple[str, int, int]]()
        for name, (offsets, sizes) in blocks:
            numel = math.prod(sizes)
            if numel:
                first = offsets[0] * math.prod(sizes[1:]) if offsets else 0
                ranges.append((name, first, first + numel))
        with ReadAhead(self._source, ranges) as ahead:
            for name, (offsets, sizes) in blocks:
                tensor, at = Tensor(0, sizes, self._dtypes[name]), self._sink.offset
                values = values_of(self._source, ahead, name, tensor.numel, tensor.dtype, self._advance)
                nbytes = write_archive(self._sink, tensor, [(tensor.nbytes, (data for data, _ in values))])
                for each in self._all_paths(name, self._tensors[name]):
                    self._add(each, offsets, at, nbytes)

    def _own_blocks(self) -> list[tuple[str, tuple[tuple[int, ...], tuple[int, ...]]]]:
        blocks = [(name, block) for name in self._tensors for block in self._blocks[name]]
        sizes = (
            math.prod(sizes) * numpy_dtype(self._source.arrays[name].spec.dtype).itemsize for name, (_, sizes) in blocks
        )
        return [blocks[number] for number in items_of(sizes, self._team.rank, self._team.world_size)]

    def _add(self, path: KeyPath, offsets: Sequence[int] | None, at: int, nbytes: int) -> None:
        self.stored.append((key_of(path), offsets, data_file(self._team.rank), at, nbytes))

    def write_values(self) -> None:
        """Write the values that are not tensors."""
        for path, value in self._state.values:
            self._write_value(path, decode_value(value))
        for name, kind in self._state.opaque.items():
            content = self._source.read_array(name).tobytes()
            path = self._state.paths[name]
            if kind != PICKLE:
                self._write_value(path, content)
            else:
                self._add(path, None, self._sink.offset, len(content))
                self._sink.write(content)
            self._advance(len(content))

    def _write_value(self, path: KeyPath, value: Any) -> None:
        start = self._sink.offset
        self._add(path, None, start, write_archive(self._sink, value))

    def _all_paths(self, name: str, path: KeyPath) -> Iterator[KeyPath]:
        yield path
        if name.startswith("model/"):
            for alias in self._source.arrays[name].spec.aliases:
                yield (*path[:-1], alias)

    def metadata(self, stored: Iterable[tuple[str, Sequence[int] | None, str, int, int]]) -> bytes:
        """Return the content of `.metadata`; `stored` is that of all ranks."""
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
            MetadataIndex(key, None if offsets is None else tuple(offsets)): _StorageInfo(file, at, nbytes)
            for key, offsets, file, at, nbytes in stored
        }
        return pickle.dumps(Metadata(entries, planner_data=paths, storage_data=storage))

    def _described(self, name: str) -> TensorStorageMetadata:
        import torch
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

        return TensorStorageMetadata(
            properties=TensorProperties(dtype=getattr(torch, self._dtypes[name])),
            size=torch.Size(self._source.arrays[name].spec.shape),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
                for offsets, sizes in self._blocks[name]
            ],
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
