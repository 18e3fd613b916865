"""Reading any range of any array of a checkpoint, local or remote, in parallel, in bounded memory, with every chunk
verified. Checkpoints of other software implement the same interface. No torch.
"""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointMismatchError, CorruptionError, UsageError, ZstoreError, format_bytes, format_count
from ..format.arrays import ArraySpec, Grid, empty_array, numpy_dtype, plan_reads
from ..format.codecs import Codec
from ..format.shardfile import layout_of
from ..io.archives import PackedReader
from ..io.closing import FORKED_ERROR_TEXT, Closing, register_forkable
from ..io.shards import IoResources, ShardReader, open_resources
from .catalog import Refusal, TagInfo, list_tags, read_record, resolve, scan
from .folder import Folder, FolderLike, folder_at
from .format import COMPLETE, MAX_JSON_VALUES, Manifest, Record, parse_json, sha256
from .layout import METADATA_FILE, RECORD_FILE, manifest_file, natural_key, parse_root, shard_file, tag_text

NUM_THREADS = 4
"""I/O threads of a source created without resources."""
NUM_REMOTE_REQUESTS = 12
"""Concurrent requests over a network: each takes tens of milliseconds, however little it reads."""
_NUM_LOCAL_READERS = 6


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """An array of a source."""

    spec: ArraySpec
    grid: Grid
    """How it is split in its files; reads that end at a chunk's end are cheapest."""
    folder: str
    """Its location inside the source, for messages; in zstore's checkpoints its folder."""
    codec: Codec | None = None
    """The codec of its chunks, if they are compressed; a store cannot link compressed shard files."""
    shard_bytes: tuple[int, ...] | None = None
    """Bytes of each shard file if it is compressed."""

    def open_shard(self, resources: IoResources, path: str, shard: int) -> ShardReader:
        """Return a reader of one of its shard files, without checking the file."""
        if self.codec is None:
            return ShardReader(resources, path, self.spec, self.grid, shard, check=False)
        return PackedReader(resources, path, (self.spec, self.grid, self.codec), shard)

    def shard_file(self, shard: int) -> str:
        """Return the path of a shard's file inside the checkpoint."""
        return f"{self.folder}/{shard_file(len(self.spec.stored_shape), shard)}"

    @property
    def file_bytes(self) -> int:
        """Bytes of all its shard files."""
        if self.grid.num_shards == 0 or self.shard_bytes is not None:
            return sum(self.shard_bytes or ())
        last = self.grid.num_shards - 1  # the others have equal sizes
        return last * self.shard_file_bytes(0) + self.shard_file_bytes(last)

    def shard_file_bytes(self, shard: int) -> int:
        """Return the bytes of one of its shard files."""
        if self.shard_bytes is not None:
            return self.shard_bytes[shard]
        return layout_of(self.grid, shard, self.spec.dtype).file_bytes


class ArraySource(Closing):
    """Named arrays and the state of the run that they belong to. Close it, or use it in a `with` block.

    Usable from any thread except an I/O thread. Names follow zstore's format: `model/...` (weights in their best
    precision), `optimizer/<slot>/...`, `buffer/...`, `client/...`.
    """

    kind: str = "a checkpoint of other software"
    """The software that wrote the checkpoint, for messages: "zstore", "DeepSpeed stage 2"."""
    notes: tuple[str, ...] = ()
    """State of another library's checkpoint that is missing or cannot be converted; reported in one warning on use."""
    weight_files: Collection[str] = ()
    """The files with the arrays, if the source is the folder of a model; else empty."""

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
        """The commit record; for a checkpoint of other software an equivalent, with an empty `id`."""
        self.arrays: dict[str, StoredArray] = {}
        self._cleanup = contextlib.ExitStack()
        self.is_remote: bool = False
        """Whether reads go over a network, with high latency and little CPU time."""
        self.resources: IoResources = resources or self._cleanup.enter_context(open_resources(num_threads=num_threads))
        """Threads and buffers; released by `close` unless the caller passed them."""
        self.is_forked = False
        """Whether this process is a forked child of the one that opened it; it then cannot read."""
        register_forkable(self)

    def _forked(self) -> None:
        """Disable it in a forked child: its buffers may be in use, and its locks held forever."""
        self.is_forked = True

    @property
    def num_readers(self) -> int:
        """The number of concurrent `read` calls that is best for this source."""
        return NUM_REMOTE_REQUESTS if self.is_remote else _NUM_LOCAL_READERS

    @property
    @abstractmethod
    def read_bytes(self) -> int:
        """Bytes read so far, checksums and alignment included."""

    @abstractmethod
    def read(self, name: str, first: int, stop: int, out: npt.NDArray[Any]) -> None:
        """Read global flat elements `[first, stop)` of array `name` into `out`; blocks until done.

        `out` is contiguous: `stop - first` elements of the array's data type, or their bytes as uint8. Raises
        CorruptionError that names array, file and offset of missing or damaged data; the content of `out` is then undefined.
        """

    def rank_state(self, rank: int) -> Mapping[str, Any]:
        """Return the JSON state of rank `rank` of the saving run; empty if it has none."""
        return {}

    def reading(self) -> ReadStatistics | None:
        """Return the statistics of the reads so far; None if they are not counted."""
        return None

    def shard_crcs(self, name: str, shard: int) -> Sequence[int] | None:
        """Return the committed crc32c of each present chunk of a shard; None if they are not recorded."""
        return None

    def file_of(self, name: str, shard: int) -> Path | None:
        """Return the path of a shard's local, uncompressed file in zstore's format, which may be linked instead of read;
        None if there is none. Raises CorruptionError if it is missing, truncated, or its index is damaged."""
        return None

    def checked_target(self, name: str, first: int, stop: int, out: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Return the `out` of a `read` as bytes; raises UsageError if it does not fit the elements."""
        if self.is_forked:
            raise UsageError(f"the checkpoint {self.location} {FORKED_ERROR_TEXT}")
        spec = self.array(name).spec
        if not 0 <= first <= stop <= spec.numel:
            raise UsageError(f"elements [{first}, {stop}) are not in array {name!r} of {spec.numel} elements")
        nbytes = (stop - first) * spec.itemsize
        if not out.flags.c_contiguous or out.nbytes != nbytes:
            raise UsageError(f"array {name!r}: expected {nbytes} contiguous bytes to read into, got {out.nbytes}")
        return out.reshape(-1).view(np.uint8)

    def array(self, name: str) -> StoredArray:
        """Return the array called `name`; raises CheckpointMismatchError if it does not exist."""
        if name not in self.arrays:
            raise CheckpointMismatchError(f"checkpoint {self.location} has no array {name!r}")
        return self.arrays[name]

    def names(self) -> list[str]:
        """Return the names of all arrays, in natural order."""
        return sorted(self.arrays, key=natural_key)

    def known(self, name: str) -> StoredArray:
        """Return the array called `name`; raises KeyError, with some of the names, if it does not exist."""
        if name not in self.arrays:
            names = self.names()
            raise KeyError(f"{self.location} has no array {name!r}; it has {len(names)}, for example {names[:3]}")
        return self.arrays[name]

    def read_array(self, name: str) -> npt.NDArray[Any]:
        """Return the whole array in its true shape; bfloat16 as `ml_dtypes.bfloat16`."""
        spec = self.array(name).spec
        out = empty_array(name, spec.shape, numpy_dtype(spec.dtype))
        self.read(name, 0, spec.numel, out)
        return out

    def close(self) -> None:
        """Release the threads and buffers; a second call does nothing."""
        self._cleanup.close()


@dataclass(frozen=True, kw_only=True)
class ReadStatistics:
    """The reads of a checkpoint so far."""

    read_bytes: int
    """From a URL, all bytes over the network; else the bytes of chunks. Checksums and alignment are included."""
    asked_bytes: int
    """Bytes of the requested elements."""
    requests: int
    """Operations on a URL; 0 for a folder."""

    def text(self) -> str:
        """Return the statistics as a line of text."""
        text = f"read {format_bytes(self.read_bytes)}"
        if self.asked_bytes:
            text += f" for {format_bytes(self.asked_bytes)} of array data"
        if self.requests:
            text += f" in {format_count(self.requests, 'request')}"
        excess = self.read_bytes / self.asked_bytes - 1 if self.asked_bytes else 0
        return text + (f": {excess:.0%} more than needed, since chunks are read whole" if excess > 0.005 else "")


_MAX_OPEN_SHARDS = 4096


class CheckpointReader(ArraySource):
    """An open checkpoint."""

    kind = "zstore"

    def __init__(self, info: TagInfo, resources: IoResources | None = None) -> None:
        path = info.folder.location_of(METADATA_FILE)
        try:
            metadata = info.folder.read_small(METADATA_FILE)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CorruptionError(f"{path} is missing; restore it from another copy") from error
        self.documents, arrays = checked_metadata(metadata, info.record, path)
        num_threads = NUM_THREADS if info.folder.is_local else NUM_REMOTE_REQUESTS
        super().__init__(info.location, info.tag, info.record, resources, num_threads=num_threads)
        self.is_remote = not info.folder.is_local
        self.folder: Folder = info.folder
        """The tag's folder."""
        self.asked_bytes = 0
        """Bytes of the elements requested from `read` so far."""
        self.shard_resources: IoResources = info.folder.resources(self.resources)
        """`resources` for reading the shard files, local or remote."""
        self.arrays = arrays
        self._crcs: dict[int, dict[str, tuple[int, ...]]] = {}
        """Checksums of the shards, by rank and array."""
        self._decoding = threading.Lock()
        self._shards: OrderedDict[tuple[str, int], ShardReader] = OrderedDict()
        self._lock = threading.Lock()
        self._evicted_read_bytes = 0
        try:
            self._find_sizes()
        except BaseException:
            self.close()
            raise

    def _find_sizes(self) -> None:
        """Look up the sizes of compressed files in the manifests."""
        packed = {name: array for name, array in self.arrays.items() if array.codec is not None}
        sizes: dict[str, list[int]] = {name: [0] * array.grid.num_shards for name, array in packed.items()}
        for rank in range(max(map(len, sizes.values()), default=0)):
            for entry in self.manifest(rank).shards:
                if entry.shard == rank < len(sizes.get(entry.array, ())):
                    sizes[entry.array][rank] = entry.file_bytes
        for name, array in packed.items():
            self.arrays[name] = replace(array, shard_bytes=tuple(sizes[name]))

    @property
    def path(self) -> Path:
        """The tag's folder; raises UsageError if it is at a URL."""
        return self.folder.path

    @property
    def read_bytes(self) -> int:
        """Bytes of chunks read from files so far, checksums and alignment included."""
        with self._lock:
            return self._evicted_read_bytes + sum(shard.read_bytes for shard in self._shards.values())

    def reading(self) -> ReadStatistics:
        """Return the statistics of the reads so far."""
        traffic = self.folder.traffic
        return ReadStatistics(
            read_bytes=self.read_bytes if traffic is None else traffic.read_bytes,
            asked_bytes=self.asked_bytes,
            requests=0 if traffic is None else traffic.requests,
        )

    def manifest(self, rank: int) -> Manifest:
        """Return the manifest of rank `rank` of the saving run, verified against the record. Raises CorruptionError if it
        is missing or differs from the committed one."""
        path = self.folder.location_of(manifest_file(rank))
        try:
            data = self.folder.read_small(manifest_file(rank))
        except FileNotFoundError as error:
            raise CorruptionError(f"{path} is missing; restore it from another copy") from error
        return checked_manifest(data, self.record, rank, path)

    def read(self, name: str, first: int, stop: int, out: npt.NDArray[Any]) -> None:
        array = self.array(name)
        itemsize = array.spec.itemsize
        target = self.checked_target(name, first, stop, out)
        with self._lock:
            self.asked_bytes += out.nbytes
        try:
            for part in plan_reads(array.grid, first, stop):
                piece = target[(part.first - first) * itemsize : (part.stop - first) * itemsize]
                self.open_shard(name, part.shard).read(part.first, part.stop, piece)
        except CorruptionError as error:
            if (reason := self._change_since_open()) is not None:
                raise CorruptionError(f"{self.location} {reason} while it was read: open it again") from error
            raise

    def _change_since_open(self) -> str | None:
        """Return how the checkpoint was changed since it was opened, as text; None if it was not."""
        try:
            return None if read_record(self.folder).id == self.record.id else "was replaced by another save"
        except (FileNotFoundError, NotADirectoryError):
            return "was removed"
        except (OSError, ZstoreError):
            return None

    def read_array(self, name: str) -> npt.NDArray[Any]:
        if self.folder.is_local:
            for shard in range(self.array(name).grid.num_shards):
                self.open_shard(name, shard)  # before memory is allocated, check that its file has its full size
        return super().read_array(name)

    def rank_state(self, rank: int) -> Mapping[str, Any]:
        return self.manifest(rank).rank_state

    def file_of(self, name: str, shard: int) -> Path | None:
        if not self.folder.is_local or self.array(name).codec is not None:
            return None
        shard_reader = self.open_shard(name, shard)
        shard_reader.check_index()
        return Path(shard_reader.path)

    def open_shard(self, name: str, shard: int) -> ShardReader:
        """Return the reader of one shard file, whose size is checked now, and its index with its first chunk."""
        key = (name, shard)
        with self._lock:
            if key in self._shards:
                self._shards.move_to_end(key)
                return self._shards[key]
        array = self.array(name)
        crcs = self.shard_crcs(name, shard)
        path = self.folder.location_of(array.shard_file(shard))
        try:
            self.folder.check_file(array.shard_file(shard))
        except FileNotFoundError as error:
            raise CorruptionError(
                f"array {name!r}: the shard file {path} is missing; restore it from another copy"
            ) from error
        shard_reader = array.open_shard(self.shard_resources, path, shard)
        if self.folder.is_local:  # at a URL, that would be another request; chunks have checksums anyway
            shard_reader.check_size()
        shard_reader.expect_crcs(crcs)
        with self._lock:
            cached = self._shards.setdefault(key, shard_reader)
            if len(self._shards) > _MAX_OPEN_SHARDS:
                self._evicted_read_bytes += self._shards.popitem(last=False)[1].read_bytes
        return cached

    def shard_crcs(self, name: str, shard: int) -> Sequence[int]:
        """Return the crc32c of each present chunk of a shard, from the manifest; in an archive, of the compressed bytes.
        Raises CorruptionError if the manifest lacks them."""
        array = self.array(name)
        # Rank r stores shard r. The lock makes concurrent threads decode a manifest only once.
        with self._decoding:
            if shard not in self._crcs:
                entries = self.manifest(shard).shards
                self._crcs[shard] = {entry.array: entry.crcs for entry in entries if entry.shard == shard}
            crcs = self._crcs[shard].get(name, ())
        if len(crcs) != array.grid.present_chunks(shard):
            raise CorruptionError(
                f"array {name!r}: {manifest_file(shard)} has no checksums for each of the "
                f"{array.grid.present_chunks(shard)} chunks of shard {shard}; restore it from another copy"
            )
        return crcs


def checked_metadata(
    data: bytes, record: Record, path: str, max_values: int = MAX_JSON_VALUES
) -> tuple[dict[str, Any], dict[str, StoredArray]]:
    """Return the root's document and the arrays that it describes; `data` was read from `path`.

    Raises CorruptionError if `data` is not what was committed, or has more than `max_values` values,
    CheckpointMismatchError for arrays of a newer version.
    """
    if sha256(data) != record.metadata_sha256:
        raise CorruptionError(f"{path} fails the digest in {RECORD_FILE}; restore it from another copy")
    document = parse_json(data, path, max_values)
    arrays = {
        name: StoredArray(spec=spec, grid=grid, folder=folder, codec=codec)
        for name, (folder, spec, grid, codec) in parse_root(document, path).items()
    }
    for name, array in arrays.items():
        if array.grid.num_shards > record.world_size:
            raise CorruptionError(
                f"array {name!r:.200} has {array.grid.num_shards} shards, but {record.world_size} rank(s) saved: {path} was "
                "changed"
            )
    return document, arrays


def checked_manifest(data: bytes, record: Record, rank: int, path: str, max_values: int = MAX_JSON_VALUES) -> Manifest:
    """Return the manifest of rank `rank`. Raises as `checked_metadata` does."""
    if sha256(data) != record.manifest_sha256[rank]:
        raise CorruptionError(f"{path} fails the digest in {RECORD_FILE}; restore it from another copy")
    manifest = Manifest.decode(data, path, max_values)
    if (manifest.id, manifest.rank, manifest.outcome) != (record.id, rank, COMPLETE):
        raise CorruptionError(f"{path} is the manifest of another save or rank; restore it from another copy")
    return manifest


def open_checkpoint(
    place: FolderLike, tag: str | float | None = None, *, resources: IoResources | None = None
) -> CheckpointReader:
    """Open the checkpoint `tag` in the folder `place` (the newest committed one by default), or the tag's folder `place`.

    Raises CheckpointNotFoundError, CorruptionError if its record or metadata is damaged, CheckpointMismatchError
    if a newer version wrote it. `resources` stays the caller's.
    """
    return CheckpointReader(resolve(place, None if tag is None else tag_text(tag)), resources)


def tags(place: FolderLike) -> list[TagInfo]:
    """Return the committed checkpoints in the folder `place`, oldest first; for a tag's folder, only that checkpoint."""
    return list(list_tags(place).tags)


def refused(place: FolderLike) -> list[Refusal]:
    """Return the folders in `place` that look like checkpoints but are invalid, with reasons; none of a tag's folder."""
    folder = folder_at(place)
    return [] if folder.has(RECORD_FILE) else list(scan(folder).refusals)
