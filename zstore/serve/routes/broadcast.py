"""Live events of a run: its files are polled once for all listeners, and each gets the events that are new to it.

[Note: cursors]
The state of a listener is told by counts of the journal's lines, which any process of the service finds alike, and by marks of
other changes. An event's id is the cursor after it: a listener that comes back with it gets all that it missed. Nothing waits
for a listener in memory: a slow one gets, once it is ready, the steps since then as fewer rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import anyio.to_thread
from pydantic import BaseModel

from ...errors import ZstoreError
from ..models import CheckpointsChanged, Ended, Steps, json_of
from ..runs import Run
from ..service import Service
from ..views.journalview import JournalView
from ..views.run import run_detail

_log = logging.getLogger(__name__)

POLL_S, _REMOTE_POLL_S = 0.5, 10.0
_POLLS_PER_LISTING = 4
"""The list of checkpoints is read once in this many polls of the journal."""
_MOST_ROWS = 200
_FIRST_ROWS = 64
"""Steps that a new listener gets: those that came since it asked for all."""
_CURSOR = re.compile(r"([A-Za-z0-9_.-]*)~(\d{1,12})~(\d{1,12})~(\d{1,12})~([0-9a-f]{1,16})~([0-9a-f]{1,16})")


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """The events that a listener has seen. See [Note: cursors]."""

    journal: str = ""
    lines: int = 0
    saves: int = 0
    warnings: int = 0
    run: str = "0"
    """Mark of the sessions and the state of the run."""
    listing: str = "0"
    """Mark of the list of checkpoints."""
    jobs: int = 0
    """Version of the jobs, of this process only."""

    @property
    def text(self) -> str:
        """The cursor as an event's id."""
        return f"{self.journal}~{self.lines}~{self.saves}~{self.warnings}~{self.run}~{self.listing}"

    def is_ahead_of(self, seen: Cursor) -> bool:
        """Return whether something of it was not seen. More may have been seen than the last poll found."""
        mine, theirs = ((one.lines, one.saves, one.warnings, one.jobs) for one in (self, seen))
        marks = (self.journal, self.run, self.listing) != (seen.journal, seen.run, seen.listing)
        return marks or any(a > b for a, b in zip(mine, theirs, strict=True))

    @classmethod
    def parse(cls, text: str) -> Cursor | None:
        """Return the cursor of an event's id, None for any other text."""
        found = _CURSOR.fullmatch(text)
        if found is None:
            return None
        journal, lines, saves, warnings, run, listing = found.groups()
        counts = {"lines": int(lines), "saves": int(saves), "warnings": int(warnings)}
        return cls(journal=journal, run=run, listing=listing, **counts)


@dataclass(frozen=True)
class News:
    """Events, each a name and JSON, and the cursor after them."""

    events: tuple[tuple[str, str], ...]
    cursor: Cursor


class Broadcast:
    """Polls one run while there are listeners. Its methods belong to the event loop."""

    def __init__(self, service: Service, run: Run) -> None:
        self._service = service
        self._run = run
        self._listeners = 0
        self._polling: asyncio.Task[None] | None = None
        self._now: Cursor | None = None
        self._polled = asyncio.Event()
        self._num_polls = 0
        self._told: dict[tuple[Cursor, Cursor], News] = {}

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Poll for the length of a `with` block."""
        self._listeners += 1
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll_forever())
        try:
            yield
        finally:
            self._listeners -= 1
            if not self._listeners:
                polling, self._polling, self._now = self._polling, None, None
                polling.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await polling

    async def now(self) -> Cursor:
        """Return the cursor of the last poll."""
        while self._now is None:
            await self._polled.wait()
        return self._now

    async def changed(self, seen: Cursor, timeout_s: float) -> bool:
        """Wait until there is something that was not seen; false if nothing came in that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    if self._now is not None and self._now.is_ahead_of(seen):
                        return True
                    await self._polled.wait()
        return False

    async def news(self, seen: Cursor) -> News:
        """Return the news since `seen`."""
        now = await self.now()
        found = self._told.get((seen, now))
        if found is None:
            found = await anyio.to_thread.run_sync(self._tell, seen, now)
            self._told = {key: value for key, value in self._told.items() if key[1] == now} | {(seen, now): found}
        return found

    async def _poll_forever(self) -> None:
        pause_s = POLL_S if self._run.folder.is_local else _REMOTE_POLL_S
        was_logged = False
        while True:
            try:
                found = await anyio.to_thread.run_sync(self._poll)
            except (ZstoreError, OSError):  # the folder is gone, and may come back
                found = self._now or Cursor()
            except Exception:  # a bug: without an answer listeners would wait forever, and nobody would see why
                if not was_logged:
                    _log.exception("reading the run %r failed", self._run.name)
                    was_logged = True
                found = self._now or Cursor()
            if found != self._now:
                self._now = found
                polled, self._polled = self._polled, asyncio.Event()
                polled.set()
            await asyncio.sleep(pause_s)

    def _poll(self) -> Cursor:
        """Read the files; in a thread."""
        listing = self._now.listing if self._now is not None else "0"
        if self._num_polls % _POLLS_PER_LISTING == 0:
            listing = self._service.timeline(self._run).mark()
        self._num_polls += 1
        history = self._service.history(self._run)
        history.refresh()
        cursor = Cursor(listing=listing, jobs=self._service.jobs.version)
        with history.lock:
            view = history.current
            if view is None:
                return cursor
            return replace(
                cursor,
                journal=view.key,
                lines=view.table.num_lines,
                saves=view.num_saves,
                warnings=view.num_warnings,
                run=view.mark,
            )

    def _tell(self, seen: Cursor, now: Cursor) -> News:
        """Return the news; in a thread."""
        if seen.journal != now.journal:
            seen = replace(seen, journal=now.journal, lines=max(0, now.lines - _FIRST_ROWS), saves=0, warnings=0)
        events: list[tuple[str, BaseModel]] = []
        history = self._service.history(self._run)
        with history.lock:
            view = history.current
            if view is not None and view.key == now.journal:
                # Events since the poll are sent with it.
                now = replace(now, lines=view.table.num_lines, saves=view.num_saves, warnings=view.num_warnings)
                events += _of_journal(view, seen)
        if (seen.run, seen.saves, seen.warnings) != (now.run, now.saves, now.warnings):
            detail = run_detail(self._service, self._run)
            events.append(("run", detail))
            if seen.run != now.run and detail.summary.state not in ("training", "unknown"):
                reason = None if view is None else view.end_reason
                events.append(("end", Ended(step=detail.summary.step, reason=reason)))
        if seen.listing != now.listing:
            listed = self._service.timeline(self._run).listed()
            events.append(("checkpoints", CheckpointsChanged(num_checkpoints=len(listed))))
        events += [("job", job) for job in self._service.jobs.changed(self._run.name, seen.jobs)]
        return News(tuple((name, json_of(model)) for name, model in events), now)


def _of_journal(view: JournalView, seen: Cursor) -> list[tuple[str, BaseModel]]:
    events: list[tuple[str, BaseModel]] = []
    columns = view.table.columns(points=_MOST_ROWS, after_line=seen.lines)
    if columns["step"]:
        last = columns["step"][-1]
        steps = Steps(columns=columns, last_step=None if last is None else int(last), is_whole=view.is_whole)
        events.append(("steps", steps))
    events += [("save", save) for number, save in view.saves.values() if number > seen.saves]
    events += [("warning", warned) for number, warned in view.warnings if number > seen.warnings]
    return events


def first_cursor(now: Cursor) -> Cursor:
    """Return the first cursor of a new listener: a few steps before `now`, since it asked for the others a moment ago."""
    return replace(now, lines=max(0, now.lines - _FIRST_ROWS))
