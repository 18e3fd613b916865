"""Runs in short, for their list: the first and last lines of the newest journal, and the newest checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from ...checkpoint.folder import Folder
from ...checkpoint.marks import RunMarks, read_marks
from ...checkpoint.names import MARKS_FILE
from ...errors import ZstoreError
from ...journal.names import run_of
from ..cache import Cache
from ..files.visible import VisibleCheckpoints, file_state
from ..models import Newest, RunSummary, Session
from ..runs import Run
from .journals import arrival, journals_in, last_session, read_some
from .journalview import JournalView, has_heartbeat
from .steptable import StepTable
from .timeline import checkpoint_of

_MOST_CACHED = 4096


class RunSummaries:
    """Makes summaries of runs, of parts that are cached until the journal grows or checkpoints come or go. Usable from any
    thread; calls block on the file system."""

    def __init__(self, checkpoints: VisibleCheckpoints) -> None:
        self._checkpoints = checkpoints
        self._journals: Cache[str, tuple[tuple[str, int, int], JournalView, str]] = Cache(_MOST_CACHED)
        self._marks: Cache[str, tuple[object, RunMarks]] = Cache(_MOST_CACHED)
        self._sessions: Cache[str, tuple[int, Session | None]] = Cache(_MOST_CACHED)

    def of(self, run: Run) -> RunSummary:
        """Return a run in short."""
        newest, info, num_checkpoints, problem, marks = None, None, 0, None, RunMarks()
        try:
            num_checkpoints, info = self._checkpoints.newest(run.folder)
            marks = self._marks_of(run.folder)
        except (ZstoreError, OSError) as error:
            problem = str(error)
        if info is not None:
            place, at = checkpoint_of(info, run.folder), info.record.committed_ns / 1e9
            newest = Newest(checkpoint=place, tag=info.tag, step=info.record.step, committed_at=at)
        journal, settings = self._journal(run.folder)
        last = {name: None if math.isnan(value) else value for name, value in journal.table.last.items()}
        times = [journal.last_at or None, newest.committed_at if newest else None]
        return RunSummary(
            name=run.name,
            location=run.folder.location,
            state=journal.state,
            error=journal.error,
            not_finite_step=journal.not_finite[-1].step if journal.not_finite else None,
            failed_save=journal.failed_save,
            run_id=journal.sessions[-1].run_id if journal.sessions else None,
            step=journal.step,
            total_steps=journal.total_steps,
            loss=last.get("loss"),
            tokens_per_s=last.get("tokens_per_s"),
            updated_at=max((at for at in times if at is not None), default=None),
            num_checkpoints=num_checkpoints,
            newest=newest,
            problem=problem,
            tags=marks.tags,
            group=marks.group,
            note=marks.note,
            settings=settings,
        )

    def _marks_of(self, folder: Folder) -> RunMarks:
        if (state := file_state(folder, MARKS_FILE)) is None:
            return RunMarks()
        cached = self._marks.get(folder.location)
        if cached is None or cached[0] != state:
            cached = self._marks.put(folder.location, (state, read_marks(folder).run))
        return cached[1]

    def _journal(self, folder: Folder) -> tuple[JournalView, str]:
        """Return what the first and last lines of the newest journal in a folder say, with the last step alone, and its
        settings as text."""
        found = journals_in(folder)
        if not found:
            return JournalView(""), ""
        name = max(found, key=lambda name: found[name].written_ns)
        key = (name, found[name].nbytes, found[name].written_ns)
        cached = self._journals.get(folder.location)
        if cached is not None and cached[0] == key:
            return cached[1:]
        made = JournalView(run_of(name) or name)
        read_some(folder, name, made, found[name].nbytes, samples=1)
        made.arrived_at = arrival(folder, found[name], made.last_at, is_new=cached is None)
        last, made.table = made.table.last, StepTable()
        is_unsure = not made.is_whole and made.state in ("killed", "lost")
        if is_unsure and has_heartbeat(made.arrived_at, last.get("step_s", 0.0)):
            # A later process may have begun between the first and last lines.
            place = f"{folder.location}/{name}"
            scanned, session = self._sessions.get(place) or (0, None)
            scanned, later = last_session(folder, name, min(scanned, found[name].nbytes), found[name].nbytes)
            if (session := later or session) is not None:
                made.sessions = [session]
            self._sessions.put(place, (scanned, session))
        if last:
            made.table.add(last)
        settings = "\n".join(_lines_of(made.sessions[-1].config if made.sessions else {}))
        return self._journals.put(folder.location, (key, made, settings))[1:]


def _lines_of(value: Any, path: str = "") -> Iterator[str]:
    """Yield the values in a JSON object as `path.to.key=value`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _lines_of(inner, f"{path}.{key}" if path else key)
    else:
        yield f"{path}={value if isinstance(value, str) else json.dumps(value)}"
