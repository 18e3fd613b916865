"""A shard's files in the run folder, and transfers of its spans: see [Note: versions] in `disk`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ...errors import CorruptionError
from ...format.arrays import Array, Bytes, LocalShard, numpy_dtype
from ...format.shardfile import ShardLayout, checksum, slot_views, stored_crcs, verify_slots
from ...io.queue import Priority
from ...io.shards import FillRuns, IoResources, ShardReader, ShardWriter, write_shard
from .base import ChunkSpan, Mode, View, new_version
from .packs import Pack


@dataclass(eq=False)
class DiskFile:
    """One file of the run folder, or a part of one. `crcs[i]` is the checksum of chunk i, None if it was never written."""

    path: Path
    crcs: list[int | None]
    base: int
    """Offset of chunk 0."""
    generation: int = 0
    """Of a part of a pack: the number of its file."""
    made: bool = True
    """It is there; else the first pass that changes it makes it."""
    pins: int = 0
    published: bool = False
    version: int = field(default_factory=new_version)
    origin: Path | None = None
    """The checkpoint's file that it is a link of, if it was adopted."""


@dataclass(eq=False)
class DiskShard:
    """A shard and its files. `target` is what a pass writes; `spare` waits for the next version."""

    local: LocalShard
    layout: ShardLayout
    folder: Path
    current: DiskFile
    pack: Pack | None = None
    """The file of its versions' parts; None: each has a file of its own."""
    in_use: set[int] = field(default_factory=lambda: {0})
    """Generations of a pack in which it has a version."""
    target: DiskFile | None = None
    spare: DiskFile | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the file is linked."""
    touched: bool = False
    """Something was saved in the pass under way."""
    broken: bool = False

    def offset(self, file: DiskFile, chunk: int) -> int:
        """Return where a chunk begins in a file of the shard."""
        return file.base + chunk * self.layout.slot_bytes


def fill_file(res: IoResources, shard: DiskShard, file: DiskFile, data: Array) -> None:
    """Write all values of a shard from `data` itself; a file that is not there is made by that."""
    local, layout = shard.local, shard.layout
    source = FillRuns.of(data.view(np.uint8), local.spec.itemsize, local.shard * local.grid.shard_numel)
    what = file.path, local.spec, local.grid, local.shard
    if file.made:
        file.crcs = [*ShardWriter(res, *what, Priority.WRITE_BACK).write(0, layout.num_present, source)]
    else:
        file.crcs = [*write_shard(replace(res, sync=False), *what, source, Priority.WRITE_BACK).crcs]
        file.made = True


def read_elements(res: IoResources, shard: DiskShard, file: DiskFile, first: int, stop: int, out: Array) -> bool:
    """Read local elements `[first, stop)` into `out` itself; false unless all of the shard was written, and is whole."""
    local, crcs = shard.local, [crc for crc in file.crcs if crc is not None]
    if len(crcs) < shard.layout.num_present:
        return False
    reader = ShardReader(res, file.path, local.spec, local.grid, local.shard, check=False)
    reader.expect(crcs)
    base = local.shard * local.grid.shard_numel
    with contextlib.suppress(CorruptionError):
        reader.read(base + first, base + stop, out.view(np.uint8))
        return True
    return False


def checked_views(
    res: IoResources, shard: DiskShard, file: DiskFile, span: ChunkSpan, buffer: Bytes, mode: Mode
) -> Iterator[View]:
    """Yield each chunk, verified unless it is to be filled; seal it when the next is asked for unless it was only read."""
    layout, local = shard.layout, shard.local
    slots, stored = slot_views(buffer, layout), stored_crcs(buffer, layout)
    payloads = slots[:, : layout.payload_bytes]
    crcs: list[int] = stored.tolist()
    known = file.crcs[span.first_chunk : span.first_chunk + span.num_chunks]
    left = local.valid_numel - span.first_chunk * local.grid.chunk_numel
    for number, (payload, view) in enumerate(zip(payloads, payloads.view(numpy_dtype(local.spec.dtype)), strict=True)):
        if mode is not Mode.FILL:
            if known[number] is None:
                payload[:] = 0
            elif res.verify and not crcs[number] == known[number] == checksum(payload):
                raise _damage(shard, file, span.first_chunk + number, slots[number])
        is_whole = left >= view.size
        yield view if is_whole else view[:left]
        if mode is not Mode.READ:
            if not is_whole:
                view[left:] = 0
            crcs[number] = checksum(payload)
        left -= view.size
    if mode is not Mode.READ:
        stored[:] = crcs


def _damage(shard: DiskShard, file: DiskFile, chunk: int, slot: Bytes) -> CorruptionError:
    """Return the error of a chunk that differs from the last write."""
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
    """Fill `slots` from the file's `offset` on."""
    with res.files.opened(path) as opened:
        res.files.read_into(opened, slots, offset)


def write_slots(res: IoResources, path: str | Path, offset: int, slots: Bytes) -> None:
    """Write `slots` from the file's `offset` on."""
    with res.files.opened(path, write=True) as opened:
        res.files.write_from(opened, slots, offset)
