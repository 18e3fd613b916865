"""An iterator over whole arrays of a store that prefetches arrays and stores changes in the background."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Sequence
from typing import Any, Literal, TypeVar

from ..errors import UsageError
from ..format.arrays import numpy_dtype, round_up
from ..io.memory import PAGE_BYTES, Buffer, Pool
from ..io.queue import Ticket
from .arrays import StoreArray, Value, shaped
from .shards import Shards

T = TypeVar("T")

Mode = Literal["update", "read"]


class PendingTickets:
    """Tickets of operations that are unfinished, or whose error has not been reported yet."""

    def __init__(self) -> None:
        self._tickets: dict[object, Ticket[Any]] = {}

    def add(self, ticket: Ticket[T]) -> Ticket[T]:
        """Track an operation; return the ticket for the caller, which stops being tracked once it is observed."""
        key = object()
        for old_key, old_ticket in list(self._tickets.items()):
            if old_ticket.done() and old_ticket.error() is None:
                self._tickets.pop(old_key, None)

        def observed() -> None:
            self._tickets.pop(key, None)
            ticket.mark_observed()

        tracked = self._tickets[key] = Ticket(ticket.future, observed)
        return tracked

    def all(self) -> list[Ticket[Any]]:
        """Return the tickets, in the order of addition."""
        return list(self._tickets.values())

    def clear(self) -> None:
        """Stop tracking all tickets, which refer to this object and keep the memory of their operations alive."""
        self._tickets.clear()


class ArrayIterator:
    """An iterator over (name, value) pairs of whole arrays, for `for` or `async for`. Created by `Store.stream`.

    A loop may exit at any value, which is then stored like the others.
    """

    def __init__(
        self,
        arrays: Sequence[StoreArray],
        read: Callable[..., Ticket[Any]],
        write: Callable[[str, Value], Ticket[None]],
        shards: Shards,
        submit: Callable[[Callable[[], Any]], Ticket[Any]],
        prefetch: int,
        mode: Mode,
    ) -> None:
        self._remaining = list(reversed(arrays))
        self._read, self._write = read, write
        """Read an array into `out`; replace it by a value."""
        self._shards, self._submit, self._prefetch, self._mode = shards, submit, prefetch, mode
        self._pool: Pool | None = None
        self._prefetched: list[tuple[str, Buffer, Ticket[Any]]] = []
        self._writes = PendingTickets()
        self._current: tuple[str, Buffer, Any] | None = None
        """The loop's current array."""
        self._closed = False
        self._lock = threading.Lock()
        """Guards the state: a cancelled task may have left `_load_next_array` running."""

    def __iter__(self) -> Generator[tuple[str, Any], None, None]:
        try:
            while self._load_next_array():
                yield self._next_item()
                self._store_current()
        finally:
            self.close()

    def __aiter__(self) -> AsyncIterator[tuple[str, Any]]:
        return _AsyncIterator(self)

    async def _anext(self) -> tuple[str, Any]:
        self._store_current()  # before anything else, so that requests of the loop body follow it
        if not await self._submit(self._load_next_array):
            await self._submit(self.close)
            raise StopAsyncIteration
        return self._next_item()

    def _end_abandoned(self) -> None:
        """End the pass of a loop that was exited early; `flush` raises the error of a change."""
        if not self._closed:
            with contextlib.suppress(KeyError, UsageError):  # the array was removed
                self._store_current()
            with contextlib.suppress(RuntimeError):  # the store is closed
                self._submit(self.close)

    def _load_next_array(self) -> bool:
        """Read ahead, and wait for the next array; return whether there is one."""
        with self._lock:
            self._read_ahead()
            if self._prefetched:
                self._prefetched[0][2].wait()
            return bool(self._prefetched)

    def _read_ahead(self) -> None:
        while self._remaining and len(self._prefetched) <= self._prefetch:
            array = self._remaining[-1]
            spec, nbytes = array.spec, max(1, array.spec.nbytes)
            pool = self._pool = self._pool or self._make_pool()
            buffer = pool.try_acquire(nbytes) if self._prefetched else pool.acquire(nbytes)
            if buffer is None:
                return
            self._remaining.pop()
            data = buffer.bytes[: spec.nbytes].view(numpy_dtype(spec.dtype))
            ticket = self._read(spec.name, out=shaped(data, spec.shape, array.is_torch))
            self._prefetched.append((spec.name, buffer, ticket))

    def _next_item(self) -> tuple[str, Any]:
        name, buffer, ticket = self._prefetched.pop(0)
        self._current = name, buffer, ticket.wait()
        return name, self._current[2]

    def _store_current(self) -> None:
        """Store the current array, whose loop iteration has ended."""
        if self._current is None:
            return
        (name, buffer, value), self._current = self._current, None
        if self._mode == "read":
            buffer.release()
        else:
            self._writes.add(self._write(name, value)).when_done(buffer.release)

    def _make_pool(self) -> Pool:
        """Return memory for the current array, the prefetched ones and the ones being stored, within the budget."""
        sizes = sorted((round_up(max(1, array.spec.nbytes), PAGE_BYTES) for array in self._remaining), reverse=True)
        needed_bytes, free_bytes = sum(sizes[: self._prefetch + 2]), self._shards.budget.free_bytes
        return self._shards.make_pool(
            needed_bytes
            if free_bytes is None
            else max(sizes[0], min(needed_bytes, free_bytes // PAGE_BYTES * PAGE_BYTES))
        )

    def close(self) -> None:
        """End the pass: store the current value, and wait for pending operations; a second call does nothing.

        Raises the error of a failed change. `flush` raises it too, because an exited loop does not see this exception.
        """
        self._closed = True
        with self._lock:
            self._remaining.clear()
            self._store_current()
            for _, buffer, ticket in self._prefetched:
                ticket.wait_for_end()
                buffer.release()
            self._prefetched.clear()
            errors = [error for ticket in self._writes.all() if (error := ticket.error()) is not None]
            self._writes.clear()
            if self._pool is not None:
                self._shards.drop_pool(self._pool)
                self._pool = None
        if errors:
            raise errors[0]


class _AsyncIterator:
    """The iterator of `async for`: when the loop exits early, its current value is stored before any later request."""

    def __init__(self, values: ArrayIterator) -> None:
        self._values = values

    def __aiter__(self) -> AsyncIterator[tuple[str, Any]]:
        return self

    def __anext__(self) -> Coroutine[Any, Any, tuple[str, Any]]:
        return self._values._anext()

    def __del__(self) -> None:
        self._values._end_abandoned()
