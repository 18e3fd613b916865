"""Arrays that are read ahead, within the budget, until somebody gets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ..format.arrays import Array
from ..io.buffers import Budget
from ..io.queue import Ticket


@dataclass(frozen=True)
class _Coming:
    ticket: Ticket[Array]
    free: Callable[[], None]
    """Count its memory as free, or as the caller's."""


class Ahead:
    """Whole arrays in memory that `budget` counts, or on their way there. For one thread at a time."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._coming: dict[str, _Coming] = {}

    def begin(self, wanted: Mapping[str, int], read: Callable[[str], Ticket[Array]]) -> list[Ticket[Array]]:
        """Begin to read arrays of so many bytes that are not read ahead already; return the tickets of all.

        Raises BudgetError if there is no room for all of them: then none is read.
        """
        new = {name: nbytes for name, nbytes in wanted.items() if name not in self._coming}
        self._budget.require(sum(new.values()), "what is read ahead")
        for name, nbytes in new.items():
            self._budget.take(nbytes)
            self._coming[name] = _Coming(read(name), partial(self._budget.release, nbytes))
        return [self._coming[name].ticket for name in wanted]

    def take(self, name: str) -> Ticket[Array] | None:
        """Return the elements of an array that was read ahead, the caller's from now on; None if it was not."""
        found = self._coming.pop(name, None)
        if found is None:
            return None
        found.ticket.when_done(found.free)
        return found.ticket
