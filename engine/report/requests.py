"""Requests of people to a run: found by rank 0, carried out by all ranks after the same step.

[Note: carrying out a request]
On rank 0 somebody watches for requests, in a thread of its own. A request travels with the ranks' messages in the next
update, as a signal does (see [Note: stopping by a signal]), so that after that step all ranks know of it, and a step costs
nothing more. A loop that saves and stops in its own way takes requests with `Engine.take_requests`; else the engine saves
by itself, and stops if signals are watched.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from zstore.journal.requests import Request
from zstore.ranks.world import World

_log = logging.getLogger("zstore")

Taker = Callable[[str], str | None]
"""Takes an action, "save" or "stop", on every rank after the same step; returns why it is refused, else None."""


class Finder(Protocol):
    """Finds requests, in a thread of its own."""

    found: deque[Request]
    """The last one, until it is taken."""


def _nothing(action: str, request_id: str, problem: str | None) -> None:
    """Nobody is told."""


class Requests:
    """The requests to one run. See [Note: carrying out a request]."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.finder: Finder | None = None
        """Finds requests, on rank 0, if somebody watches for them."""
        self._acted: Callable[[str, str, str | None], None] = _nothing
        self.taker: Taker | None = None
        """The loop's; None: the engine carries requests out."""

    def watch(self, finder: Finder, acted: Callable[[str, str, str | None], None]) -> None:
        """Take requests from `finder` (rank 0); `acted` is told action and id of each, and why it was refused, else None."""
        self.finder, self._acted = finder, acted

    def tell(self) -> None:
        """Let all ranks know of the request that was found, with the next update (rank 0)."""
        if self.finder is not None and self.finder.found:
            found = self.finder.found.pop()
            self._world.asks = json.dumps([found.action, found.id])

    def carry_out(self, usual: Taker) -> None:
        """Carry out the request that all ranks heard of (`World.heard`), by the loop or as `usual`, and record that (all
        ranks)."""
        action, request_id = json.loads(self._world.heard)
        self._world.heard = self._world.asks = ""
        problem = (self.taker or usual)(action)
        self._acted(action, request_id, problem)
        if problem is not None and self._world.rank == 0:
            _log.warning("a request to %s was refused: %s", action, problem)
