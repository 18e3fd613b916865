"""Prefetching of ranges of arrays, in order, reading each stored chunk once, in bounded memory.

[Note: spans]
Ranges are split at the ends of stored chunks into spans of about `span_bytes`. Threads load spans in order into a fixed set
of buffers; a buffer is reused once its span has been consumed. A `Span` object is created when its loading begins: the
objects of all spans of a huge checkpoint would take gigabytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..format.arrays import Bytes, round_up
from ..format.shardfile import BLOCK_BYTES, CRC_BYTES
from ..io.closing import Closing
from ..io.machine import Workers, num_cores
from ..io.memory import Slabs
from ..io.queue import Ticket
from .reader import ArraySource, StoredArray

Range = tuple[str, int, int]
"""An array's name and global flat elements `[first, stop)` of it."""

OnRead = Callable[[int, int, int], None]
"""`on_read(number, first, stop)`: elements `[first, stop)` of target number `number`, relative to the target, were read.
Called in the thread that read them, while they may still be in its cache."""

MEMORY_BYTES = 48 * 1024 * 1024
_MIN_DEPTH = 6
_NUM_REQUESTS = 12
"""Maximum concurrent requests of `use_spans`."""
_NUM_LOCAL_REQUESTS = 20
"""Concurrent requests of `read_into` for local files: some threads wait for the drive while others process data."""
_MIN_USERS = 4
_USERS_PER_CORE = 2
"""Threads of `use_spans` per core, for local files; more would compete for caches (docs/design/0006-checkpoints.md)."""


@dataclass(eq=False)
class Span:
    """Elements `[first, stop)` of array `name`; `data` are their bytes from `take` until `release`."""

    name: str
    first: int
    stop: int
    itemsize: int
    slab: Bytes | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return (self.stop - self.first) * self.itemsize

    @property
    def data(self) -> Bytes:
        """The elements' bytes, while the span has memory."""
        if self.slab is None:
            raise UsageError(f"array {self.name!r}: elements from {self.first} on are not, or no longer, in memory")
        return self.slab[: self.nbytes]


def cut_spans(array: StoredArray, first: int, stop: int, span_bytes: int) -> Iterator[Span]:
    """Yield the spans of elements `[first, stop)`. See [Note: spans]."""
    grid, itemsize = array.grid, array.spec.itemsize
    while first < stop:
        shard, local = divmod(first, grid.shard_numel)
        # By the size of chunks in the file, so that a span does not slightly exceed a request.
        chunks = max(1, span_bytes // round_up(grid.chunk_numel * itemsize + CRC_BYTES, BLOCK_BYTES))
        end = min((local // grid.chunk_numel + chunks) * grid.chunk_numel, grid.shard_numel)
        end = min(shard * grid.shard_numel + end, stop)
        yield Span(array.spec.name, first, end, itemsize)
        first = end


def _spans_memory(reader: ArraySource) -> int:
    """Return the approximate bytes of spans, in addition to the reader's pool."""
    return min(MEMORY_BYTES, reader.resources.pool.nbytes // 2)


class ReadAhead(Closing):
    """Prefetches `ranges` of `reader`'s arrays for one thread that uses them in that order. Close it, or use it in a `with`
    block.

    The spans take about `memory_bytes` in addition to the reader's pool (default: 48 MiB, at most half of the pool). Either
    `read` copies consecutive pieces of the ranges, or `take` returns whole spans. Both raise any error from reading.
    """

    def __init__(self, reader: ArraySource, ranges: Sequence[Range], *, memory_bytes: int | None = None) -> None:
        self._reader = reader
        num_threads = reader.num_readers
        if memory_bytes is None:
            memory_bytes = _spans_memory(reader)
        # A span is at least one chunk, of up to 1 MiB, so little memory means few spans.
        depth = min(2 * num_threads, max(_MIN_DEPTH, memory_bytes // 2**20))
        span_bytes = memory_bytes // depth
        max_bytes = 0
        for name, first, stop in ranges:
            array = reader.array(name)
            chunk_bytes = array.grid.chunk_numel * array.spec.itemsize
            max_bytes = max(max_bytes, min(max(span_bytes, chunk_bytes), (stop - first) * array.spec.itemsize))
        self._slabs = Slabs(max_bytes)
        self._next_spans = (
            span for key, low, high in ranges for span in cut_spans(reader.array(key), low, high, span_bytes)
        )
        self._loading: deque[tuple[Span, Ticket[None]]] = deque()
        """Spans that are loaded or being loaded, in order, with the tickets of the loads."""
        self._current: Span | None = None
        """The span that `read` copies from."""
        self._closed = False
        self._workers = Workers(num_threads, "zstore-ahead")
        for _ in range(depth):
            self._start_next()

    def _start_next(self) -> None:
        """Start loading the next span; there is memory for it."""
        span = None if self._closed else next(self._next_spans, None)
        if span is not None:
            self._loading.append((span, self._workers.submit(partial(self._load, span))))

    def _load(self, span: Span) -> None:
        if not self._closed:
            span.slab = self._slabs.acquire()
            self._reader.read(span.name, span.first, span.stop, span.data)

    def take(self) -> Span | None:
        """Return the next span once it is loaded, or None after the last; the caller releases it."""
        if self._closed:
            raise UsageError("the read-ahead was closed")
        if not self._loading:
            self._start_next()  # the previous spans failed, or the caller has not released them
        if not self._loading:
            return None
        span, loaded = self._loading.popleft()
        loaded.wait()
        return span

    def release(self, span: Span) -> None:
        """Free the span's memory for the next span."""
        if span.slab is not None:
            self._slabs.release(span.slab)
            span.slab = None
            self._start_next()

    def read(self, name: str, first: int, stop: int, out: npt.NDArray[Any]) -> None:
        """Copy elements `[first, stop)`, part of one of the ranges, into `out`: contiguous elements, or bytes as uint8.
        Raises UsageError for elements that are not in the next spans."""
        target = out.reshape(-1).view(np.uint8)
        position = first
        while position < stop:
            span = self._span_at(name, position)
            end = min(span.stop, stop)
            source = span.data[(position - span.first) * span.itemsize : (end - span.first) * span.itemsize]
            target[(position - first) * span.itemsize : (end - first) * span.itemsize] = source
            if end == span.stop:
                self.release(span)
            position = end

    def _span_at(self, name: str, position: int) -> Span:
        """Return the span with element `position`, and release the previous spans."""
        span = self._current
        while span is None or span.slab is None or span.name != name or not span.first <= position < span.stop:
            if span is not None:
                self.release(span)
            span = self._current = self.take()
            if span is None:
                raise UsageError(f"array {name!r}: elements from {position} on are not, or no longer, in memory")
        return span

    def close(self) -> None:
        """Stop loading and end the threads; a second call does nothing."""
        self._closed = True
        self._workers.close()


def use_spans(reader: ArraySource, ranges: Sequence[Range], use: Callable[[Span], None], name: str) -> None:
    """Read `ranges` in spans of one request each, roughly in order, and call `use` for each, in several threads named `name`.

    A span is used in the thread that read it, while it may still be in cache, and then freed. The first error stops all
    threads and is raised. The spans take at most as much memory as with `ReadAhead`.
    """
    memory_bytes, request_bytes = _spans_memory(reader), reader.resources.request_bytes
    max_threads = reader.num_readers if reader.is_remote else min(_NUM_REQUESTS, _USERS_PER_CORE * num_cores())
    num_threads = max(_MIN_USERS, min(max_threads, memory_bytes // request_bytes))
    span_bytes = min(request_bytes, memory_bytes // num_threads)
    slabs = Slabs(span_bytes)

    def work(span: Span) -> None:
        slab = slabs.acquire()
        # A chunk that another program wrote may be larger than a span.
        span.slab = slab if span.nbytes <= slab.size else np.empty(span.nbytes, np.uint8)
        reader.read(span.name, span.first, span.stop, span.data)
        use(span)
        slabs.release(slab)

    spans = (span for key, first, stop in ranges for span in cut_spans(reader.array(key), first, stop, span_bytes))
    if ranges:
        with Workers(num_threads, name) as workers:
            workers.run(partial(work, span) for span in spans)


def read_into(
    reader: ArraySource, targets: Sequence[tuple[Range, npt.NDArray[Any]]], on_read: OnRead | None = None
) -> None:
    """Read each range into its memory, contiguous elements or bytes, in several threads with one request each.

    Uses only the memory of the reader's pool. The first error stops all reads and is raised; the content is then undefined.
    """
    tasks: list[Callable[[], None]] = []
    for number, ((name, first, stop), out) in enumerate(targets):
        target = out.reshape(-1).view(np.uint8)
        spans = cut_spans(reader.array(name), first, stop, reader.resources.request_bytes)
        tasks += [partial(_read_span, reader, span, number, first, target, on_read) for span in spans]
    if tasks:
        num_threads = max(_NUM_REQUESTS, reader.num_readers) if reader.is_remote else _NUM_LOCAL_REQUESTS
        with Workers(min(num_threads, len(tasks)), "zstore-read") as workers:
            workers.run(tasks)


def _read_span(reader: ArraySource, span: Span, number: int, base: int, target: Bytes, on_read: OnRead | None) -> None:
    low, high = span.first - base, span.stop - base
    reader.read(span.name, span.first, span.stop, target[low * span.itemsize : high * span.itemsize])
    if on_read is not None:
        on_read(number, low, high)
