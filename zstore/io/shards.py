"""Shard files: written once from a source, and read and verified, in bounded memory.

[Note: who acquires buffers]
A buffer is acquired by the thread that submits an operation, and released by the operation. An I/O thread never waits for
the pool: otherwise all of them could wait for buffers whose operations are later in the queue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ..errors import CorruptionError, StorageError, UsageError
from ..format.arrays import ArraySpec, Bytes, Grid
from ..format.shardfile import ShardLayout, Slots, check_index, encode_index, layout_of, runs, slot_views, small_index
from .files import LARGE_BYTES, Files
from .memory import Buffer, Pool, make_slab
from .queue import IoQueue, Priority, Ticket, combined, wait_all

_TINY_BYTES = 32 * 1024

Fill = Callable[[int, int, Bytes], None]
"""`fill(first, stop, out)` writes global flat elements `[first, stop)` of an array into `out`, uint8."""


@dataclass(frozen=True)
class FillRuns:
    """A fill that is also called for runs of whole chunks; `out` is then [chunks, bytes of a chunk], not contiguous.

    A Python call per chunk, and a GIL hand-off, would cost more than the copy.
    """

    fill: Fill
    memory: Bytes | None = None
    """Host memory with the elements from `first` on, which does not change while they are written, so that files can be
    written directly from it. None: the elements must be copied first."""
    first: int = 0
    """Global flat element."""

    @classmethod
    def of(cls, memory: Bytes, itemsize: int, first: int = 0) -> FillRuns:
        """Return a fill that copies from memory with the elements from `first` on."""

        def fill(low: int, high: int, out: Bytes) -> None:
            out[:] = memory[(low - first) * itemsize : (high - first) * itemsize].reshape(out.shape)

        return cls(fill, memory, first)

    def in_place(self, first: int, stop: int, itemsize: int) -> Bytes | None:
        """Return the memory of elements `[first, stop)`; None unless all of them are in it."""
        if self.memory is None or first < self.first:
            return None
        memory = self.memory[(first - self.first) * itemsize : (stop - self.first) * itemsize]
        return memory if memory.size == (stop - first) * itemsize else None


@dataclass(frozen=True, kw_only=True)
class IoResources:
    """What all transfers share: files, threads, buffers, and the sizes of requests."""

    files: Files
    queue: IoQueue
    pool: Pool
    block_bytes: int = 4 * 1024 * 1024
    """Approximate bytes per disk request, which is a whole number of chunks, at least one. With a small pool, requests are
    smaller, so that several fit."""
    verify: bool = True
    """Check the crc32c of every chunk that is read."""
    sync: bool = True
    """Make shard files durable when they are created; otherwise their creator flushes many files together."""

    @property
    def request_bytes(self) -> int:
        """Maximum bytes per disk request, unless a chunk is larger."""
        return min(self.block_bytes, self.pool.nbytes // 4)

    def span_chunks(self, layout: ShardLayout) -> int:
        """Return the number of adjacent chunks of `layout` in one request."""
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
    """Create resources for a `with` block; queued operations are completed before it ends."""
    queue = IoQueue(num_threads)
    try:
        yield IoResources(
            files=files or Files(), queue=queue, pool=Pool(pool_bytes), block_bytes=block_bytes, verify=verify
        )
    finally:
        queue.close()


@dataclass(frozen=True)
class ShardSummary:
    """The contents of one shard file."""

    array: str
    shard: int
    file_bytes: int
    crcs: tuple[int, ...]
    """crc32c of each present chunk's payload, in chunk order."""
    linked: bool = False
    """True if the file is a hard link to an existing one: no bytes were written."""


def make_shard_file(res: IoResources, path: str | Path, layout: ShardLayout, *, index: bool = True) -> None:
    """Create a shard file, reserve its space, and write its index; without `index`, the writer of chunk 0 writes it.

    On failure the file is removed. Acquires no buffer from the pool, so it may be called while holding one.
    """
    with res.files.opened(path, write=True, create=True) as file:
        try:
            res.files.allocate(file, layout.file_bytes)
            if index:
                data = make_slab(layout.data_offset)
                data[:] = np.frombuffer(encode_index(layout), dtype=np.uint8)
                res.files.write_from(file, data, 0)
        except BaseException:
            with contextlib.suppress(OSError):
                res.files.unlink(path)
            raise


def write_shard(
    res: IoResources,
    path: str | Path,
    spec: ArraySpec,
    grid: Grid,
    shard: int,
    fill: Fill | FillRuns,
    priority: Priority = Priority.CHECKPOINT,
) -> ShardSummary:
    """Create a shard file from `fill`, and return its summary; the data is durable when this returns, if `res.sync`.

    `fill` is called concurrently from several threads, for disjoint ranges. The file must not exist; after a failure, a
    partial file remains, which the caller removes with its folder. Must not be called from an I/O thread.
    """
    writer = ShardWriter(res, path, spec, grid, shard, priority)
    if writer.is_tiny and not res.sync:
        return writer.write_tiny(fill)
    summary = writer.create(fill).wait()
    if res.sync and not writer.is_small:
        res.files.sync_file(path)
    return summary


def checksum_shard(res: IoResources, spec: ArraySpec, grid: Grid, shard: int, fill: Fill | FillRuns) -> tuple[int, ...]:
    """Return the checksums of `write_shard` without writing. Must not be called from an I/O thread."""
    writer = ShardWriter(res, None, spec, grid, shard, Priority.CHECKPOINT)
    return (writer.write_tiny(fill) if writer.is_tiny else writer.create(fill).wait()).crcs


class ShardWriter:
    """Writes chunks of the shard file `path` (None: only computes their checksums). Not for I/O threads."""

    def __init__(
        self, res: IoResources, path: str | Path | None, spec: ArraySpec, grid: Grid, shard: int, priority: Priority
    ) -> None:
        self._res = res
        self._path = path
        self._spec = spec
        self._grid = grid
        self._shard = shard
        self._layout = layout_of(grid, shard, spec.dtype)
        self._priority = priority

    @property
    def is_tiny(self) -> bool:
        """Whether writing the file takes less time than handing it to an I/O thread."""
        return self._layout.num_present > 0 and self._layout.file_bytes <= _TINY_BYTES

    def write_tiny(self, fill: Fill | FillRuns) -> ShardSummary:
        """Write the whole file in this thread, through the page cache; the caller makes it durable."""
        layout = self._layout
        slots = Slots(layout, 0, layout.num_present, layout.data_offset, None)
        data = np.empty(slots.buffer_bytes, np.uint8)
        slots.lay_out(data)
        slots.index[:] = small_index(layout)
        self._fill_slots(slots, data, fill)
        crcs = tuple(slots.seal())
        if self._path is not None:
            with self._res.files.opened(self._path, write=True, create=True, direct=False) as file:
                self._res.files.write_from(file, slots.data, 0)
        return ShardSummary(self._spec.name, self._shard, layout.file_bytes, crcs)

    @property
    def is_small(self) -> bool:
        """Whether the file is written by `create` in one request, and is then durable if `res.sync`."""
        return self._starts_with_index and self._layout.num_present <= self._res.span_chunks(self._layout)

    @property
    def _starts_with_index(self) -> bool:
        """Whether the index is written with the first chunks in one request: the pool has room for both."""
        layout = self._layout
        first_chunks = min(self._res.span_chunks(layout), layout.num_present)
        return first_chunks > 0 and layout.data_offset + first_chunks * layout.slot_bytes <= self._res.pool.nbytes // 2

    def create(self, fill: Fill | FillRuns, *, in_caller: bool = False) -> Ticket[ShardSummary]:
        """Create the file and start writing all of it; otherwise like `write_shard`. With `in_caller`, `fill` is called only
        in this thread, part by part, before this returns; the parts are written in the background."""
        layout, index = self._layout, self._starts_with_index
        if not self.is_small and self._path is not None:
            make_shard_file(self._res, self._path, layout, index=not index)
        fields = self._spec.name, self._shard, layout.file_bytes
        parts = self._start(0, layout.num_present, fill, index=index, in_caller=in_caller)
        return combined(parts, lambda results: ShardSummary(*fields, tuple(crc for part in results for crc in part)))

    def write(self, first_chunk: int, stop_chunk: int, fill: Fill | FillRuns) -> list[int]:
        """Write chunks `[first_chunk, stop_chunk)` of a file that has its index from `fill`; return the crc32c of their
        payloads.

        `fill` is called concurrently from several threads, for disjoint ranges.
        """
        return [crc for part in wait_all(self._start(first_chunk, stop_chunk, fill)) for crc in part]

    def _start(
        self, first_chunk: int, stop_chunk: int, fill: Fill | FillRuns, *, index: bool = False, in_caller: bool = False
    ) -> list[Ticket[list[int]]]:
        """Return tickets for the runs of chunks that are written. With `index`, the index is written with chunk 0, and if one
        request writes the whole file, it also creates the file."""
        res, memory_of = self._res, None
        if isinstance(fill, FillRuns) and fill.memory is not None and res.files.supports_scattered:
            memory_of = partial(self._at_rest, fill)
        tickets: list[Ticket[list[int]]] = []
        try:
            step = res.span_chunks(self._layout)
            for slots in runs(self._layout, first_chunk, stop_chunk, step, memory_of, index=index):
                buffer = self._filled_buffer(slots, fill) if in_caller else res.pool.acquire(slots.buffer_bytes)
                is_last = slots.stop == stop_chunk
                makes_file = index and is_last and slots.first == first_chunk
                task = partial(self._write_slots, slots, buffer, None if in_caller else fill, makes_file=makes_file)
                # The last run is written in this thread, which would only wait for it.
                start = res.queue.run_inline if is_last and not in_caller else res.queue.submit
                tickets.append(start(task, self._priority, 0 if self._path is None else slots.nbytes))
        except BaseException:
            for ticket in tickets:
                ticket.error()
            raise
        return tickets

    def _filled_buffer(self, slots: Slots, fill: Fill | FillRuns) -> Buffer:
        buffer = self._res.pool.acquire(slots.buffer_bytes)
        try:
            self._lay_out(slots, buffer, fill)
        except BaseException:
            buffer.release()
            raise
        return buffer

    def _at_rest(self, fill: FillRuns, chunk: int) -> Bytes | None:
        first = self._shard * self._grid.shard_numel + chunk * self._grid.chunk_numel
        return fill.in_place(first, first + self._grid.chunk_numel, self._spec.itemsize)

    def _write_slots(
        self, slots: Slots, buffer: Buffer, fill: Fill | FillRuns | None, *, makes_file: bool
    ) -> list[int]:
        """Fill slots, unless they are filled already, and write them."""
        with buffer:
            if fill is not None:
                self._lay_out(slots, buffer, fill)
            crcs = slots.seal()
            if self._path is not None:
                # A small file that is made durable later, together with others, goes through the page cache.
                is_synced_later = makes_file and not self._res.sync and slots.nbytes < LARGE_BYTES
                with self._res.files.opened(
                    self._path, write=True, create=makes_file, direct=not is_synced_later
                ) as file:
                    self._res.files.write_from(file, slots.data, slots.offset)
                    if makes_file and self._res.sync:
                        self._res.files.sync_data(file)
            return crcs

    def _lay_out(self, slots: Slots, buffer: Buffer, fill: Fill | FillRuns) -> None:
        slots.lay_out(buffer.bytes)
        if slots.head:
            slots.index[:] = np.frombuffer(encode_index(self._layout), dtype=np.uint8)
        self._fill_slots(slots, buffer.bytes, fill)

    def _fill_slots(self, slots: Slots, data: Bytes, fill: Fill | FillRuns) -> None:
        """Copy the payloads that are not written directly from memory into `data`."""
        grid, shard, num_done = self._grid, self._shard, 0
        if isinstance(fill, FillRuns):
            fill = fill.fill
            if slots.is_in_buffer:
                num_done = self._fill_run(slot_views(data[slots.head :], self._layout), slots.first, fill)
        for chunk, payload in slots.buffered(num_done):
            fill_chunk(payload, fill, self._spec, grid, shard, chunk)

    def _fill_run(self, slots: Bytes, first_chunk: int, fill: Fill) -> int:
        """Fill the payloads of all chunks without padding in one call; return how many these are."""
        grid, first = self._grid, first_chunk * self._grid.chunk_numel
        num_whole = min(len(slots), (grid.shard_valid_numel(self._shard) - first) // grid.chunk_numel)
        if num_whole:
            first += self._shard * grid.shard_numel
            fill(first, first + num_whole * grid.chunk_numel, slots[:num_whole, : self._layout.payload_bytes])
        return num_whole


def fill_chunk(payload: Bytes, fill: Fill, spec: ArraySpec, grid: Grid, shard: int, chunk: int) -> None:
    """Fill `payload`, the bytes of chunk number `chunk` of a shard; bytes past the array's end are zeros."""
    first = shard * grid.shard_numel + chunk * grid.chunk_numel
    stop = min(first + grid.chunk_numel, shard * grid.shard_numel + grid.shard_valid_numel(shard))
    valid_bytes = (stop - first) * spec.itemsize
    fill(first, stop, payload[:valid_bytes])
    payload[valid_bytes:] = 0


class ShardReader:
    """Reads one shard file. Verifies its size and index first (unless `check` is false, see `check_size`), and every chunk
    that it reads.

    Raises CorruptionError that names array, file and offset for a file that is missing, damaged or of the wrong size.
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
        """Whether the index will be checked with the first chunk."""
        self._checked = check
        if check:
            self.check_file()

    def check_file(self) -> None:
        """Check size and index."""
        self.check_size()
        self.check_index()

    def check_size(self) -> None:
        """Check the size now, and the index when the first chunk is read, in one request with it."""
        actual_bytes = self._file_bytes()
        if actual_bytes != self.layout.file_bytes:
            raise self._size_error(actual_bytes, self.layout.file_bytes)
        self.check_index_with_chunks()

    def check_index_with_chunks(self) -> None:
        """Check the index of a file of the right size when its first chunk is read, in one request with it."""
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

    def _size_error(self, actual_bytes: int, expected: int) -> CorruptionError:
        return CorruptionError(
            f"array {self.spec.name!r}: {self.path} has {actual_bytes} bytes, expected {expected} "
            f"(wrong from offset {min(actual_bytes, expected)} on): the file was cut or replaced; "
            "restore it from another copy"
        )

    def _read_index(self) -> Bytes:
        index = make_slab(self.layout.data_offset)
        with self._res.files.opened(self.path) as file:
            self._res.files.read_into(file, index, 0)
        return index

    def expect_crcs(self, crcs: Sequence[int]) -> None:
        """From now on, require these checksums, by chunk, from a manifest."""
        self._expected = crcs

    def chunk_location(self, chunk: int) -> tuple[int, int]:
        """Return (offset, size) of a chunk in the file, including its crc32c."""
        return self.layout.slot_offset(chunk), self.layout.chunk_bytes

    def read(self, first: int, stop: int, out: Bytes, priority: Priority = Priority.READ) -> None:
        """Read global flat elements `[first, stop)`, all of this shard, into `out` (uint8); blocks until done."""
        base = self.shard * self.grid.shard_numel
        if not base <= first <= stop <= base + self.grid.shard_valid_numel(self.shard):
            raise UsageError(f"elements [{first}, {stop}) are not in shard {self.shard} of array {self.spec.name!r}")
        if out.size != (stop - first) * self.spec.itemsize:
            raise UsageError(f"expected {(stop - first) * self.spec.itemsize} bytes to read into, got {out.size}")
        if first < stop:
            target = ShardRange(self, first, stop, out)
            self._scan(target.chunks.start, target.chunks.stop, target, priority)

    def verify(self) -> list[int]:
        """Check all chunks, and return their crc32c."""
        return self._scan(0, self.layout.num_present, None, Priority.READ)

    def _scan(self, first_chunk: int, stop_chunk: int, target: ShardRange | None, priority: Priority) -> list[int]:
        try:
            crcs = self._scan_chunks(first_chunk, stop_chunk, target, priority)
        except StorageError:
            if not self._checked:
                self.check_file()  # reports a damaged file, if that is the reason
            raise
        expected = () if self._expected is None else self._expected[first_chunk:stop_chunk]
        for chunk, (actual, committed) in enumerate(zip(crcs, expected, strict=False), start=first_chunk):
            if actual != committed:
                raise CorruptionError(
                    f"array {self.spec.name!r}: chunk {chunk} of {self.path} (offset {self.chunk_location(chunk)[0]}) is "
                    "whole, but not the one that the manifest names: the file was replaced; restore it from another copy"
                )
        return crcs

    def _scan_chunks(
        self, first_chunk: int, stop_chunk: int, target: ShardRange | None, priority: Priority
    ) -> list[int]:
        """Read chunks, into `target` if given; return their crc32c, or an empty list if they are not verified."""
        layout, res = self.layout, self._res

        def read_slots(slots: Slots, buffer: Buffer) -> list[int]:
            crcs: list[int] = []
            with buffer:
                slots.lay_out(buffer.bytes)
                with res.files.opened(self.path) as file:
                    res.files.read_into(file, slots.data, slots.offset)
                if slots.head:
                    check_index(layout, slots.index, path=self.path, array=self.spec.name)
                if res.verify or target is None:
                    crcs = slots.verify(path=self.path, array=self.spec.name)
                if target is not None and slots.is_in_buffer:
                    target.take(slots.first, slot_views(buffer.bytes[slots.head :], layout))
                elif target is not None:
                    for chunk, payload in slots.buffered():
                        target.take(chunk, payload[np.newaxis])
            return crcs

        memory_of = None if target is None or not res.files.supports_scattered else target.memory_of
        slot_runs = runs(layout, first_chunk, stop_chunk, res.span_chunks(layout), memory_of, index=self._index_due)
        tickets: list[Ticket[list[int]]] = []
        for slots in slot_runs:
            buffer = res.pool.acquire(slots.buffer_bytes)
            self.read_bytes += slots.nbytes
            # The last run is read in this thread, which would only wait for it.
            start = res.queue.run_inline if slots.stop == stop_chunk else res.queue.submit
            tickets.append(start(partial(read_slots, slots, buffer), priority, slots.nbytes))
        return [crc for part in wait_all(tickets) for crc in part]


class ShardRange:
    """The memory to read global flat elements `[first, stop)` of one shard into; `chunks` contain them."""

    def __init__(self, reader: ShardReader, first: int, stop: int, out: Bytes) -> None:
        grid = reader.grid
        self._numel, self._itemsize = grid.chunk_numel, reader.spec.itemsize
        self._low, self._high = first - reader.shard * grid.shard_numel, stop - reader.shard * grid.shard_numel
        self._out = out
        self.chunks = range(self._low // self._numel, -(-self._high // self._numel))
        """Numbers of the chunks."""

    def memory_of(self, chunk: int) -> Bytes | None:
        """Return the memory for a chunk's elements; None if the range has only some of them."""
        low, high = chunk * self._numel, (chunk + 1) * self._numel
        return self._part(low, high) if self._low <= low and high <= self._high else None

    def _part(self, low: int, high: int) -> Bytes:
        return self._out[(low - self._low) * self._itemsize : (high - self._low) * self._itemsize]

    def take(self, chunk: int, payloads: Bytes) -> None:
        """Copy the elements in the range from `payloads` [chunks, at least the bytes of a payload], from chunk `chunk` on."""
        # Whole chunks are copied in one step: a Python call per chunk would cost more than the copy.
        low = max(chunk, -(-self._low // self._numel))
        high = min(chunk + len(payloads), self._high // self._numel)
        if low < high:
            target = self._part(low * self._numel, high * self._numel).reshape(high - low, -1)
            target[:] = payloads[low - chunk : high - chunk, : target.shape[1]]
        for number, payload in enumerate(payloads, start=chunk):
            if not low <= number < high:
                self._take_part(number, payload)

    def _take_part(self, chunk: int, payload: Bytes) -> None:
        low, high = max(self._low, chunk * self._numel), min(self._high, (chunk + 1) * self._numel)
        start = (low - chunk * self._numel) * self._itemsize
        part = self._part(low, high)
        part[:] = payload[start : start + part.size]
