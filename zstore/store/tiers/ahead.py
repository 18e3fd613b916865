"""Reading ahead: shards that rest on disk, brought whole into buffers for the next read of each."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...io.buffers import Buffer, Pool
from ...io.queue import Priority, Ticket, settle
from .base import LocalShard, Mode, Span, Tile, View
from .disk import DiskTier

T = TypeVar("T")


@dataclass(frozen=True)
class Ahead:
    """A shard in a buffer: one view a chunk."""

    buffer: Buffer
    views: Sequence[View]

    def tiles(self, local: LocalShard) -> Iterator[Tile]:
        """Yield every chunk, as a reading pass would."""
        for chunk, view in enumerate(self.views):
            yield Tile(0, *local.chunk_range(chunk), (view,))


class ReadAhead:
    """Holds what was read ahead; gives it all back as soon as somebody has to wait for a buffer of `pool`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._held: dict[str, Ahead] = {}
        self._lock = threading.Lock()
        pool.on_shortage = self.drop_all

    def bring(self, tier: DiskTier, local: LocalShard) -> bool:
        """Bring a whole shard; false where it is here already or there is no room. Never waits for a buffer."""
        name, present = local.spec.name, local.grid.present_chunks(local.shard)
        nbytes = tier.span_bytes(name, present)
        room = nbytes > 0 and self._pool.held_bytes + nbytes <= self._pool.nbytes // 2
        buffer = self._pool.try_acquire(nbytes) if room and name not in self._held else None
        if buffer is None:
            return False
        try:
            self._load(tier, name, present, buffer)
        except BaseException:
            buffer.release()
            raise
        with self._lock:
            self._held[name] = Ahead(buffer, tier.views(name, Span(0, present), buffer.bytes))
        if self._pool.has_waiters:  # since before it was held, so that their call of `drop_all` missed it
            self.drop_all()
        return True

    def _load(self, tier: DiskTier, name: str, present: int, buffer: Buffer) -> None:
        """Load all chunks into `buffer`; nothing is in flight when this returns or raises."""
        tier.begin(name, Mode.READ)
        step = tier.span_chunks(name)
        tickets: list[Ticket[None]] = []
        try:
            for first in range(0, present, step):
                span = Span(first, min(step, present - first))
                part = buffer.bytes[tier.span_bytes(name, first) :][: tier.span_bytes(name, span.num_chunks)]
                ticket = tier.load(name, span, part, Mode.READ, Priority.PREFETCH)
                if ticket is not None:
                    tickets.append(ticket)
        finally:
            for ticket in tickets:
                ticket.error()
        settle(tickets)

    def take(self, name: str) -> Ahead | None:
        """Return the shard's buffer, now the caller's to release; None where it is not here."""
        with self._lock:
            return self._held.pop(name, None)

    def drop(self, names: Sequence[str]) -> None:
        """Give the buffers of `names` back."""
        if not self._held:
            return
        for name in names:
            ahead = self.take(name)
            if ahead is not None:
                ahead.buffer.release()

    def drop_all(self) -> None:
        """Give all buffers back."""
        with self._lock:
            names = list(self._held)
        self.drop(names)

    def forgetting(self, names: Sequence[str], items: Iterator[T]) -> Generator[T, None, None]:
        """Yield the items of a pass that changes `names`: what was read ahead before its end is old."""
        try:
            self.drop(names)
            yield from items
        finally:
            self.drop(names)
