"""The content of a journal, a line after the other. See [Note: the journal] in `zstore.journal`.

Memory is bounded: of rows of steps by [Note: levels] in `steptable`, of everything else by keeping the newest.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...journal.columns import number
from ...journal.names import pid_namespace
from ..models import ActionEvent, NotFinite, SaveEvent, Session, Warned
from .columns import metrics_of, row_of
from .steptable import StepTable

LEAST_HEARTBEAT_S = 60.0
_HEARTBEAT_STEPS = 10
_MOST_SESSIONS = 100
_MOST_TEXT, _MOST_CONFIG_BYTES, _MOST_NAMES = 4096, 64 * 1024, 64
MOST_SAVES, MOST_WARNINGS, MOST_ACTIONS = 200, 100, 50
_LATE_S = 5.0
"""How much later than a journal's first line its process may seem to have begun."""

State = Literal["training", "done", "failed", "killed", "lost", "unknown"]


def text_of(line: Mapping[str, Any], key: str) -> str:
    """Return the beginning of a text of a journal, empty if it is not one."""
    value = line.get(key)
    return value[:_MOST_TEXT] if isinstance(value, str) else ""


def count_of(line: Mapping[str, Any], key: str) -> int | None:
    """Return a whole number of a journal, None if it is not one."""
    value = number(line.get(key))
    return None if math.isnan(value) else int(value)


def seconds_of(line: Mapping[str, Any], key: str) -> float | None:
    """Return a number of a journal, None if it is not one."""
    value = number(line.get(key))
    return None if math.isnan(value) else value


def _is_here(session: Session) -> bool:
    """Return whether the process of a session would be seen here."""
    same = session.pid_namespace in ("", pid_namespace())
    return same and session.host == socket.gethostname() and session.pid > 0


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


def state_of(session: Session | None, reason: str | None, arrived_at: float, step_s: float) -> State:
    """Return the state of a run, by its last session and the reason of its end, the time at which its last line arrived, by
    the clock here, and how long its steps take (or NaN)."""
    if session is None:
        return "unknown"
    if session.ended_at is not None:
        return "failed" if reason == "failed" else "done"
    if _is_here(session):
        return "training" if _is_alive(session) else "killed"
    return "training" if has_heartbeat(arrived_at, step_s) else "lost"


def has_heartbeat(arrived_at: float, step_s: float) -> bool:
    """Return whether a line that arrived at that time is recent, for steps that take so long (or NaN)."""
    most_s = max(LEAST_HEARTBEAT_S, _HEARTBEAT_STEPS * step_s if step_s > 0 else 0.0)
    return abs(time.time() - arrived_at) < most_s


def session_of(line: Mapping[str, Any]) -> Session:
    """Return the session that a line of kind `start` begins."""
    versions, config = line.get("versions"), line.get("config")
    if (nbytes := len(json.dumps(config))) > _MOST_CONFIG_BYTES:
        config = {"config": f"({nbytes} bytes of JSON, not shown: the journal has them)"}
    return Session(
        run_id=text_of(line, "run"),
        started_at=seconds_of(line, "at") or 0.0,
        ended_at=None,
        first_step=count_of(line, "step") or 0,
        loop=text_of(line, "loop"),
        world_size=count_of(line, "world_size") or 0,
        host=text_of(line, "host"),
        pid=count_of(line, "pid") or 0,
        pid_namespace=text_of(line, "pid_namespace"),
        versions=_texts(versions) if isinstance(versions, dict) else {},
        config=config if isinstance(config, dict) else {},
    )


def _save_of(line: Mapping[str, Any]) -> SaveEvent | None:
    state = line.get("state")
    if state not in ("begun", "committed", "uploaded", "failed"):
        return None
    return SaveEvent(
        at=seconds_of(line, "at") or 0.0,
        step=count_of(line, "step") or 0,
        tag=text_of(line, "tag"),
        state=state,
        stall_s=seconds_of(line, "stall_s"),
        elapsed_s=seconds_of(line, "elapsed_s"),
        linked_bytes=count_of(line, "linked_bytes"),
        written_bytes=count_of(line, "written_bytes"),
        done_bytes=count_of(line, "done_bytes"),
        problem=text_of(line, "problem") or None,
    )


def _action_of(line: Mapping[str, Any], step: int | None) -> ActionEvent | None:
    action = line.get("action")
    if action not in ("save", "stop"):
        return None
    return ActionEvent(
        at=seconds_of(line, "at") or 0.0,
        id=text_of(line, "id"),
        action=action,
        step=step,
        problem=text_of(line, "problem") or None,
    )


def not_finite_of(line: Mapping[str, Any]) -> NotFinite | None:
    """Return the numbers of a line that are NaN or infinite; None if there are none, or it is of no step."""
    found, step = line.get("not_finite"), count_of(line, "step")
    if not isinstance(found, dict) or not found or step is None or line.get("kind") not in ("step", "eval", "metrics"):
        return None
    return NotFinite(at=seconds_of(line, "at") or 0.0, step=step, values=_texts(found))


def _texts(found: Mapping[Any, Any]) -> dict[str, str]:
    return {str(name)[:200]: str(value)[:200] for name, value in itertools.islice(found.items(), _MOST_NAMES)}


@dataclass
class JournalView:
    """The content of one journal, of steps the rows of `table` alone. Not for several threads at once."""

    run_id: str
    offset: int = 0
    """Bytes that were read."""
    is_whole: bool = True
    """Whether all lines before `offset` were read, and not some of them."""
    arrived_at: float = 0.0
    """When its last line came, by the clock here."""
    sessions: list[Session] = field(default_factory=list)
    saves: dict[str, tuple[int, SaveEvent]] = field(default_factory=dict)
    """By step and tag the last state of each, and its number among all of the journal."""
    actions: list[ActionEvent] = field(default_factory=list)
    step: int | None = None
    """The last one."""
    warnings: list[tuple[int, Warned]] = field(default_factory=list)
    """With their numbers among all of the journal."""
    not_finite: list[NotFinite] = field(default_factory=list)
    num_saves: int = 0
    num_warnings: int = 0
    plan: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    total_steps: int | None = None
    end_reason: str | None = None
    error: str | None = None
    """That ended it, if it failed."""
    last_at: float = 0.0

    def __post_init__(self) -> None:
        self.table = StepTable()

    @property
    def key(self) -> str:
        """The journal for those who count its lines: of one that is not whole they are counted otherwise."""
        return self.run_id if self.is_whole else f"{self.run_id}.part"

    def take(self, line: dict[str, Any]) -> None:
        """Take a line in."""
        self.last_at = seconds_of(line, "at") or self.last_at
        if (found := not_finite_of(line)) is not None:
            self.not_finite = [*self.not_finite[1 - MOST_WARNINGS :], found]
        match line.get("kind"):
            case "step":
                self._take_step(line)
            case "eval" | "metrics":
                self.table.note(number(line.get("step")), metrics_of(line))
            case "start":
                self.sessions = [*self.sessions[1 - _MOST_SESSIONS :], session_of(line)]
                self.step, self.total_steps = count_of(line, "step"), count_of(line, "total_steps")
                self.end_reason = self.error = None
            case "end" if self.sessions:
                self.sessions[-1] = self.sessions[-1].model_copy(update={"ended_at": self.last_at})
                self.end_reason, self.error = text_of(line, "reason"), text_of(line, "problem") or None
            case "plan":
                self.plan = line
            case "save" if (save := _save_of(line)) is not None:
                self.num_saves += 1
                self.saves.pop(key := f"{save.step}/{save.tag}", None)
                self.saves[key] = self.num_saves, save
                if len(self.saves) > MOST_SAVES:
                    del self.saves[next(iter(self.saves))]
            case "action" if (action := _action_of(line, self.step)) is not None:
                self.actions = [*self.actions[1 - MOST_ACTIONS :], action]
            case "warning":
                self.num_warnings += 1
                warned = Warned(at=self.last_at, text=text_of(line, "text"))
                self.warnings = [*self.warnings[1 - MOST_WARNINGS :], (self.num_warnings, warned)]
            case _:
                pass

    def skip(self) -> None:
        """Pass over lines: whether the last process has ended is not known from here on."""
        self.is_whole = False
        if self.sessions:
            self.sessions[-1] = self.sessions[-1].model_copy(update={"ended_at": None})
        self.end_reason = self.error = None

    def _take_step(self, line: dict[str, Any]) -> None:
        self.step = count_of(line, "step")
        memory = line.get("memory")
        self.memory = memory if isinstance(memory, dict) else self.memory
        self.table.add(row_of(line))

    @property
    def mark(self) -> str:
        """Hexadecimal digits that change with the sessions, the state and the carried out requests of the run."""
        ended = self.sessions[-1].ended_at if self.sessions else None
        text = repr((len(self.sessions), ended, self.state, self.actions[-1:], self.not_finite[-1:]))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def failed_save(self) -> str | None:
        """Step and error of the last save, if it failed."""
        _, save = next(reversed(self.saves.values()), (0, None))
        return f"step {save.step}: {save.problem}" if save is not None and save.state == "failed" else None

    @property
    def state(self) -> State:
        """The state of the run."""
        session = self.sessions[-1] if self.sessions else None
        return state_of(session, self.end_reason, self.arrived_at, self.table.last.get("step_s", float("nan")))
