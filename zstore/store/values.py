"""A pass over whole arrays of a store, by `for` or `async for`, read ahead and stored in the background."""

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


class Unreported:
    """Unfinished operations, and operations whose error has not been reported yet."""

    def __init__(self) -> None:
        self._tickets: dict[object, Ticket[Any]] = {}

    def add(self, ticket: Ticket[T]) -> Ticket[T]:
        """Return the operation's ticket for the caller, which reports it."""
        key = object()
        for other, one in list(self._tickets.items()):
            if one.done() and one.error() is None:
                self._tickets.pop(other, None)

        def observed() -> None:
            self._tickets.pop(key, None)
            ticket.mark_observed()

        given = self._tickets[key] = Ticket(ticket.future, observed)
        return given

    def all(self) -> list[Ticket[Any]]:
        """Return their tickets, in the order of addition."""
        return list(self._tickets.values())


class Values:
    """A pass over whole arrays: an iterator of (name, value), with `for` or `async for`. Made by `Store.stream`.

    A loop may exit at any value, which is stored like the others.
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
        self._next_arrays = list(reversed(arrays))
        self._read, self._write = read, write
        """Read an array into `out`; replace it by a value."""
        self._shards, self._submit, self._prefetch, self._mode = shards, submit, prefetch, mode
        self._pool: Pool | None = None
        self._ahead: list[tuple[str, Buffer, Ticket[Any]]] = []
        self._writes = Unreported()
        self._current: tuple[str, Buffer, Any] | None = None
        """The loop's current array."""
        self._closed = False
        self._lock = threading.Lock()
        """Guards advancing: a task that was cancelled may have left its advance running."""

    def __iter__(self) -> Generator[tuple[str, Any], None, None]:
        try:
            while self._advance():
                yield self._hand_out()
                self._retire()
        finally:
            self.close()

    def __aiter__(self) -> AsyncIterator[tuple[str, Any]]:
        return _AsyncPass(self)

    async def _anext(self) -> tuple[str, Any]:
        self._retire()  # at once: the loop's next requests follow it
        if not await self._submit(self._advance):
            await self._submit(self.close)
            raise StopAsyncIteration
        return self._hand_out()

    def _leave(self) -> None:
        """End the pass of an exited loop; `flush` raises the error of a change."""
        if not self._closed:
            with contextlib.suppress(KeyError, UsageError):  # the array was removed
                self._retire()
            with contextlib.suppress(RuntimeError):  # the store is closed
                self._submit(self.close)

    def _advance(self) -> bool:
        """Read ahead, and wait for the next array; return whether there is one."""
        with self._lock:
            self._read_ahead()
            if self._ahead:
                self._ahead[0][2].wait()
            return bool(self._ahead)

    def _read_ahead(self) -> None:
        while self._next_arrays and len(self._ahead) <= self._prefetch:
            array = self._next_arrays[-1]
            spec, nbytes = array.spec, max(1, array.spec.nbytes)
            pool = self._pool = self._pool or self._make_pool()
            buffer = pool.try_acquire(nbytes) if self._ahead else pool.acquire(nbytes)
            if buffer is None:
                return
            self._next_arrays.pop()
            data = buffer.bytes[: spec.nbytes].view(numpy_dtype(spec.dtype))
            ticket = self._read(spec.name, out=shaped(data, spec.shape, array.is_torch))
            self._ahead.append((spec.name, buffer, ticket))

    def _hand_out(self) -> tuple[str, Any]:
        name, buffer, ticket = self._ahead.pop(0)
        self._current = name, buffer, ticket.wait()
        return name, self._current[2]

    def _retire(self) -> None:
        """Store the array that the loop is done with."""
        if self._current is None:
            return
        (name, buffer, value), self._current = self._current, None
        if self._mode == "read":
            buffer.release()
        else:
            self._writes.add(self._write(name, value)).when_done(buffer.release)

    def _make_pool(self) -> Pool:
        """Return memory for the arrays in use, read ahead, and being stored, within the budget."""
        sizes = sorted((round_up(max(1, array.spec.nbytes), PAGE_BYTES) for array in self._next_arrays), reverse=True)
        wanted, free = sum(sizes[: self._prefetch + 2]), self._shards.budget.free_bytes
        return self._shards.make_pool(
            wanted if free is None else max(sizes[0], min(wanted, free // PAGE_BYTES * PAGE_BYTES))
        )

    def close(self) -> None:
        """End the pass: store the current value, and wait for pending operations; a second call does nothing.

        Raises the error of a failed change; so does `flush`, since an exited loop does not see this one.
        """
        self._closed = True
        with self._lock:
            self._next_arrays.clear()
            self._retire()
            for _, buffer, ticket in self._ahead:
                ticket.wait_for_end()
                buffer.release()
            self._ahead.clear()
            errors = [error for ticket in self._writes.all() if (error := ticket.error()) is not None]
            self._writes = Unreported()
            if self._pool is not None:
                self._shards.drop_pool(self._pool)
                self._pool = None
        if errors:
            raise errors[0]


class _AsyncPass:
    """The iterator of `async for`: a loop that is left stores its value before any later request."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def __aiter__(self) -> AsyncIterator[tuple[str, Any]]:
        return self

    def __anext__(self) -> Coroutine[Any, Any, tuple[str, Any]]:
        return self._values._anext()

    def __del__(self) -> None:
        self._values._leave()
