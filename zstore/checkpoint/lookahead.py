"""Reading ranges of arrays in order, ahead of their use, each stored chunk once, in bounded memory.

[Note: spans]
The ranges are cut at the ends of stored chunks, into spans of about `span_bytes`. Threads load spans in order into a fixed
set of buffers; a buffer is free again when every element of its span was used. A user of the ranges roughly in order
cannot get stuck: the earliest span that is not used up always has a buffer. A span exists from when its loading begins until
it is used up: all spans of a huge checkpoint would take gigabytes.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..format.arrays import Bytes, round_up
from ..format.shardfile import BLOCK_BYTES, CRC_BYTES
from ..io.buffers import Slabs, make_slab
from ..io.closing import Closing
from ..io.pool import Workers, num_cores
from .reader import ArraySource, StoredArray

Range = tuple[str, int, int]
"""An array's name and global flat elements `[first, stop)` of it."""

Landed = Callable[[int, int, int], None]
"""`landed(number, first, stop)`: elements `[first, stop)` of target number `number` are there, counted from its first. Called
by the thread that read them, in whose cache they may still be."""

MEMORY_BYTES = 48 * 1024 * 1024
_LEAST_DEPTH = 6
_NUM_REQUESTS = 12
"""Requests of `use_spans` under way at a time, at most."""
_NUM_STRAIGHT = 20
"""Requests of `read_into` for local files: threads wait for the drive by turns with what each does to its bytes."""
_LEAST_USERS = 4
_USERS_PER_CORE = 2
"""Threads of `use_spans` that read local files: more take each other's cores and caches (docs/design/0006-checkpoints.md)."""


@dataclass(eq=False)
class Span:
    """Elements `[first, stop)` of array `name`; `data` are their bytes from `take` until `release`."""

    name: str
    first: int
    stop: int
    itemsize: int
    slab: Bytes | None = None
    loaded: bool = False
    used_numel: int = 0
    error: BaseException | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return (self.stop - self.first) * self.itemsize

    @property
    def is_used_up(self) -> bool:
        """Whether every element was used."""
        return self.used_numel >= self.stop - self.first

    @property
    def data(self) -> Bytes:
        """The elements' bytes, while the span has memory."""
        if self.slab is None:
            raise UsageError(f"array {self.name!r}: elements from {self.first} on are not in memory, or no longer")
        return self.slab[: self.nbytes]


def cut_spans(array: StoredArray, first: int, stop: int, span_bytes: int) -> Iterator[Span]:
    """Yield the spans of elements `[first, stop)`. See [Note: spans]."""
    grid, itemsize = array.grid, array.spec.itemsize
    while first < stop:
        shard, local = divmod(first, grid.shard_numel)
        # As they are in the file: otherwise a span is a request and a little more.
        chunks = max(1, span_bytes // round_up(grid.chunk_numel * itemsize + CRC_BYTES, BLOCK_BYTES))
        end = min((local // grid.chunk_numel + chunks) * grid.chunk_numel, grid.shard_numel)
        end = min(shard * grid.shard_numel + end, stop)
        yield Span(array.spec.name, first, end, itemsize)
        first = end


def _spans_memory(reader: ArraySource) -> int:
    """Return about the bytes that spans take beside the reader's pool."""
    return min(MEMORY_BYTES, reader.resources.pool.nbytes // 2)


class ReadAhead(Closing):
    """Loads `ranges` of `reader`'s arrays, in that order. Close it, or use it in a `with` block.

    The spans take about `memory_bytes` beside the reader's pool: 48 MiB, or half of a pool that is smaller than twice
    that. Either `read` serves pieces of the ranges, roughly in order, each element once; or `take` hands out whole spans.
    Both are usable from several threads, and raise the errors of reading.
    """

    def __init__(
        self,
        reader: ArraySource,
        ranges: Sequence[Range],
        *,
        memory_bytes: int | None = None,
    ) -> None:
        self._reader = reader
        num_threads = reader.num_readers
        if memory_bytes is None:
            memory_bytes = _spans_memory(reader)
        # A span is a chunk at least, of up to 1 MiB: in little memory there are few.
        depth = min(2 * num_threads, max(_LEAST_DEPTH, memory_bytes // 2**20))
        span_bytes = memory_bytes // depth
        self._ranges: dict[str, list[tuple[int, int, int]]] = {}
        """By array, first and stop element of each range and its place among all, by first element."""
        most = 0
        for place, (name, first, stop) in enumerate(ranges):
            if first < stop:
                insort(self._ranges.setdefault(name, []), (first, stop, place))
                array = reader.array(name)
                chunk_bytes = array.grid.chunk_numel * array.spec.itemsize
                most = max(most, min(max(span_bytes, chunk_bytes), (stop - first) * array.spec.itemsize))
        self._slabs, self._num_free = Slabs(most), depth
        self._coming = self._cut(ranges, span_bytes)
        self._next = next(self._coming, None)
        self._live: dict[str, list[Span]] = {}
        """Spans that are begun and not used up, by array and first element."""
        self._to_take: deque[Span] = deque()
        """Spans that are begun and were not taken, in order."""
        self._closed = False
        self._changed = threading.Condition()
        self._workers = Workers(num_threads, "zstore-ahead")
        for _ in range(num_threads):
            self._workers.submit(self._load)

    def _cut(self, ranges: Sequence[Range], span_bytes: int) -> Iterator[tuple[int, Span]]:
        """Yield all spans, each with the place of its range."""
        for place, (name, first, stop) in enumerate(ranges):
            for span in cut_spans(self._reader.array(name), first, stop, span_bytes):
                yield place, span

    def _load(self) -> None:
        while True:
            with self._changed:
                # Number and buffer are taken together: the earliest span without a buffer gets the next one.
                self._changed.wait_for(lambda: self._closed or self._next is None or self._num_free)
                if self._closed or self._next is None:
                    return
                span = self._begin(self._next[1])
            try:
                span.slab = self._slabs.acquire()
                self._reader.read(span.name, span.first, span.stop, span.data)
            except BaseException as error:
                span.error = error
            with self._changed:
                span.loaded = True
                self._changed.notify_all()

    def _begin(self, span: Span) -> Span:
        """Count a buffer for the next span, with the lock held."""
        self._num_free -= 1
        insort(self._live.setdefault(span.name, []), span, key=attrgetter("first"))
        self._to_take.append(span)
        self._next = next(self._coming, None)
        self._changed.notify_all()
        return span

    def take(self) -> Span | None:
        """Return the next span, loaded, or None after the last; the caller releases it."""
        with self._changed:
            self._changed.wait_for(lambda: self._to_take or self._next is None or self._closed)
            if self._closed:
                raise UsageError("the read-ahead was closed")
            if not self._to_take:
                return None
            span = self._to_take.popleft()
            self._wait_for(span)
            return span

    def release(self, span: Span) -> None:
        """Give the span's memory back."""
        with self._changed:
            self._use(span, span.stop - span.first)

    def read(self, name: str, first: int, stop: int, out: npt.NDArray[Any]) -> None:
        """Copy elements `[first, stop)`, part of one of the ranges, into `out`: contiguous elements, or bytes as uint8.

        Raises UsageError for elements that are in none of the ranges.
        """
        target = out.reshape(-1).view(np.uint8)
        position = first
        while position < stop:
            with self._changed:
                span = self._span_at(name, position)
            end = min(span.stop, stop)
            source = span.data[(position - span.first) * span.itemsize : (end - span.first) * span.itemsize]
            target[(position - first) * span.itemsize : (end - first) * span.itemsize] = source
            with self._changed:
                self._use(span, end - position)
            position = end

    def _span_at(self, name: str, position: int) -> Span:
        """Return the span of an element once it is loaded; raise UsageError for one that will never be."""
        place = self._place_of(name, position)
        while True:
            spans = self._live.get(name, [])
            number = bisect_right(spans, position, key=attrgetter("first")) - 1
            if number >= 0 and position < spans[number].stop:
                span = spans[number]
                self._wait_for(span)  # the list changes meanwhile
                return span
            if self._next is None or (place, position) < (self._next[0], self._next[1].first):
                raise UsageError(f"array {name!r}: elements from {position} on are not in memory, or no longer")
            if self._closed:
                raise UsageError("the read-ahead was closed")
            self._changed.wait()

    def _place_of(self, name: str, position: int) -> int:
        ranges = self._ranges.get(name, [])
        number = bisect_right(ranges, position, key=itemgetter(0)) - 1
        if number < 0 or position >= ranges[number][1]:
            raise UsageError(f"array {name!r}: element {position} is in none of the ranges that are read ahead")
        return ranges[number][2]

    def _wait_for(self, span: Span) -> None:
        self._changed.wait_for(lambda: span.loaded or self._closed)
        if span.error is not None:
            raise span.error
        if not span.loaded:
            raise UsageError("the read-ahead was closed")

    def _use(self, span: Span, numel: int) -> None:
        span.used_numel += numel
        if span.is_used_up and span.slab is not None:
            self._slabs.release(span.slab)
            self._num_free += 1
            span.slab = None
            self._live[span.name].remove(span)
            while self._to_take and self._to_take[0].is_used_up:  # by `read`
                self._to_take.popleft()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop loading and end the threads; a second call does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._workers.close()


def use_spans(reader: ArraySource, ranges: Sequence[Range], use: Callable[[Span], None], name: str) -> None:
    """Read `ranges` in spans of a request each, roughly in order, and call `use` for each, in several threads called `name`.

    The thread that read a span uses it, in whose cache it may still be; its memory is taken back then. The first error stops
    all of them and is raised. The spans take at most as much memory as those of `ReadAhead`.
    """
    memory_bytes, request_bytes = _spans_memory(reader), reader.resources.request_bytes
    wanted = reader.num_readers if reader.is_remote else min(_NUM_REQUESTS, _USERS_PER_CORE * num_cores())
    num_threads = max(_LEAST_USERS, min(wanted, memory_bytes // request_bytes))
    span_bytes = min(request_bytes, memory_bytes // num_threads)
    coming = (span for name, first, stop in ranges for span in cut_spans(reader.array(name), first, stop, span_bytes))
    lock = threading.Lock()
    failed = False

    def work() -> None:
        nonlocal failed
        slab = make_slab(span_bytes)
        try:
            while not failed:
                with lock:
                    span = next(coming, None)
                if span is None:
                    return
                # A chunk of another program may be larger than all other spans.
                span.slab = slab if span.nbytes <= slab.size else np.empty(span.nbytes, np.uint8)
                reader.read(span.name, span.first, span.stop, span.data)
                use(span)
        except BaseException:
            failed = True
            raise

    if ranges:
        with Workers(num_threads, name) as workers:
            workers.run([work] * num_threads)


def read_into(
    reader: ArraySource, targets: Sequence[tuple[Range, npt.NDArray[Any]]], landed: Landed | None = None
) -> None:
    """Read each range whole into its memory, contiguous elements or bytes, by several threads at once, a request each.

    Takes no memory beside the reader's pool. The first error stops all reads and is raised; the memory then has mixed content.
    """
    tasks: list[Callable[[], None]] = []
    for number, ((name, first, stop), out) in enumerate(targets):
        target = out.reshape(-1).view(np.uint8)
        spans = cut_spans(reader.array(name), first, stop, reader.resources.request_bytes)
        tasks += [partial(_read_span, reader, span, number, first, target, landed) for span in spans]
    if tasks:
        most = max(_NUM_REQUESTS, reader.num_readers) if reader.is_remote else _NUM_STRAIGHT
        with Workers(min(most, len(tasks)), "zstore-read") as workers:
            workers.run(tasks)


def _read_span(reader: ArraySource, span: Span, number: int, base: int, target: Bytes, landed: Landed | None) -> None:
    low, high = span.first - base, span.stop - base
    reader.read(span.name, span.first, span.stop, target[low * span.itemsize : high * span.itemsize])
    if landed is not None:
        landed(number, low, high)
