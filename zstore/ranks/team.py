"""The processes that do one piece of work together, each a part of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .world import World


class Team:
    """The ranks that share the work; without a `World` this process alone, for which no torch is imported.

    A call marked (all ranks) is a collective: all ranks call it, in the same order.
    """

    def __init__(self, world: World | None = None) -> None:
        self._world = world
        self.rank: int = 0 if world is None else world.rank
        """This process, from 0."""
        self.world_size: int = 1 if world is None else world.world_size
        """Number of processes."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's `value` (JSON data) in rank order (all ranks)."""
        return [value] if self._world is None else self._world.all_gather_object(value)

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's `value` (JSON data) on every rank (all ranks)."""
        return value if self._world is None else self._world.broadcast_object(value)

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Raise on every rank if the block raised on any (all ranks). See [Note: one error for all]."""
        if self._world is None:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            if self._world.watch is not None and self._world.watch.broken:
                raise  # nobody is there to agree with
            error = raised
        self._world.raise_together(error)

    def check(self) -> None:
        """Raise RankError if another rank is known to be lost, so that nobody works on for nothing."""
        if self._world is not None:
            self._world.require_others()


ALONE = Team()
"""This process and no other."""
