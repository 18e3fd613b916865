"""Requests of people to a run: found by rank 0, carried out by all ranks after the same step.

[Note: carrying out a request]
On rank 0 the journal's thread looks for the file twice a second. A request travels with the ranks' messages in the next
update, as a signal does (see [Note: stopping by a signal]), so that after that step all ranks know of it, and a step costs
nothing more. A loop that saves and stops in its own way takes requests with `Engine.take_requests`; else the engine saves
by itself, and stops if signals are watched.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import weakref
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
        self.finder = _Finder(journal) if journal.enabled else None
        """Finds requests, on rank 0 of a run that has a journal."""
        self.taker: Taker | None = None
        """The loop's; None: the engine carries requests out."""

    def tell(self) -> None:
        """Let all ranks know of the request that was found, with the next update (rank 0)."""
        if self.finder is not None and self.finder.found is not None:
            found, self.finder.found = self.finder.found, None
            self._world.asks = json.dumps([found.action, found.id])

    def carry_out(self, usual: Taker) -> None:
        """Carry out the request that all ranks heard of (`World.heard`), by the loop or as `usual`, and record that (all
        ranks)."""
        action, request_id = json.loads(self._world.heard)
        self._world.heard = self._world.asks = ""
        problem = (self.taker or usual)(action)
        self._journal.acted(action, request_id, problem)
        if problem is not None and self._world.rank == 0:
            _log.warning("a request to %s was refused: %s", action, problem)


class _Finder:
    """Finds requests, in the journal's thread (rank 0). Knows nothing of the engine, which may end before the thread."""

    def __init__(self, journal: RunJournal) -> None:
        self._journal, self._started_at = weakref.ref(journal), journal.started_at
        self._path = ""
        self._last_id = ""
        self._problem_said = False
        self.found: Request | None = None
        """The last one, until the engine takes it."""
        journal.writer.beside = self.look

    def look(self) -> None:
        """Take up the request that is there, if any."""
        journal = self._journal()
        open_at = None if journal is None else journal.open_at
        if open_at is None:
            return
        path = os.path.join(open_at[0], request_file(open_at[1]))
        if path != self._path:
            self._path = path
            self._forget_old()
        if os.path.exists(path):
            self._take_up()

    def _take_up(self) -> None:
        """Take up the request that is there, and remove its file; by the time that the file is gone it is `found`."""
        try:
            found = read_request(Path(self._path))
            if found is None:
                _log.warning("%s was no request, and is removed", self._path)
            elif found.id != self._last_id:  # of a file that cannot be removed
                self.found, self._last_id = found, found.id
            os.unlink(self._path)
            self._problem_said = False
        except OSError as error:
            if not self._problem_said:
                self._problem_said = True
                _log.warning("a request to the run cannot be read or removed: %s", error)

    def _forget_old(self) -> None:
        with contextlib.suppress(OSError):
            found = read_request(Path(self._path))
            if found is None or found.at < self._started_at:
                os.unlink(self._path)
