"""Whole shard files: written once from a source, and read and verified, in bounded memory.

[Note: who takes buffers]
A buffer is taken by the thread that submits an operation, and given back by the operation. An I/O thread never waits
for the pool: all of them could wait for buffers whose operations stand behind them in the queue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .arrays import ArraySpec
from .buffers import Buffer, Pool
from .errors import CorruptionError, StorageError, UsageError
from .files import Files
from .io import IoQueue, Priority, Ticket, settle
from .partition import Grid
from .shardfile import (
    BLOCK_BYTES,
    ShardLayout,
    check_index,
    encode_index,
    layout_of,
    seal_slots,
    slot_views,
    verify_slots,
)

Bytes = npt.NDArray[np.uint8]

Fill = Callable[[int, int, Bytes], None]
"""`fill(first, stop, out)` writes global flat elements `[first, stop)` of an array into `out`, uint8."""


@dataclass(frozen=True, kw_only=True)
class IoResources:
    """What transfers share: files, threads, buffers and how they are cut."""

    files: Files
    queue: IoQueue
    pool: Pool
    block_bytes: int = 4 * 1024 * 1024
    """Bytes of one request to the disk, about; a request is a whole number of chunks, at least one. Less in a small
    pool, so that several fit."""
    verify: bool = True
    """Check the crc32c of every chunk that is read."""
    sync: bool = True
    """Shard files are durable when they are made; else whoever made them sees to that, for many at once."""

    def span_chunks(self, layout: ShardLayout) -> int:
        """Return how many adjacent chunks of `layout` travel in one request."""
        return max(1, min(self.block_bytes, self.pool.nbytes // 4) // layout.slot_bytes)


@contextlib.contextmanager
def open_resources(
    *,
    pool_bytes: int = 64 * 1024 * 1024,
    num_threads: int = 4,
    block_bytes: int = 4 * 1024 * 1024,
    verify: bool = True,
    files: Files | None = None,
) -> Iterator[IoResources]:
    """Make resources for the length of a `with` block; what is queued at its end is carried out first."""
    queue = IoQueue(num_threads)
    try:
        yield IoResources(
            files=files or Files(), queue=queue, pool=Pool(pool_bytes), block_bytes=block_bytes, verify=verify
        )
    finally:
        queue.close()


@dataclass(frozen=True)
class ShardSummary:
    """What one shard file holds."""

    array: str
    shard: int
    file_bytes: int
    crcs: tuple[int, ...]
    """crc32c of each present chunk's payload."""
    linked: bool = False
    """True where the file is a hard link to one that was there: no bytes were written."""


def write_index(
    res: IoResources, path: str | Path, layout: ShardLayout, *, create: bool, reserve_only: bool = False
) -> None:
    """Write the index of a shard file; `create` makes the file first and reserves all its bytes.

    With `reserve_only` no index is written: whoever writes the first chunks writes it. A file that could not be made whole
    is removed again. Takes no buffer of the pool, so it may be called while holding one.
    """
    index = _aligned(layout.data_offset)
    index[:] = np.frombuffer(encode_index(layout), dtype=np.uint8)
    with res.files.opened(path, write=True, create=create) as file:
        try:
            if create:
                res.files.allocate(file, layout.file_bytes)
            if not reserve_only:
                res.files.write_from(file, index, 0)
        except BaseException:
            if create:
                with contextlib.suppress(OSError):
                    res.files.unlink(path)
            raise


def _aligned(nbytes: int) -> Bytes:
    """Return a few bytes of memory that direct I/O takes."""
    room = np.empty(nbytes + BLOCK_BYTES, dtype=np.uint8)
    start = -room.ctypes.data % BLOCK_BYTES
    return room[start : start + nbytes]


def write_shard(
    res: IoResources,
    path: str | Path,
    spec: ArraySpec,
    grid: Grid,
    shard: int,
    fill: Fill,
    priority: Priority = Priority.CHECKPOINT,
) -> ShardSummary:
    """Make a new shard file from `fill` and return its summary; the data is durable when this returns, if `res.sync`.

    `fill` is called from several threads at once, for disjoint ranges. A file of that name is an error; a failure
    leaves a partial file behind, for the caller's folder to be swept. Must not be called from an I/O thread.
    """
    layout = layout_of(grid, shard, spec.dtype)
    # The index goes with the first chunks, in one request, where the pool has room for both.
    first_bytes = layout.data_offset + min(res.span_chunks(layout), layout.num_present) * layout.slot_bytes
    together = layout.num_present > 0 and first_bytes <= res.pool.nbytes // 2
    write_index(res, path, layout, create=True, reserve_only=together)
    writer = (_WholeWriter if together else ShardWriter)(res, path, spec, grid, shard, priority)
    crcs = writer.write(0, layout.num_present, fill)
    if res.sync:
        with res.files.opened(path, write=True) as file:
            res.files.sync_data(file)
    return ShardSummary(spec.name, shard, layout.file_bytes, tuple(crcs))


def checksum_shard(res: IoResources, spec: ArraySpec, grid: Grid, shard: int, fill: Fill) -> tuple[int, ...]:
    """Return the checksums that `write_shard` would, and write nothing. Must not be called from an I/O thread."""
    writer = _NoWriter(res, "", spec, grid, shard, Priority.CHECKPOINT)
    return tuple(writer.write(0, layout_of(grid, shard, spec.dtype).num_present, fill))


class ShardWriter:
    """Writes chunks of a shard file that has its index. Not for I/O threads."""

    _moves = True
    """Bytes go to a drive, and are counted."""

    def __init__(
        self, res: IoResources, path: str | Path, spec: ArraySpec, grid: Grid, shard: int, priority: Priority
    ) -> None:
        self._res = res
        self._path = path
        self._spec = spec
        self._grid = grid
        self._shard = shard
        self._layout = layout_of(grid, shard, spec.dtype)
        self._priority = priority

    def write(self, first_chunk: int, stop_chunk: int, fill: Fill) -> list[int]:
        """Write chunks `[first_chunk, stop_chunk)` from `fill`; return the crc32c of their payloads.

        `fill` is called from several threads at once, for disjoint ranges.
        """
        step = self._res.span_chunks(self._layout)
        tickets: list[Ticket[list[int]]] = []
        for first in range(first_chunk, stop_chunk, step):
            head = self._head_bytes(first)
            buffer = self._res.pool.acquire(head + min(step, stop_chunk - first) * self._layout.slot_bytes)
            task = partial(self._write_span, first, buffer, fill)
            moved_bytes = buffer.bytes.size if self._moves else 0
            tickets.append(self._res.queue.submit(task, self._priority, moved_bytes))
        return [crc for part in settle(tickets) for crc in part]

    def _head_bytes(self, first_chunk: int) -> int:
        """Return the bytes of the index that are written with the chunks from `first_chunk` on."""
        return 0

    def _write_span(self, first_chunk: int, buffer: Buffer, fill: Fill) -> list[int]:
        layout, head = self._layout, self._head_bytes(first_chunk)
        with buffer:
            if head:
                buffer.bytes[:head] = np.frombuffer(encode_index(layout), dtype=np.uint8)
            slots = buffer.bytes[head:]
            for i, slot in enumerate(slot_views(slots, layout)):
                payload = slot[: layout.payload_bytes]
                fill_chunk(payload, fill, self._spec, self._grid, self._shard, first_chunk + i)
            crcs = seal_slots(slots, layout)
            self._put(buffer.bytes, layout.slot_offset(first_chunk) - head)
            return crcs

    def _put(self, data: Bytes, offset: int) -> None:
        with self._res.files.opened(self._path, write=True) as file:
            self._res.files.write_from(file, data, offset)


class _WholeWriter(ShardWriter):
    """Writes all chunks of a file that has no index yet."""

    def _head_bytes(self, first_chunk: int) -> int:
        return self._layout.data_offset if first_chunk == 0 else 0


class _NoWriter(ShardWriter):
    """Gives checksums alone."""

    _moves = False

    def _put(self, data: Bytes, offset: int) -> None:
        pass


def fill_chunk(payload: Bytes, fill: Fill, spec: ArraySpec, grid: Grid, shard: int, chunk: int) -> None:
    """Fill `payload`, the bytes of chunk number `chunk` of a shard, with zeros where it reaches behind the array's end."""
    first = shard * grid.shard_numel + chunk * grid.chunk_numel
    stop = min(first + grid.chunk_numel, shard * grid.shard_numel + grid.shard_valid_numel(shard))
    valid_bytes = (stop - first) * spec.itemsize
    fill(first, stop, payload[:valid_bytes])
    payload[valid_bytes:] = 0


class ShardReader:
    """Reads one shard file, verifying its size and index first (unless `check` is false) and every chunk that it touches.

    Raises CorruptionError that names array, file and offset for a file that is missing, of another size or damaged.
    Safe to use from several threads, but not from an I/O thread.
    """

    def __init__(
        self, res: IoResources, path: str | Path, spec: ArraySpec, grid: Grid, shard: int, *, check: bool = True
    ) -> None:
        self.path = str(path)
        self.spec = spec
        self.grid = grid
        self.shard = shard
        self.layout = layout_of(grid, shard, spec.dtype)
        self.read_bytes = 0
        self._res = res
        self._expected: Sequence[int] | None = None
        self._checked = check
        if check:
            self.check_file()

    def check_file(self) -> None:
        """Check size and index."""
        found = self._file_bytes()
        if found != self.layout.file_bytes:
            raise self._wrong_size(found, self.layout.file_bytes)
        self.check_index()

    def check_index(self) -> None:
        """Check the index of a file of the right size."""
        check_index(self.layout, self._read_index(), path=self.path, array=self.spec.name)

    def _file_bytes(self) -> int:
        try:
            return self._res.files.size(self.path)
        except FileNotFoundError as error:
            raise CorruptionError(
                f"array {self.spec.name!r}: the shard file {self.path} is missing; restore it from another copy"
            ) from error

    def _wrong_size(self, found: int, expected: int) -> CorruptionError:
        return CorruptionError(
            f"array {self.spec.name!r}: {self.path} has {found} bytes, expected {expected} "
            f"(wrong from offset {min(found, expected)} on): the file was cut or replaced; "
            "restore it from another copy"
        )

    def _read_index(self) -> Bytes:
        index = _aligned(self.layout.data_offset)
        with self._res.files.opened(self.path) as file:
            self._res.files.read_into(file, index, 0)
        return index

    def expect(self, crcs: Sequence[int]) -> None:
        """From now on chunks must also have these checksums, by chunk: those that a manifest names."""
        self._expected = crcs

    def place(self, chunk: int) -> tuple[int, int]:
        """Return (offset, bytes) of a chunk in the file, its crc32c included."""
        return self.layout.slot_offset(chunk), self.layout.chunk_bytes

    def read(self, first: int, stop: int, out: Bytes, priority: Priority = Priority.READ) -> None:
        """Read global flat elements `[first, stop)`, all of this shard, into `out` (uint8); blocks until done."""
        base = self.shard * self.grid.shard_numel
        if not base <= first <= stop <= base + self.grid.shard_valid_numel(self.shard):
            raise UsageError(f"elements [{first}, {stop}) are not in shard {self.shard} of array {self.spec.name!r}")
        if out.size != (stop - first) * self.spec.itemsize:
            raise UsageError(f"expected {(stop - first) * self.spec.itemsize} bytes to read into, got {out.size}")
        numel, itemsize = self.grid.chunk_numel, self.spec.itemsize

        def take(chunk: int, slot: Bytes) -> None:
            low = max(first, base + chunk * numel)
            high = min(stop, base + (chunk + 1) * numel)
            start = (low - base - chunk * numel) * itemsize
            out[(low - first) * itemsize : (high - first) * itemsize] = slot[start : start + (high - low) * itemsize]

        if first < stop:
            self._scan((first - base) // numel, -(-(stop - base) // numel), take, priority)

    def verify(self) -> list[int]:
        """Check every chunk and return their crc32c."""
        return self._scan(0, self.layout.num_present, None, Priority.READ)

    def _scan(
        self, first_chunk: int, stop_chunk: int, take: Callable[[int, Bytes], None] | None, priority: Priority
    ) -> list[int]:
        try:
            crcs = self._scan_chunks(first_chunk, stop_chunk, take, priority)
        except StorageError:
            if not self._checked:
                self.check_file()  # says what is wrong with the file, where that is the reason
            raise
        expected = () if self._expected is None else self._expected[first_chunk:stop_chunk]
        for chunk, (found, wanted) in enumerate(zip(crcs, expected, strict=False), start=first_chunk):
            if found != wanted:
                raise CorruptionError(
                    f"array {self.spec.name!r}: chunk {chunk} of {self.path} (offset {self.place(chunk)[0]}) is whole, but "
                    "not the one that the manifest names: the file was replaced; restore it from another copy"
                )
        return crcs

    def _scan_chunks(
        self, first_chunk: int, stop_chunk: int, take: Callable[[int, Bytes], None] | None, priority: Priority
    ) -> list[int]:
        """Read chunks, hand each one's payload to `take`, and return their crc32c (none where they are not checked)."""
        layout = self.layout
        step = self._res.span_chunks(layout)

        def read_span(first: int, buffer: Buffer) -> list[int]:
            crcs: list[int] = []
            with buffer:
                with self._res.files.opened(self.path) as file:
                    self._res.files.read_into(file, buffer.bytes, layout.slot_offset(first))
                if self._res.verify or take is None:
                    crcs = verify_slots(buffer.bytes, layout, first, path=self.path, array=self.spec.name)
                if take is not None:
                    for i, slot in enumerate(slot_views(buffer.bytes, layout)):
                        take(first + i, slot)
            return crcs

        tickets: list[Ticket[list[int]]] = []
        for first in range(first_chunk, stop_chunk, step):
            buffer = self._res.pool.acquire(min(step, stop_chunk - first) * layout.slot_bytes)
            self.read_bytes += buffer.bytes.size
            tickets.append(self._res.queue.submit(partial(read_span, first, buffer), priority, buffer.bytes.size))
        return [crc for part in settle(tickets) for crc in part]
