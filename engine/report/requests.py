"""Requests of people to a run: found by rank 0, carried out by all ranks after the same step.

[Note: carrying out a request]
Rank 0 looks for the file before an update, and what it finds travels with what the ranks tell each other in the update, as a
signal does (see [Note: stopping by a signal]). So after that step all ranks know of it, at the cost of one `stat` a step.
A loop that saves and stops in its own way takes requests with `Engine.take_requests`; else the engine saves by itself, and
stops where signals are watched.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from zstore.journal.names import request_file
from zstore.journal.requests import Request, read_request
from zstore.ranks.world import World

from .journal import RunJournal

_log = logging.getLogger("zstore")

Taker = Callable[[str], str | None]
"""Takes an action, "save" or "stop", on every rank after the same step; returns why it is refused, else None."""


class Requests:
    """The requests to one run. See [Note: carrying out a request]."""

    def __init__(self, world: World, journal: RunJournal) -> None:
        self._world = world
        self._journal = journal
        self._path = ""
        """Where a request would be, once the journal is open."""
        self.taker: Taker | None = None
        """The loop's; None: the engine carries requests out."""

    def look(self) -> None:
        """Look for a request, before the update of a step; on other ranks than 0 do nothing."""
        journal = self._journal
        if journal.open_at is None:
            return
        folder, run_id = journal.open_at
        path = os.path.join(folder, request_file(run_id))
        if path != self._path:
            self._path = path
            self._forget_old(journal.started_at)
        if os.path.exists(path) and (found := self._read()) is not None:
            self._world.asks = json.dumps([found.action, found.id])

    def _read(self) -> Request | None:
        """Return the request that is there, and remove its file."""
        try:
            found = read_request(Path(self._path))
            os.unlink(self._path)
        except OSError as error:
            _log.warning("a request to the run cannot be read or removed: %s", error)
            return None
        if found is None:
            _log.warning("%s was no request, and is removed", self._path)
        return found

    def _forget_old(self, started_at: float) -> None:
        with contextlib.suppress(OSError):
            found = read_request(Path(self._path))
            if found is None or found.at < started_at:
                os.unlink(self._path)

    @property
    def is_due(self) -> bool:
        """Whether a request is to be carried out now: the same on every rank after each step."""
        return bool(self._world.heard)

    def carry_out(self, usual: Taker) -> None:
        """Have the request that is due carried out, by the loop or as `usual`, and write that down (all ranks)."""
        action, request_id = json.loads(self._world.heard)
        self._world.heard = self._world.asks = ""
        problem = (self.taker or usual)(action)
        self._journal.acted(action, request_id, problem)
        if problem is not None and self._world.rank == 0:
            _log.warning("a request to %s was refused: %s", action, problem)
