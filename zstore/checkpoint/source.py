"""The source of arrays: a checkpoint of ours, local or remote, or one that other software wrote. No torch."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointMismatchError, UsageError
from ..format.arrays import ArraySpec, empty_array, numpy_dtype
from ..format.codecs import Codec
from ..format.partition import Grid
from ..format.shardfile import layout_of
from ..io.closing import OF_THE_PARENT, Closing, tell_of_fork
from ..io.queue import Priority
from ..io.shards import IoResources, open_resources
from ..sizes import format_bytes, format_count
from .format import Record
from .names import shard_file

NUM_THREADS = 4
"""I/O threads of a source without resources of its own."""
NUM_REMOTE_REQUESTS = 12
"""Requests over a network under way at a time: each takes tens of milliseconds, whatever it reads."""
_NUM_LOCAL_READERS = 6


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """An array of a source."""

    spec: ArraySpec
    grid: Grid
    """How it is cut in its files, by its own metadata; reads that end at ends of chunks cost least."""
    folder: str
    """Its place inside the source, for people; of our checkpoints its folder."""
    codec: Codec | None = None
    """The codec of its chunks; a store cannot go on with compressed shard files."""
    shard_bytes: tuple[int, ...] | None = None
    """Bytes of each shard file if it is compressed."""

    @property
    def cut(self) -> tuple[ArraySpec, Grid, Codec | None]:
        """All that a reader of its shard files needs to know."""
        return self.spec, self.grid, self.codec

    def shard_file(self, shard: int) -> str:
        """Return the path of a shard's file inside the checkpoint."""
        return f"{self.folder}/{shard_file(len(self.spec.stored_shape), shard)}"

    @property
    def file_bytes(self) -> int:
        """Bytes of all its shard files."""
        if self.grid.num_shards == 0 or self.shard_bytes is not None:
            return sum(self.shard_bytes or ())
        last = self.grid.num_shards - 1  # all others are alike
        return last * self.shard_file_bytes(0) + self.shard_file_bytes(last)

    def shard_file_bytes(self, shard: int) -> int:
        """Return the bytes of one of its shard files."""
        if self.shard_bytes is not None:
            return self.shard_bytes[shard]
        return layout_of(self.grid, shard, self.spec.dtype).file_bytes


class ArraySource(Closing):
    """Named arrays and the state of the run that they belong to. Close it, or use it in a `with` block.

    Usable from any thread except an I/O thread. Names are those of our format: `model/...` (weights in their best
    precision), `optimizer/<slot>/...`, `buffer/...`, `client/...`.
    """

    kind: str = "a checkpoint of other software"
    """The software whose checkpoint it is, for people: "zstore", "DeepSpeed stage 2"."""
    notes: tuple[str, ...] = ()
    """State that other software's checkpoint has, or lacks, and that is not carried over: for one warning on use."""
    weight_files: Collection[str] = ()
    """Of a model's folder, all of which belongs to the model, the files that the arrays are in; of any other source none."""

    def __init__(
        self,
        location: str,
        tag: str,
        record: Record,
        resources: IoResources | None,
        *,
        num_threads: int = NUM_THREADS,
    ) -> None:
        self.location: str = location
        """Path or URL, for messages."""
        self.tag: str = tag
        self.record: Record = record
        """The commit record; of other software's checkpoint its counterpart, with `id` empty."""
        self.arrays: dict[str, StoredArray] = {}
        self._cleanup = contextlib.ExitStack()
        self.is_remote: bool = False
        """Whether reads go over a network: a `read` waits long then, and takes little of a processor."""
        self.resources: IoResources = resources or self._cleanup.enter_context(open_resources(num_threads=num_threads))
        """Threads and buffers; given back by `close` unless they were the caller's."""
        self.is_forked = False
        """Whether this is a forked child of the process that opened it: then it reads nothing."""
        tell_of_fork(self)

    def _forked(self) -> None:
        """Belong to the parent, in a forked child: buffers may be lent out for ever there, and locks held."""
        self.is_forked = True

    @property
    def num_readers(self) -> int:
        """How many concurrent `read` calls serve this source best."""
        return NUM_REMOTE_REQUESTS if self.is_remote else _NUM_LOCAL_READERS

    @property
    @abstractmethod
    def read_bytes(self) -> int:
        """Bytes that were read so far, checksums and alignment included."""

    @abstractmethod
    def read(self, name: str, first: int, stop: int, out: npt.NDArray[Any], priority: Priority = Priority.READ) -> None:
        """Read global flat elements `[first, stop)` of array `name` into `out`; blocks until they are there.

        `out` is contiguous: `stop - first` elements of the array's data type, or their bytes as uint8. Raises
        CorruptionError that names array, file and offset of missing or damaged data; `out` then holds no result.
        """

    @abstractmethod
    def rank_state(self, rank: int) -> Mapping[str, Any]:
        """Return the JSON that belongs to rank `rank` of the saving run alone; empty if there is none."""

    def reading(self) -> ReadStatistics | None:
        """Return the bytes that were read so far, and those that were asked for; None if they are not counted."""
        return None

    def shard_crcs(self, name: str, shard: int) -> Sequence[int] | None:
        """Return the crc32c of each chunk of a shard that holds values, as committed; None if there are none."""
        return None

    def file_of(self, name: str, shard: int) -> Path | None:
        """Return the path of a shard's file in our format on this machine, which may be linked instead of being read.

        None if there is no such file, or a compressed one. Raises CorruptionError if it is missing, cut, or its index is
        damaged.
        """
        return None

    def room_for(self, name: str, first: int, stop: int, out: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Return `out` of a `read` as bytes; raises UsageError if elements and memory do not fit."""
        if self.is_forked:
            raise UsageError(f"the checkpoint {self.location} {OF_THE_PARENT}")
        spec = self.array(name).spec
        if not 0 <= first <= stop <= spec.numel:
            raise UsageError(f"elements [{first}, {stop}) are not in array {name!r} of {spec.numel} elements")
        nbytes = (stop - first) * spec.itemsize
        if not out.flags.c_contiguous or out.nbytes != nbytes:
            raise UsageError(f"array {name!r}: expected {nbytes} contiguous bytes to read into, got {out.nbytes}")
        return out.reshape(-1).view(np.uint8)

    def array(self, name: str) -> StoredArray:
        """Return the array called `name`; raises CheckpointMismatchError if there is none."""
        if name not in self.arrays:
            raise CheckpointMismatchError(f"checkpoint {self.location} has no array {name!r}")
        return self.arrays[name]

    def read_array(self, name: str) -> npt.NDArray[Any]:
        """Return the whole array in its true shape; bfloat16 as `ml_dtypes.bfloat16`."""
        spec = self.array(name).spec
        out = empty_array(name, spec.shape, numpy_dtype(spec.dtype))
        self.read(name, 0, spec.numel, out)
        return out

    def close(self) -> None:
        """Give the threads and buffers back; a second call does nothing."""
        self._cleanup.close()


@dataclass(frozen=True, kw_only=True)
class ReadStatistics:
    """The reads of a checkpoint so far."""

    read_bytes: int
    """Behind a URL all bytes that came over the network; of a folder those of chunks. Checksums and alignment included."""
    asked_bytes: int
    """Bytes of the elements that were asked for."""
    requests: int
    """Operations on a URL; 0 for a folder."""

    def text(self) -> str:
        """Return a line for people."""
        text = f"read {format_bytes(self.read_bytes)}"
        if self.asked_bytes:
            text += f" for {format_bytes(self.asked_bytes)} of array data"
        if self.requests:
            text += f" in {format_count(self.requests, 'request')}"
        more = self.read_bytes / self.asked_bytes - 1 if self.asked_bytes else 0
        return text + (f": {more:.0%} more than needed, since chunks are read whole" if more > 0.005 else "")
