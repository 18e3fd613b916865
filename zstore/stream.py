"""A pass over shards: chunks come from their tiers ahead of use, and go back behind it, in bounded memory.

[Note: the pipeline]
Phases of a span, for all arrays of a group together:
1. one buffer for the whole span is taken from the pool, together or not at all;
2. the loads are queued; spans behind it are loaded while earlier ones are used;
3. the consumer gets one `Tile` a chunk and changes its views in place;
4. the saves are queued; the last of them gives the buffer back.
A stream waits for the pool only while it holds no loaded span, so it cannot wait for itself, and it never takes the
last quarter of the pool ahead of use. New versions become the present ones at the end, when every save is done.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .buffers import Buffer, Bytes, Pool
from .errors import UsageError
from .io import Ticket
from .tiers import DiskTier, LocalShard, Mode, Span, Tier, Tile

__all__ = ["Stream", "StreamCounters", "Tile"]

_MOST_LOADED_SPANS = 64


@dataclass(frozen=True)
class _Plan:
    """A span of a group before it has memory."""

    group: int
    span: Span
    starts_group: bool


@dataclass
class _Loaded:
    """A span with its memory and its loads under way."""

    plan: _Plan
    buffer: Buffer | None
    parts: list[Bytes]
    tickets: list[Ticket[None]]


@dataclass
class StreamCounters:
    """Time a consumer waited, in seconds, by cause."""

    read_wait_s: float = 0.0
    write_wait_s: float = 0.0
    pool_wait_s: float = 0.0
    pin_wait_s: float = 0.0


NO_BYTES: Bytes = np.empty(0, dtype=np.uint8)


class Stream:
    """Drives one pass over `groups` of array names; `tiers` and `shards` say where each rests.

    `chunks` limits a reading pass to chunks `[first, stop)` of each shard.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[str]],
        mode: Mode,
        *,
        tiers: Mapping[str, Tier],
        shards: Mapping[str, LocalShard],
        pool: Pool,
        counters: StreamCounters,
        chunks: tuple[int, int] | None = None,
    ) -> None:
        self._groups = [tuple(group) for group in groups]
        self._mode = mode
        self._chunks = chunks
        self._tiers = tiers
        self._shards = shards
        self._pool = pool
        self._counters = counters
        self._loaded: deque[_Loaded] = deque()
        self._plans = deque(self._plan())
        self._begun: dict[str, Tier] = {}
        self._saves: deque[Ticket[None]] = deque()

    def _plan(self) -> Iterator[_Plan]:
        seen: set[str] = set()
        for number, group in enumerate(self._groups):
            shards = [self._shards[name] for name in group]
            if not group or seen & set(group) or len(set(group)) < len(group):
                raise UsageError(f"a pass visits each array once, and a group has at least one array: got {group}")
            if len({(s.grid, s.shard) for s in shards}) > 1:
                raise UsageError(f"the arrays of a group share one layout, got different ones for {', '.join(group)}")
            seen.update(group)
            present = shards[0].grid.present_chunks(shards[0].shard) if shards[0].valid_numel else 0
            step = min((t.span_chunks(n) for n in group if isinstance(t := self._tiers[n], DiskTier)), default=present)
            start, stop = (0, present) if self._chunks is None else self._chunks
            for first in range(start, min(stop, present), max(1, step)):
                yield _Plan(number, Span(first, min(step, min(stop, present) - first)), first == start)

    def tiles(self) -> Iterator[Tile]:
        """Yield the tiles; see [Note: the pipeline]. A failed or abandoned pass keeps former versions where it can."""
        ok = False
        current: _Loaded | None = None
        try:
            while True:
                self._load_ahead()
                if not self._loaded:
                    break
                current = self._loaded.popleft()
                self._counters.read_wait_s += _wait_all(current.tickets)
                yield from self._tiles_of(current)
                done, current = current, None
                self._save(done)
            self._counters.write_wait_s += _wait_all(self._saves)
            ok = True
        finally:
            self._finish(current, ok)

    def _load_ahead(self) -> None:
        while self._plans and len(self._loaded) < _MOST_LOADED_SPANS:
            plan = self._plans[0]
            names = self._groups[plan.group]
            if plan.starts_group and not self._begin(names):
                return
            sizes = [self._tiers[name].span_bytes(name, plan.span.num_chunks) for name in names]
            total = sum(sizes)
            buffer = self._take(total)
            if buffer is None and total > 0:
                return
            self._plans.popleft()
            try:
                self._loaded.append(self._start(plan, names, sizes, buffer))
            except BaseException:
                if buffer is not None:
                    buffer.release()
                raise

    def _begin(self, names: Sequence[str]) -> bool:
        """Begin the pass over a group, before any memory is taken for it: whoever must release a pin may need that.

        False where a pin would have to be waited for while spans are loaded.
        """
        names = [name for name in names if name not in self._begun]
        changes = self._mode is not Mode.READ
        if changes and self._loaded and any(self._tiers[name].is_pinned_in_place(name) for name in names):
            return False
        for name in names:
            started = time.perf_counter()
            self._tiers[name].begin(name, self._mode)
            self._counters.pin_wait_s += time.perf_counter() - started
            self._begun[name] = self._tiers[name]
        return True

    def _take(self, nbytes: int) -> Buffer | None:
        if nbytes == 0:
            return None
        if not self._loaded:
            started = time.perf_counter()
            buffer = self._pool.acquire(nbytes)
            self._counters.pool_wait_s += time.perf_counter() - started
            return buffer
        # A pass that reads nothing gains nothing from memory held ahead of use.
        if self._mode is Mode.FILL or self._pool.held_bytes + nbytes > self._pool.nbytes * 3 // 4:
            return None
        return self._pool.try_acquire(nbytes)

    def _start(self, plan: _Plan, names: Sequence[str], sizes: Sequence[int], buffer: Buffer | None) -> _Loaded:
        parts: list[Bytes] = []
        tickets: list[Ticket[None]] = []
        offset = 0
        for name, size in zip(names, sizes, strict=True):
            part = NO_BYTES if buffer is None else buffer.bytes[offset : offset + size]
            offset += size
            parts.append(part)
            try:
                ticket = self._tiers[name].load(name, plan.span, part, self._mode)
            except BaseException:
                for under_way in tickets:
                    under_way.error()
                raise
            if ticket is not None:
                tickets.append(ticket)
        return _Loaded(plan, buffer, parts, tickets)

    def _tiles_of(self, loaded: _Loaded) -> Iterator[Tile]:
        plan = loaded.plan
        names = self._groups[plan.group]
        columns = [self._tiers[n].views(n, plan.span, part) for n, part in zip(names, loaded.parts, strict=True)]
        shard = self._shards[names[0]]
        for i, chunk in enumerate(plan.span.chunks):
            first, stop = shard.chunk_range(chunk)
            yield Tile(plan.group, first, stop, tuple(column[i] for column in columns))

    def _save(self, loaded: _Loaded) -> None:
        tickets: list[Ticket[None]] = []
        try:
            if self._mode is not Mode.READ:
                names = self._groups[loaded.plan.group]
                for name, part in zip(names, loaded.parts, strict=True):
                    ticket = self._tiers[name].save(name, loaded.plan.span, part)
                    if ticket is not None:
                        tickets.append(ticket)
        finally:
            if loaded.buffer is not None:
                _release_after(loaded.buffer, tickets)
            self._saves.extend(tickets)
        while self._saves and self._saves[0].done():
            self._saves.popleft().wait()

    def _finish(self, current: _Loaded | None, ok: bool) -> None:
        for loaded in [*([current] if current is not None else []), *self._loaded]:
            for ticket in loaded.tickets:
                ticket.error()
            if loaded.buffer is not None:
                loaded.buffer.release()
        for ticket in self._saves:
            ticket.error()
        if self._mode is not Mode.READ:
            self._end(ok)

    def _end(self, ok: bool) -> None:
        errors: list[Exception] = []
        for name, tier in self._begun.items():
            try:
                tier.end(name, ok)
            except Exception as error:
                errors.append(error)
        if errors and ok:
            raise errors[0]


def _wait_all(tickets: Iterable[Ticket[None]]) -> float:
    """Wait for all `tickets` and return the seconds that took; raises the first error."""
    started = time.perf_counter()
    for ticket in tickets:
        ticket.wait()
    return time.perf_counter() - started


def _release_after(buffer: Buffer, tickets: Sequence[Ticket[None]]) -> None:
    """Give `buffer` back when all `tickets` are done."""
    if not tickets:
        buffer.release()
        return
    lock = threading.Lock()
    left = len(tickets)

    def one_done() -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            buffer.release()

    for ticket in tickets:
        ticket.when_done(one_done)
