"""Operations behind the caller, in order for each array."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from ..io.pool import Workers
from ..io.queue import Ticket

T = TypeVar("T")

_NUM_OPERATIONS = 4
"""Operations on arrays under way at a time."""


class ArrayOrder:
    """Carries out operations on arrays in separate threads: those on one array one after the other, as they came."""

    def __init__(self) -> None:
        self._workers = Workers(_NUM_OPERATIONS, "zstore-store")
        self._here = threading.local()
        """`names`: of the arrays of the operation that this thread carries out, and that waits for no other of theirs."""
        self._pending: dict[str, tuple[int, Ticket[Any]]] = {}
        """The last operation on each array that has not ended, and its number: a ticket keeps its result."""
        self._numbers = itertools.count()
        self._failed: dict[str, BaseException] = {}
        """The error of the last change of an array, as its ticket may have been dropped."""
        self._lock = threading.RLock()
        """Without threads, at the end of the interpreter, an operation is carried out while it is queued."""

    def submit(self, name: str, operation: Callable[[], T], *, changes: bool) -> Ticket[T]:
        """Queue an operation on array `name`; return its ticket. If it reports the error of a change to anybody,
        `raise_failed` does not raise it again."""

        def run() -> T:
            try:
                result = operation()
            except BaseException as error:
                if changes:
                    self._failed[name] = error
                raise
            if changes:
                self._failed.pop(name, None)
            return result

        def mark_observed() -> None:
            with self._lock:
                if self._failed.get(name) is ticket.error():
                    self._failed.pop(name, None)

        ticket = self.submit_on([name], run)
        return Ticket(ticket.future, mark_observed) if changes else ticket

    def submit_on(self, names: Sequence[str], operation: Callable[[], T]) -> Ticket[T]:
        """Queue an operation on several arrays, which changes none; return its ticket."""
        with self._lock:
            before = [each[1] for name in names if (each := self._pending.get(name)) is not None]

            def run() -> T:
                for ticket in before:
                    ticket.error()
                before.clear()
                self._here.names = names
                try:
                    return operation()
                finally:
                    self._here.names = None

            number, ticket = next(self._numbers), self._workers.submit(run)
            self._pending.update(dict.fromkeys(names, (number, ticket)))
        # By its number: a callback and its ticket would keep each other alive.
        ticket.when_done(partial(self._end, names, number))
        return ticket

    def _end(self, names: Sequence[str], number: int) -> None:
        with self._lock:
            for name in names:
                if name in self._pending and self._pending[name][0] == number:
                    del self._pending[name]

    @property
    def is_here(self) -> bool:
        """Whether this thread carries out an operation."""
        return getattr(self._here, "names", None) is not None

    def names(self) -> list[str]:
        """Return the arrays with an operation under way, or one that failed and was not reported."""
        with self._lock:
            return list({*self._pending, *self._failed})

    def wait(self, names: Iterable[str]) -> None:
        """Wait for all operations on `names`, but for those on the arrays of the operation that this thread carries out; errors
        stay with their tickets."""
        own = getattr(self._here, "names", None) or ()
        with self._lock:
            others = [name for name in names if name not in own]
            # They stay pending: operations that are queued meanwhile wait for them too.
            pending = [each for name in others if (each := self._pending.get(name)) is not None]
        for _, ticket in pending:
            ticket.error()

    def raise_failed(self, names: Iterable[str]) -> None:
        """Raise the error of a change of `names` that failed, unless a later one succeeded; once."""
        for error in [self._failed.pop(name) for name in names if name in self._failed]:
            raise error

    def forget(self, name: str) -> None:
        """Forget the error of an array that is removed."""
        self._failed.pop(name, None)

    def close(self) -> None:
        """End the threads once all operations ended."""
        self._workers.close()
