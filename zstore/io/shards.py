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

from ..errors import CorruptionError, StorageError, UsageError
from ..format.arrays import ArraySpec, Bytes
from ..format.partition import Grid
from ..format.shardfile import (
    BLOCK_BYTES,
    ShardLayout,
    check_index,
    encode_index,
    layout_of,
    seal_slots,
    slot_views,
    verify_slots,
)
from .buffers import Buffer, Pool
from .files import Files
from .queue import IoQueue, Priority, Ticket, settle

Fill = Callable[[int, int, Bytes], None]
"""`fill(first, stop, out)` writes global flat elements `[first, stop)` of an array into `out`, uint8."""


@dataclass(frozen=True)
class FillRuns:
    """A fill that is also asked for runs of whole chunks at once: then `out` is [chunks, bytes of a chunk], not contiguous.

    A step in Python for each chunk, and a GIL hand-off, cost more than its bytes do.
    """

    fill: Fill


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

    @property
    def request_bytes(self) -> int:
        """Bytes that travel in one request to the disk, at most, but for a chunk that is larger."""
        return min(self.block_bytes, self.pool.nbytes // 4)

    def span_chunks(self, layout: ShardLayout) -> int:
        """Return how many adjacent chunks of `layout` travel in one request."""
        return layout.chunks_in(self.request_bytes)


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
    """crc32c of each present chunk's payload, in chunk order."""
    linked: bool = False
    """True where the file is a hard link to one that was there: no bytes were written."""


def make_shard_file(res: IoResources, path: str | Path, layout: ShardLayout, *, index: bool = True) -> None:
    """Make a shard file, reserve all its bytes, and write its index; without `index` whoever writes chunk 0 writes that.

    A file that could not be made whole is removed again. Takes no buffer of the pool, so it may be called while holding one.
    """
    with res.files.opened(path, write=True, create=True) as file:
        try:
            res.files.allocate(file, layout.file_bytes)
            if index:
                data = _aligned(layout.data_offset)
                data[:] = np.frombuffer(encode_index(layout), dtype=np.uint8)
                res.files.write_from(file, data, 0)
        except BaseException:
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
    fill: Fill | FillRuns,
    priority: Priority = Priority.CHECKPOINT,
) -> ShardSummary:
    """Make a new shard file from `fill` and return its summary; the data is durable when this returns, if `res.sync`.

    `fill` is called from several threads at once, for disjoint ranges. A file of that name is an error; a failure
    leaves a partial file behind, for the caller's folder to be swept. Must not be called from an I/O thread.
    """
    layout = layout_of(grid, shard, spec.dtype)
    # The index goes with the first chunks, in one request, where the pool has room for both; a small file is one request.
    step = res.span_chunks(layout)
    first_bytes = layout.data_offset + min(step, layout.num_present) * layout.slot_bytes
    together = layout.num_present > 0 and first_bytes <= res.pool.nbytes // 2
    small = together and layout.num_present <= step
    if not small:
        make_shard_file(res, path, layout, index=not together)
    writer = ShardWriter(res, path, spec, grid, shard, priority, index=together)
    crcs = writer.write(0, layout.num_present, fill)
    if res.sync and not small:
        res.files.sync_file(path)
    return ShardSummary(spec.name, shard, layout.file_bytes, tuple(crcs))


def checksum_shard(res: IoResources, spec: ArraySpec, grid: Grid, shard: int, fill: Fill | FillRuns) -> tuple[int, ...]:
    """Return the checksums that `write_shard` would, and write nothing. Must not be called from an I/O thread."""
    writer = ShardWriter(res, None, spec, grid, shard, Priority.CHECKPOINT)
    return tuple(writer.write(0, layout_of(grid, shard, spec.dtype).num_present, fill))


class ShardWriter:
    """Writes chunks of the shard file `path` (None: only takes their checksums). Not for I/O threads.

    The file has its index, or, with `index`, gets it with chunk 0; a file of one request is made by that then, and durable
    if `res.sync`.
    """

    def __init__(
        self,
        res: IoResources,
        path: str | Path | None,
        spec: ArraySpec,
        grid: Grid,
        shard: int,
        priority: Priority,
        *,
        index: bool = False,
    ) -> None:
        self._res = res
        self._path = path
        self._spec = spec
        self._grid = grid
        self._shard = shard
        self._layout = layout_of(grid, shard, spec.dtype)
        self._priority = priority
        self._index = index

    def write(self, first_chunk: int, stop_chunk: int, fill: Fill | FillRuns) -> list[int]:
        """Write chunks `[first_chunk, stop_chunk)` from `fill`; return the crc32c of their payloads.

        `fill` is called from several threads at once, for disjoint ranges.
        """
        step = self._res.span_chunks(self._layout)
        makes_file = self._index and stop_chunk - first_chunk <= step
        tickets: list[Ticket[list[int]]] = []
        for first in range(first_chunk, stop_chunk, step):
            head = self._layout.data_offset if self._index and first == 0 else 0
            buffer = self._res.pool.acquire(head + min(step, stop_chunk - first) * self._layout.slot_bytes)
            task = partial(self._write_span, first, head, buffer, fill, makes_file=makes_file)
            moved_bytes = 0 if self._path is None else buffer.bytes.size
            tickets.append(self._res.queue.submit(task, self._priority, moved_bytes))
        return [crc for part in settle(tickets) for crc in part]

    def _write_span(
        self, first_chunk: int, head: int, buffer: Buffer, fill: Fill | FillRuns, *, makes_file: bool
    ) -> list[int]:
        layout = self._layout
        with buffer:
            if head:
                buffer.bytes[:head] = np.frombuffer(encode_index(layout), dtype=np.uint8)
            slots = buffer.bytes[head:]
            self._fill_slots(slots, first_chunk, fill)
            crcs = seal_slots(slots, layout)
            if self._path is not None:
                with self._res.files.opened(self._path, write=True, create=makes_file) as file:
                    self._res.files.write_from(file, buffer.bytes, layout.slot_offset(first_chunk) - head)
                    if makes_file and self._res.sync:
                        self._res.files.sync_data(file)
            return crcs

    def _fill_slots(self, slots: Bytes, first_chunk: int, fill: Fill | FillRuns) -> None:
        grid, shard = self._grid, self._shard
        payloads = slot_views(slots, self._layout)[:, : self._layout.payload_bytes]
        num_whole = 0
        if isinstance(fill, FillRuns):
            fill = fill.fill
            first = first_chunk * grid.chunk_numel
            num_whole = min(len(payloads), (grid.shard_valid_numel(shard) - first) // grid.chunk_numel)
            if num_whole:
                first += shard * grid.shard_numel
                fill(first, first + num_whole * grid.chunk_numel, payloads[:num_whole])
        for number, payload in enumerate(payloads[num_whole:], start=first_chunk + num_whole):
            fill_chunk(payload, fill, self._spec, grid, shard, number)


def fill_chunk(payload: Bytes, fill: Fill, spec: ArraySpec, grid: Grid, shard: int, chunk: int) -> None:
    """Fill `payload`, the bytes of chunk number `chunk` of a shard, with zeros where it reaches behind the array's end."""
    first = shard * grid.shard_numel + chunk * grid.chunk_numel
    stop = min(first + grid.chunk_numel, shard * grid.shard_numel + grid.shard_valid_numel(shard))
    valid_bytes = (stop - first) * spec.itemsize
    fill(first, stop, payload[:valid_bytes])
    payload[valid_bytes:] = 0


class ShardReader:
    """Reads one shard file, verifying its size and index first (unless `check` is false, see `check_size`) and every chunk
    that it touches.

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
        self._index_due = False
        """The index is checked with the first chunk."""
        self._checked = check
        if check:
            self.check_file()

    def check_file(self) -> None:
        """Check size and index."""
        self.check_size()
        self.check_index()

    def check_size(self) -> None:
        """Check the size now, and the index when the first chunk is read, in one request with it."""
        found = self._file_bytes()
        if found != self.layout.file_bytes:
            raise self._wrong_size(found, self.layout.file_bytes)
        self._index_due = True

    def check_index(self) -> None:
        """Check the index of a file of the right size."""
        check_index(self.layout, self._read_index(), path=self.path, array=self.spec.name)
        self._index_due = False

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
        whole = range(-(-(first - base) // numel), (stop - base) // numel)

        def take(chunk: int, slots: Bytes) -> None:
            # Chunks that are wanted whole in one go: a step in Python for each costs more than its bytes.
            low, high = max(chunk, whole.start), min(chunk + len(slots), whole.stop)
            if low < high:
                start = (base + low * numel - first) * itemsize
                into = out[start : start + (high - low) * numel * itemsize].reshape(high - low, -1)
                into[:] = slots[low - chunk : high - chunk, : self.layout.payload_bytes]
            for number, slot in enumerate(slots, start=chunk):
                if number not in whole:
                    take_part(number, slot)

        def take_part(chunk: int, slot: Bytes) -> None:
            low = max(first, base + chunk * numel)
            high = min(stop, base + (chunk + 1) * numel)
            start = (low - base - chunk * numel) * itemsize
            out[(low - first) * itemsize : (high - first) * itemsize] = slot[start : start + (high - low) * itemsize]

        if first < stop:
            self._scan((first - base) // numel, -(-(stop - base) // numel), take, priority)

    def verify(self, first_chunk: int = 0, stop_chunk: int | None = None) -> list[int]:
        """Check chunks `[first_chunk, stop_chunk)`, by default all, and return their crc32c."""
        stop = self.layout.num_present if stop_chunk is None else stop_chunk
        return self._scan(first_chunk, stop, None, Priority.READ)

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
        """Read chunks, hand runs of them to `take`, each with the first one's number; return their crc32c, none where they
        are not checked."""
        layout = self.layout
        step = self._res.span_chunks(layout)

        def read_span(first: int, head: int, buffer: Buffer) -> list[int]:
            crcs: list[int] = []
            with buffer:
                with self._res.files.opened(self.path) as file:
                    self._res.files.read_into(file, buffer.bytes, layout.slot_offset(first) - head)
                if head:
                    check_index(layout, buffer.bytes[:head], path=self.path, array=self.spec.name)
                slots = buffer.bytes[head:]
                if self._res.verify or take is None:
                    crcs = verify_slots(slots, layout, first, path=self.path, array=self.spec.name)
                if take is not None:
                    take(first, slot_views(slots, layout))
            return crcs

        tickets: list[Ticket[list[int]]] = []
        for first in range(first_chunk, stop_chunk, step):
            head = layout.data_offset if first == 0 and self._index_due else 0
            buffer = self._res.pool.acquire(head + min(step, stop_chunk - first) * layout.slot_bytes)
            self.read_bytes += buffer.bytes.size
            task = partial(read_span, first, head, buffer)
            is_last = first + step >= stop_chunk  # which the caller would only wait for
            start = self._res.queue.carry_out if is_last else self._res.queue.submit
            tickets.append(start(task, priority, buffer.bytes.size))
        return [crc for part in settle(tickets) for crc in part]
