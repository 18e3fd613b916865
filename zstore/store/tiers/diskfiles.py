"""A shard's files in the run folder, separate or shared with other small shards, and transfers of their spans.

See [Note: versions] in `disk`.

[Note: shared files]
A shard of 64 to 256 KiB would be a separate request. Shards whose arrays are of the same kind (the first part of the name)
are adjacent in one file, a pack, in the order of their creation, which is the order of passes. Each shard has a region of
whole slots, without an index. A pass transfers several groups in one buffer, laid out as in the file, so that adjacent
regions are one request. A checkpoint's file is written from the region, which cannot be linked.

A pack has generations: files with the same regions, created when pins need them. A version of a shard is its region in one
generation; while it is pinned, a pass writes the shard's region in another. A snapshot pins all shards, so all of them move
to the same generation and stay adjacent; regions that are not, because some were pinned separately, take more requests.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ...errors import CorruptionError, StorageError
from ...format.arrays import Array, Bytes, LocalShard, numpy_dtype
from ...format.shardfile import ShardLayout, checksum, slot_views, stored_crcs, verify_slots
from ...io.files import Files
from ...io.queue import Priority
from ...io.shards import FillRuns, IoResources, ShardReader, ShardWriter, write_shard
from .base import ChunkSpan, Mode, View, new_version

PACKED_BYTES = 256 * 1024
"""Shards whose values take fewer bytes can share a file."""
MANY_SMALL = 64
"""With at least this many small shards, they share files. With fewer, links to separate files save more than packs do."""


def is_packed(nbytes: int) -> bool:
    """Return whether a shard on disk of this many bytes, without padding, may share a file with others."""
    return 0 < nbytes < PACKED_BYTES


def run_file_bytes(layout: ShardLayout, *, packed: bool) -> int:
    """Return the bytes that a shard takes in the run folder: of its file, or of its region in a pack."""
    return layout.file_bytes - (layout.data_offset if packed else 0)


class Pack:
    """The files of regions that small shards share, one per generation. Usable from any thread."""

    def __init__(self, files: Files, folder: Path, kind: str) -> None:
        self._files = files
        self._stem = folder / f"{kind}-pack"
        self._reserved: list[int] = [0]
        """Bytes reserved for the file of each generation."""
        self.nbytes = 0
        """Bytes up to the end of the last region."""
        self._free: dict[int, list[int]] = {}
        """Offsets of released regions, by size."""
        self._lock = threading.Lock()

    def path(self, generation: int) -> Path:
        """Return the path of a generation's file."""
        return self._stem.with_name(f"{self._stem.name}.{generation}.shard")

    def add(self, nbytes: int) -> int:
        """Return the offset of a new region of `nbytes`; its space in the first generation is reserved."""
        with self._lock:
            if self._free.get(nbytes):
                return self._free[nbytes].pop()
            self._reserve(0, self.nbytes + nbytes)
            self.nbytes += nbytes
            return self.nbytes - nbytes

    def free_region(self, offset: int, nbytes: int) -> None:
        """Make a region available to another shard of that size."""
        with self._lock:
            self._free.setdefault(nbytes, []).append(offset)

    def missing_bytes(self, generation: int) -> int:
        """Return the bytes that `make` would reserve for a generation."""
        reserved = self._reserved[generation] if generation < len(self._reserved) else 0
        return max(self.nbytes - reserved, 0)

    def make(self, generation: int) -> Path:
        """Return the path of a generation's file, after reserving space for every region."""
        with self._lock:
            while len(self._reserved) <= generation:
                self._reserved.append(0)
            self._reserve(generation, self.nbytes)
        return self.path(generation)

    def _reserve(self, generation: int, nbytes: int) -> None:
        if nbytes <= self._reserved[generation]:
            return
        path = self.path(generation)
        is_new = not self._reserved[generation]
        with self._files.opened(path, write=True, create=is_new) as file:
            try:
                self._files.allocate(file, nbytes)
            except StorageError:
                if is_new:
                    self._files.unlink(path)
                raise
        self._reserved[generation] = nbytes

    def close(self) -> None:
        """Remove the files."""
        for generation, nbytes in enumerate(self._reserved):
            if nbytes:
                self._files.unlink(self.path(generation))
        self._reserved, self.nbytes, self._free = [0], 0, {}


@dataclass(frozen=True, kw_only=True)
class PackRun:
    """Bytes of one file, from `offset` on, that are also contiguous in memory."""

    path: Path
    offset: int
    memory_offset: int
    """Their offset in memory."""
    nbytes: int

    def slice_of(self, memory: Bytes) -> Bytes:
        """Return its bytes."""
        return memory[self.memory_offset : self.memory_offset + self.nbytes]


def merge_runs(places: Iterable[PackRun]) -> list[PackRun]:
    """Return `places` with adjacent ones merged."""
    merged: list[PackRun] = []
    for place in sorted(places, key=lambda run: (str(run.path), run.offset)):
        last = merged[-1] if merged else None
        if last and (last.path, last.offset + last.nbytes, last.memory_offset + last.nbytes) == (
            place.path,
            place.offset,
            place.memory_offset,
        ):
            merged[-1] = PackRun(
                path=last.path, offset=last.offset, memory_offset=last.memory_offset, nbytes=last.nbytes + place.nbytes
            )
        else:
            merged.append(place)
    return merged


@dataclass(eq=False)
class DiskFile:
    """A file of the run folder, or a region of a pack. `crcs[i]` is the checksum of chunk i, None if never written."""

    path: Path
    crcs: list[int | None]
    base: int
    """Offset of chunk 0."""
    generation: int = 0
    """For a region of a pack: the number of the generation."""
    exists: bool = True
    """Whether the file exists; otherwise the first pass that changes it creates it."""
    pins: int = 0
    published: bool = False
    version: int = field(default_factory=new_version)
    origin: Path | None = None
    """The checkpoint's file that it is a link to, if it was adopted."""


@dataclass(eq=False)
class DiskShard:
    """A shard and its files. `target` is the file that a pass writes to; `spare` is kept for the next version."""

    local: LocalShard
    layout: ShardLayout
    folder: Path
    current: DiskFile
    pack: Pack | None = None
    """The pack with its versions; None if each version has a separate file."""
    in_use: set[int] = field(default_factory=lambda: {0})
    """Generations of the pack in which it has a version."""
    target: DiskFile | None = None
    spare: DiskFile | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the file is linked."""
    has_writes: bool = False
    """Whether the running pass has saved data."""
    broken: bool = False
    """Whether an update in place failed partway, so the values are lost."""

    def offset(self, file: DiskFile, chunk: int) -> int:
        """Return the offset of a chunk in a file of the shard."""
        return file.base + chunk * self.layout.slot_bytes


def fill_file(res: IoResources, shard: DiskShard, file: DiskFile, data: Array) -> None:
    """Write all values of a shard directly from `data`, creating the file if it is missing."""
    local, layout = shard.local, shard.layout
    source = FillRuns.of(data.view(np.uint8), local.spec.itemsize, local.shard * local.grid.shard_numel)
    what = file.path, local.spec, local.grid, local.shard
    if file.exists:
        file.crcs = [*ShardWriter(res, *what, Priority.WRITE_BACK).write(0, layout.num_present, source)]
    else:
        file.crcs = [*write_shard(replace(res, sync=False), *what, source, Priority.WRITE_BACK).crcs]
        file.exists = True


def read_elements(res: IoResources, shard: DiskShard, file: DiskFile, first: int, stop: int, out: Array) -> bool:
    """Read local elements `[first, stop)` directly into `out`; return False unless the shard is complete and intact."""
    local, crcs = shard.local, [crc for crc in file.crcs if crc is not None]
    if len(crcs) < shard.layout.num_present:
        return False
    reader = ShardReader(res, file.path, local.spec, local.grid, local.shard, check=False)
    reader.expect_crcs(crcs)
    base = local.shard * local.grid.shard_numel
    with contextlib.suppress(CorruptionError):
        reader.read(base + first, base + stop, out.view(np.uint8))
        return True
    return False


def checked_views(
    res: IoResources, shard: DiskShard, file: DiskFile, span: ChunkSpan, buffer: Bytes, mode: Mode
) -> Iterator[View]:
    """Yield a view of each chunk, verified unless `mode` is FILL; unless it is READ, seal it when the next is requested."""
    layout, local = shard.layout, shard.local
    slots, stored = slot_views(buffer, layout), stored_crcs(buffer, layout)
    payloads = slots[:, : layout.payload_bytes]
    crcs: list[int] = stored.tolist()
    expected_crcs = file.crcs[span.first_chunk : span.first_chunk + span.num_chunks]
    remaining = local.valid_numel - span.first_chunk * local.grid.chunk_numel
    for number, (payload, view) in enumerate(zip(payloads, payloads.view(numpy_dtype(local.spec.dtype)), strict=True)):
        if mode is not Mode.FILL:
            if expected_crcs[number] is None:
                payload[:] = 0
            elif res.verify and not crcs[number] == expected_crcs[number] == checksum(payload):
                raise _corruption_error(shard, file, span.first_chunk + number, slots[number])
        is_whole = remaining >= view.size
        yield view if is_whole else view[:remaining]
        if mode is not Mode.READ:
            if not is_whole:
                view[remaining:] = 0
            crcs[number] = checksum(payload)
        remaining -= view.size
    if mode is not Mode.READ:
        stored[:] = crcs


def _corruption_error(shard: DiskShard, file: DiskFile, chunk: int, slot: Bytes) -> CorruptionError:
    """Return the error for a chunk that differs from the last write."""
    name, where = shard.local.spec.name, str(file.origin or file.path)
    try:
        verify_slots(slot, shard.layout, chunk, path=where, array=name, base=file.base)
    except CorruptionError as error:
        return error
    problem = "what was written last: the drive lost a write; load a checkpoint"
    if file.origin is not None:
        problem = "the one that the manifest names: the file was replaced; load another checkpoint"
    return CorruptionError(
        f"array {name!r}: chunk {chunk} of {where} (offset {shard.offset(file, chunk)}) is whole, but not {problem}"
    )


def read_slots(res: IoResources, path: str | Path, offset: int, slots: Bytes) -> None:
    """Fill `slots` from the file, starting at `offset`."""
    with res.files.opened(path) as opened:
        res.files.read_into(opened, slots, offset)


def write_slots(res: IoResources, path: str | Path, offset: int, slots: Bytes) -> None:
    """Write `slots` to the file, starting at `offset`."""
    with res.files.opened(path, write=True) as opened:
        res.files.write_from(opened, slots, offset)
