"""Reading ranges of arrays in order, ahead of their use, each stored chunk once, in bounded memory.

[Note: spans]
The ranges are cut where stored chunks end, into spans of about `span_bytes`. Threads load spans in order into a fixed
set of buffers; a buffer is free again when every element of its span was used. Whoever uses the ranges roughly in order
cannot be stuck: the earliest span that is not used up always has a buffer.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ..buffers import make_slab
from ..errors import UsageError
from .crew import Crew
from .source import ArraySource, StoredArray

Bytes = npt.NDArray[np.uint8]

Range = tuple[str, int, int]
"""An array's name and global flat elements `[first, stop)` of it."""

MEMORY_BYTES = 48 * 1024 * 1024
_DEPTH = 6
_NUM_THREADS = 3


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
    def data(self) -> Bytes:
        """The elements' bytes, while the span has memory."""
        if self.slab is None:
            raise UsageError(f"array {self.name!r}: elements from {self.first} on are not in memory (any more)")
        return self.slab[: self.nbytes]


def cut_spans(array: StoredArray, first: int, stop: int, span_bytes: int) -> list[Span]:
    """Return the spans of elements `[first, stop)`. See [Note: spans]."""
    grid, itemsize = array.grid, array.spec.itemsize
    spans: list[Span] = []
    while first < stop:
        shard, local = divmod(first, grid.shard_numel)
        chunks = max(1, span_bytes // (grid.chunk_numel * itemsize))
        end = min((local // grid.chunk_numel + chunks) * grid.chunk_numel, grid.shard_numel)
        end = min(shard * grid.shard_numel + end, stop)
        spans.append(Span(array.spec.name, first, end, itemsize))
        first = end
    return spans


class ReadAhead:
    """Loads `ranges` of `reader`'s arrays, in that order. Close it, or use it in a `with` block.

    The spans take about `memory_bytes` beside the reader's pool: 48 MiB, or half of a pool that is smaller than twice
    that. Either `read` serves pieces of the ranges, roughly in order, each element once; or `take` hands out whole spans.
    Both are usable from several threads, and raise what reading raised.
    """

    def __init__(
        self,
        reader: ArraySource,
        ranges: Sequence[Range],
        *,
        memory_bytes: int | None = None,
        depth: int = _DEPTH,
        num_threads: int = _NUM_THREADS,
    ) -> None:
        self._reader = reader
        if memory_bytes is None:
            memory_bytes = min(MEMORY_BYTES, reader.resources.pool.nbytes // 2)
        span_bytes = memory_bytes // depth
        self._spans = [
            span for name, first, stop in ranges for span in cut_spans(reader.array(name), first, stop, span_bytes)
        ]
        self._by_name: dict[str, list[Span]] = {}
        for span in sorted(self._spans, key=lambda span: span.first):
            self._by_name.setdefault(span.name, []).append(span)
        self._starts = {name: [span.first for span in spans] for name, spans in self._by_name.items()}
        most = max((span.nbytes for span in self._spans), default=0)
        self._free = [make_slab(most) for _ in range(min(depth, len(self._spans)))]
        self._next_to_load = 0
        self._next_to_take = 0
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._load, name=f"zstore-ahead-{i}", daemon=True)
            for i in range(min(num_threads, len(self._spans)))
        ]
        for thread in self._threads:
            thread.start()

    def _load(self) -> None:
        while True:
            with self._changed:
                # Number and buffer are taken together: the earliest span without a buffer gets the next one.
                self._changed.wait_for(lambda: self._closed or self._free or self._next_to_load == len(self._spans))
                if self._closed or self._next_to_load == len(self._spans):
                    return
                span = self._spans[self._next_to_load]
                self._next_to_load += 1
                span.slab = self._free.pop()
            try:
                self._reader.read(span.name, span.first, span.stop, span.data)
            except BaseException as error:
                span.error = error
            with self._changed:
                span.loaded = True
                self._changed.notify_all()

    def take(self) -> Span | None:
        """Return the next span, loaded, or None after the last; the caller releases it."""
        with self._changed:
            if self._next_to_take == len(self._spans):
                return None
            span = self._spans[self._next_to_take]
            self._next_to_take += 1
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
            number = bisect_right(self._starts.get(name, []), position) - 1
            if number < 0 or position >= self._by_name[name][number].stop:
                raise UsageError(f"array {name!r}: element {position} is in none of the ranges that are read ahead")
            span = self._by_name[name][number]
            with self._changed:
                self._wait_for(span)
            end = min(span.stop, stop)
            source = span.data[(position - span.first) * span.itemsize : (end - span.first) * span.itemsize]
            target[(position - first) * span.itemsize : (end - first) * span.itemsize] = source
            with self._changed:
                self._use(span, end - position)
            position = end

    def _wait_for(self, span: Span) -> None:
        self._changed.wait_for(lambda: span.loaded or self._closed)
        if span.error is not None:
            raise span.error
        if not span.loaded:
            raise UsageError("the reading ahead was closed")

    def _use(self, span: Span, numel: int) -> None:
        span.used_numel += numel
        if span.used_numel >= span.stop - span.first and span.slab is not None:
            self._free.append(span.slab)
            span.slab = None
            self._changed.notify_all()

    def close(self) -> None:
        """Stop loading and give the buffers back; a second call does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._free.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def use_spans(reader: ArraySource, ranges: Sequence[Range], use: Callable[[Span], None], name: str) -> None:
    """Read `ranges` ahead and call `use` for each span, in several threads called `name`; its memory is taken back then.

    The first error stops all of them and is raised.
    """
    num_threads = max(2, min(4, os.cpu_count() or 2))
    stopped = threading.Event()

    def work(ahead: ReadAhead) -> None:
        try:
            while not stopped.is_set() and (span := ahead.take()) is not None:
                use(span)
                ahead.release(span)
        except BaseException:
            stopped.set()
            raise

    if not ranges:
        return
    with Crew(num_threads, name) as crew, ReadAhead(reader, ranges) as ahead:
        try:
            crew.run([partial(work, ahead)] * num_threads)
        finally:
            stopped.set()
