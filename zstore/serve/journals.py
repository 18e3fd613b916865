"""The journals of a run, read as far as they go and then on from there: its state, saves, warnings, curves and memory.

Journals of one folder are sessions of one run: the newest one counts for its state, and for steps that several have.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from ..checkpoint.folder import Folder
from ..errors import ZstoreError
from ..journal.columns import number, steps
from ..journal.lines import Record
from ..journal.names import pid_namespace, run_of
from ..journal.reader import Follower, journals
from .models import (
    NotFinite,
    PlacedArray,
    Placement,
    PlanPart,
    RunDetail,
    RunSummary,
    SaveEvent,
    Session,
    State,
    Steps,
    Tier,
    Warned,
)

M = TypeVar("M", bound=BaseModel)

_MOST_SESSIONS, _MOST_SAVES, _MOST_EVENTS, _MOST_NAMES = 20, 200, 100, 64
_LEAST_HEARTBEAT_S, _HEARTBEAT_STEPS = 60.0, 10
_LATE_S = 5.0
"""How much later than a journal's first line its process may seem to have begun."""


def _made(model: type[M], line: Mapping[str, Any]) -> M | None:
    """Return what a line says; None if it is not what a journal has."""
    try:
        return model.model_validate(line)
    except ValidationError:
        return None


def _finite(value: Any) -> float | None:
    found = number(value)
    return None if math.isnan(found) else found


def _whole(value: Any) -> int | None:
    found = _finite(value)
    return None if found is None else int(found)


def _is_alive(session: Session) -> bool:
    """Return whether the process of a session, one of this machine, runs."""
    try:
        with open(f"/proc/{session.pid}/stat", encoding="ascii", errors="replace") as file:
            status, *fields = file.read().rpartition(")")[2].split()
        with open("/proc/uptime", encoding="ascii") as file:
            up_s = float(file.read().split()[0])
        begun_at = time.time() - up_s + int(fields[18]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return False
    # One that ended is there until its parent asks how; another process may have its number.
    return status not in "ZX" and begun_at < session.started_at + _LATE_S


@dataclass
class _Journal:
    """One journal, as far as it was read."""

    follower: Follower
    run_id: str
    sessions: list[Session] = field(default_factory=list)
    num_sessions: int = 0
    saves: dict[tuple[int, str], SaveEvent] = field(default_factory=dict)
    """The last state of each, by step and tag."""
    warnings: list[Warned] = field(default_factory=list)
    not_finite: list[NotFinite] = field(default_factory=list)
    plan: Record = field(default_factory=dict)
    end: Record | None = None
    """Of the last session, if it ended."""
    last_at: float = 0.0
    arrived_at: float = 0.0
    """When its last line came, by the clock here."""

    def take(self, line: Record) -> None:
        """Take a line in."""
        self.last_at = max(self.last_at, _finite(line.get("at")) or 0.0)
        if "not_finite" in line and (found := _made(NotFinite, line)) is not None:
            values = dict(itertools.islice(found.values.items(), _MOST_NAMES))
            self.not_finite = [*self.not_finite[1 - _MOST_EVENTS :], found.model_copy(update={"values": values})]
        match line["kind"]:
            case "start" if (session := _made(Session, line)) is not None:
                self.sessions = [*self.sessions[1 - _MOST_SESSIONS :], session]
                self.num_sessions += 1
                self.end = None
            case "end" if self.sessions:
                self.sessions[-1] = self.sessions[-1].model_copy(update={"ended_at": _finite(line.get("at"))})
                self.end = line
            case "plan":
                self.plan = line
            case "save" if (save := _made(SaveEvent, line)) is not None:
                self.saves.pop((save.step, save.tag), None)
                self.saves[save.step, save.tag] = save
                if len(self.saves) > _MOST_SAVES:
                    del self.saves[next(iter(self.saves))]
            case "warning" if (warned := _made(Warned, line)) is not None:
                self.warnings = [*self.warnings[1 - _MOST_EVENTS :], warned]
            case _:
                pass

    @property
    def state(self) -> State:
        """The state of the run."""
        if not self.sessions:
            return "unknown"
        session = self.sessions[-1]
        if self.end is not None:
            return "failed" if self.end.get("reason") == "failed" else "done"
        same = session.pid_namespace in ("", pid_namespace())
        if same and session.host == socket.gethostname() and session.pid > 0:
            return "training" if _is_alive(session) else "killed"
        step_s = _finite(self.follower.steps.last.get("step_s")) or 0.0
        recent = abs(time.time() - self.arrived_at) < max(_LEAST_HEARTBEAT_S, _HEARTBEAT_STEPS * step_s)
        return "training" if recent else "lost"


class RunJournals:
    """The journals in a run's folder. Usable from any thread; calls block on the file system."""

    def __init__(self, folder: Folder, most_steps: int = 2000) -> None:
        self._folder, self._most_steps = folder, most_steps
        self._journals: dict[str, _Journal] = {}
        self._num_replaced = 0
        """Rises whenever another file took a journal's name, so that no sum with the number of sessions comes twice."""
        self._lock = threading.RLock()

    def _refresh(self) -> list[_Journal]:
        """Read the new lines; return the journals, the one that began first at the head."""
        try:
            names = journals(self._folder)
        except (OSError, ZstoreError):
            names = []
        self._journals = {name: journal for name, journal in self._journals.items() if name in names}
        for name in names:
            journal = self._journals.get(name)
            if journal is None:
                journal = _Journal(Follower(self._folder, name, self._most_steps), run_of(name) or name)
            try:
                self._journals[name] = self._read_on(name, journal)
            except (OSError, ZstoreError):  # removed meanwhile
                self._journals.pop(name, None)
        found = self._journals.values()
        return sorted(found, key=lambda one: one.sessions[0].started_at if one.sessions else one.last_at)

    def _read_on(self, name: str, journal: _Journal) -> _Journal:
        before = journal.follower.offset
        lines, is_other = journal.follower.read_on()
        if is_other:
            self._num_replaced += journal.num_sessions + 1
            journal, before = _Journal(journal.follower, journal.run_id), 0
        for line in lines:
            journal.take(line)
        journal.last_at = max(journal.last_at, _finite(journal.follower.steps.last.get("at")) or 0.0)
        if self._folder.is_local:
            journal.arrived_at = os.stat(self._folder.path / name).st_mtime
        elif journal.follower.offset > before:
            journal.arrived_at = time.time() if before else journal.last_at
        return journal

    def _current(self) -> _Journal | None:
        return max(self._refresh(), key=lambda journal: journal.last_at, default=None)

    def summary(self, name: str, location: str) -> RunSummary:
        """Return what the newest journal says in short."""
        with self._lock:
            journal = self._current()
            if journal is None:
                return RunSummary(name=name, location=location, state="unknown")
            last, end = journal.follower.steps.last, journal.end or {}
            session = journal.sessions[-1] if journal.sessions else None
            save = next(reversed(journal.saves.values()), None)
            tokens, step_s = _finite(last.get("tokens")), _finite(last.get("step_s"))
            step = _whole(last.get("step"))
            problem = end.get("problem")
            return RunSummary(
                name=name,
                location=location,
                state=journal.state,
                error=problem if isinstance(problem, str) else None,
                not_finite_step=journal.not_finite[-1].step if journal.not_finite else None,
                failed_save=f"step {save.step}: {save.problem}" if save and save.state == "failed" else None,
                run_id=session.run_id if session else journal.run_id,
                step=step if step is not None or session is None else session.first_step,
                total_steps=session.total_steps if session else None,
                loss=_finite(last.get("loss")),
                tokens_per_s=tokens / step_s if tokens is not None and step_s else None,
                updated_at=journal.last_at or None,
            )

    def detail(self, summary: RunSummary) -> RunDetail:
        """Return the run with its newest sessions, saves and warnings."""
        with self._lock:
            found = self._refresh()
            saves = (save for journal in found for save in journal.saves.values())
            sessions = (session for journal in found for session in journal.sessions)
            warnings = (warned for journal in found for warned in journal.warnings)
            not_finite = (one for journal in found for one in journal.not_finite)
            return RunDetail(
                summary=summary,
                sessions=sorted(sessions, key=lambda one: one.started_at)[-_MOST_SESSIONS:],
                saves=sorted(saves, key=lambda one: one.at)[-_MOST_SAVES:],
                warnings=sorted(warnings, key=lambda one: one.at)[-_MOST_EVENTS:],
                not_finite=sorted(not_finite, key=lambda one: one.at)[-_MOST_EVENTS:],
            )

    def steps(self, after: int | None, until: int | None, points: int) -> Steps:
        """Return the steps after one and up to another, as at most `points` rows."""
        with self._lock:
            found = self._refresh()
            epoch = self._num_replaced + sum(journal.num_sessions for journal in found)
            records: list[Record] = []
            for journal in found:
                follower = journal.follower
                found_here = follower.steps.records() + follower.metrics.records()
                # Sorting is stable: numbers of a step come behind it.
                records += sorted(
                    found_here, key=lambda line: (_finite(line.get("at")) or 0.0, _finite(line.get("step")) or 0.0)
                )
        columns = steps(records)
        columns["tokens_seen"] = _summed(columns["step"], columns.pop("tokens"))
        del columns["samples"]
        numbers = columns["step"]
        chosen = [
            place
            for place, step in enumerate(numbers)
            if step is not None and (after is None or step > after) and (until is None or step <= until)
        ]
        if len(chosen) > points:  # the last one is the newest
            chosen = [chosen[-1 - place * len(chosen) // points] for place in reversed(range(points))]
        last = next((int(step) for step in reversed(numbers) if step is not None), None)
        shown = {name: [_finite(column[place]) for place in chosen] for name, column in columns.items()}
        return Steps(columns=shown, last_step=last, epoch=epoch)

    def placement(self) -> Placement:
        """Return the tiers of a run's bytes: by the plan of its newest journal, and the memory of its last step."""
        with self._lock:
            journal = self._current()
            plan = {} if journal is None else journal.plan
            records = [] if journal is None else journal.follower.steps.records()
        memory: Record = next(
            (line["memory"] for line in reversed(records) if isinstance(line.get("memory"), dict)), {}
        )
        parts = [part for each in _list(plan, "parts") if (part := _made(PlanPart, each)) is not None]
        for tier in get_args(Tier):
            # The measured bytes of a step are not told apart by kind.
            measured = _whole(memory.get(tier))
            if measured and all(part.measured_bytes is None for part in parts if part.tier == tier):
                parts.append(PlanPart(tier=tier, kind="all", planned_bytes=None, measured_bytes=measured))
        keys = ("name", "tier", "kind", "nbytes")
        rows = (dict(zip(keys, row, strict=False)) for row in _list(plan, "arrays") if isinstance(row, list))
        return Placement(
            host_budget_bytes=_whole(plan.get("host_budget_bytes")),
            device_bytes=_whole(plan.get("device_bytes")),
            parts=parts,
            arrays=[array for row in rows if (array := _made(PlacedArray, row)) is not None],
        )


def _summed(numbers: Sequence[float | None], tokens: Sequence[float | None]) -> list[float | None]:
    """Return the tokens up to each step; those of steps that are left out are taken to be as many."""
    found, seen, before = list[float | None](), 0.0, None
    for step, own in zip(numbers, tokens, strict=True):
        if own is None or step is None:
            found.append(None)
            continue
        seen += own * (1.0 if before is None else max(1.0, step - before))
        before = step
        found.append(seen)
    return found


def _list(line: Mapping[str, Any], key: str) -> list[Any]:
    value = line.get(key)
    return value if isinstance(value, list) else []
