"""Summaries of journals, from their first and last lines only, for the list of runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ...checkpoint.folder import Folder
from ...journal.columns import number
from ...journal.lines import decode_lines
from ..cache import Cache
from ..models import Session
from .columns import row_of
from .history import State, count_of, not_finite_of, seconds_of, session_of, state_of, text_of
from .journals import arrival, journals_in, read_part

_END_BYTES = 64 * 1024
_MOST_CACHED = 4096


@dataclass(frozen=True, kw_only=True)
class JournalSummary:
    """The content of the first and the last lines of a run's newest journal."""

    run_id: str | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    step_s: float = float("nan")
    last_at: float | None = None
    arrived_at: float = 0.0
    reason: str | None = None
    error: str | None = None
    not_finite_step: int | None = None
    session: Session | None = None

    @property
    def state(self) -> State:
        """The state of the run."""
        return state_of(self.session, self.reason, self.arrived_at, self.step_s)


class JournalSummaries:
    """Cached summaries, each made again when its journal grows. Usable from any thread; calls block on the file system."""

    def __init__(self) -> None:
        self._cache: Cache[str, tuple[tuple[str, int, int], JournalSummary]] = Cache(_MOST_CACHED)

    def of(self, folder: Folder) -> JournalSummary:
        """Return the summary of the newest journal in a folder."""
        found = journals_in(folder)
        if not found:
            return JournalSummary()
        name = max(found, key=lambda name: found[name].written_ns)
        key = (name, found[name].nbytes, found[name].written_ns)
        cached = self._cache.get(folder.location)
        if cached is not None and cached[0] == key:
            return cached[1]
        made = _summarize(folder, name, found[name].nbytes)
        made = replace(made, arrived_at=arrival(folder, found[name], made.last_at or 0.0, is_new=cached is None))
        return self._cache.put(folder.location, (key, made))[1]


def _summarize(folder: Folder, name: str, nbytes: int) -> JournalSummary:
    head = read_part(folder, name, 0, min(nbytes, _END_BYTES)).rpartition(b"\n")[0]
    tail = b""
    if nbytes > _END_BYTES:
        first = max(_END_BYTES, nbytes - _END_BYTES)
        tail = read_part(folder, name, first, nbytes).partition(b"\n")[2].rpartition(b"\n")[0]
    session, total_steps, step, row, last_at = None, None, None, {}, None
    end: dict[str, Any] = {}
    not_finite_step = None
    for line in [*decode_lines(head), *decode_lines(tail)]:
        last_at = seconds_of(line, "at") or last_at
        not_finite_step = found.step if (found := not_finite_of(line)) is not None else not_finite_step
        match line.get("kind"):
            case "start":
                session, end, total_steps = session_of(line), {}, count_of(line, "total_steps")
                step = count_of(line, "step")
            case "step":
                step, row = count_of(line, "step"), row_of(line)
            case "end" if session is not None:
                session, end = session.model_copy(update={"ended_at": last_at}), line
    if session is not None and tail and session.ended_at is not None and not _ends(tail):
        # A later process began between the two parts.
        session, end = session.model_copy(update={"ended_at": None}), {}
    known = {key: None if math.isnan(value) else value for key, value in row.items()}
    return JournalSummary(
        run_id=None if session is None else session.run_id,
        step=step,
        total_steps=total_steps,
        loss=known.get("loss"),
        tokens_per_s=known.get("tokens_per_s"),
        step_s=number(row.get("step_s")),
        last_at=last_at,
        reason=text_of(end, "reason"),
        error=text_of(end, "problem") or None,
        not_finite_step=not_finite_step,
        session=session,
    )


def _ends(tail: bytes) -> bool:
    kinds = [text_of(line, "kind") for line in decode_lines(tail)]
    return "end" in kinds and "start" not in kinds[kinds.index("end") :]
