"""Operations behind the caller, in order for each array."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ..io.pool import Workers
from ..io.queue import Ticket

T = TypeVar("T")


class ArrayOrder:
    """Carries out operations on arrays, by threads of its own: those on one array one after the other, as they came."""

    def __init__(self, num_threads: int = 2) -> None:
        self._workers = Workers(num_threads, "zstore-store")
        self._pending: dict[str, Ticket[Any]] = {}
        """The last operation on each array."""
        self._failed: dict[str, BaseException] = {}
        """The error of the last change of an array: the ticket that has it may have been dropped."""
        self._lock = threading.Lock()

    def submit(self, name: str, operation: Callable[[], T], *, changes: bool) -> Ticket[T]:
        """Queue an operation on array `name`; return its ticket."""
        with self._lock:
            before = self._pending.get(name)

            def run() -> T:
                if before is not None:
                    before.error()
                try:
                    result = operation()
                except BaseException as error:
                    if changes:
                        self._failed[name] = error
                    raise
                if changes:
                    self._failed.pop(name, None)
                return result

            ticket = self._pending[name] = self._workers.submit(run)
        return ticket

    def settle(self, names: Iterable[str]) -> None:
        """Wait for all operations on `names`; errors stay with their tickets."""
        with self._lock:
            tickets = [ticket for name in names if (ticket := self._pending.pop(name, None)) is not None]
        for ticket in tickets:
            ticket.error()

    def raise_failed(self, names: Iterable[str]) -> None:
        """Raise the error of a change of `names` that failed, where no later one went well; once."""
        for error in [self._failed.pop(name) for name in names if name in self._failed]:
            raise error

    def forget(self, name: str) -> None:
        """Forget the error of an array that goes."""
        self._failed.pop(name, None)

    def close(self) -> None:
        """End the threads once all operations ended."""
        self._workers.close()
