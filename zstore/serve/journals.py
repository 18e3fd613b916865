"""The journals of a run, read as far as they go and then on from there: its state, saves, warnings, curves and memory.

Journals of one folder are sessions of one run: the newest one counts for its state, and for steps that several have.

[Note: samples of steps]
A long run has more steps than a curve has points: of its steps, and of its metrics, every n-th line is kept, and the newest
ones; n doubles whenever more than wanted are kept. Most of these lines are never decoded.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..checkpoint.folder import Folder
from ..errors import ZstoreError
from ..journal import Record, decode_lines, journals, number, steps
from . import models

M = TypeVar("M", bound=BaseModel)

_BLOCK_BYTES = 16 * 1024 * 1024
_MOST_SESSIONS, _MOST_SAVES, _MOST_EVENTS, _MOST_NAMES = 20, 200, 100, 64
_LEAST_HEARTBEAT_S, _HEARTBEAT_STEPS = 60.0, 10
_LATE_S = 5.0
"""How much later than a journal's first line its process may seem to have begun."""


def _made(model: type[M], lines: Iterable[Any]) -> list[M]:
    """Return what lines say; those that are not what a journal has are left out."""
    found = []
    for line in lines:
        try:
            found.append(model.model_validate(line))
        except ValidationError:
            continue
    return found


def _list(line: Mapping[str, Any], key: str) -> list[Any]:
    value = line.get(key)
    return value if isinstance(value, list) else []


def _is_alive(session: models.Session) -> bool:
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


class _Sample:
    """The lines that are kept of one kind. See [Note: samples of steps]."""

    def __init__(self, most: int) -> None:
        self._most, self._num_newest, self._every, self._count = most, most // 4, 1, 0
        self._kept: list[tuple[int, bytes]] = []

    def add(self, line: bytes) -> None:
        if self._most:
            self._kept.append((self._count, line))
        self._count += 1
        every = self._every if len(self._kept) > self._most else 0
        while every and len(self._kept) > 3 * self._most // 4:
            older, newest = self._kept[: -self._num_newest], self._kept[-self._num_newest :]
            self._kept = [each for each in older if each[0] % every == 0] + newest
            self._every, every = every, every * 2

    def records(self) -> list[Record]:
        return decode_lines(b"\n".join(line for _, line in self._kept))


class _Journal:
    """One journal, as far as it was read."""

    def __init__(self, folder: Folder, name: str, most_steps: int) -> None:
        self._folder, self._name = folder, name
        self.offset = 0
        """Bytes that were read."""
        self.samples = {kind: _Sample(most_steps) for kind in (b"step", b"metrics")}
        self.last_step: Record = {}
        self.last_at = 0.0
        self.num_sessions = 0
        self._processes: deque[Record] = deque(maxlen=2 * _MOST_SESSIONS)
        """Starts and ends."""
        self.saves: deque[Record] = deque(maxlen=2 * _MOST_SAVES)
        self.warnings: deque[Record] = deque(maxlen=_MOST_EVENTS)
        self.not_finite: deque[Record] = deque(maxlen=_MOST_EVENTS)
        self.plan: Record = {}

    def read_on(self, size: int) -> None:
        """Read the new whole lines of the file of `size` bytes."""
        last_step = b""
        while self.offset < size:
            data = self._folder.read_range(self._name, self.offset, min(size, self.offset + _BLOCK_BYTES))
            end = data.rfind(b"\n") + 1 or (len(data) if len(data) == _BLOCK_BYTES else 0)
            if not end:
                break
            self.offset += end
            for line in data[:end].split(b"\n"):
                kind = line[9:17].partition(b'"')[0] if line.startswith(b'{"kind":"') else b""
                last_step = line if kind == b"step" else last_step
                if kind in self.samples:
                    self.samples[kind].add(line)
                if kind not in self.samples or b'"not_finite":{' in line:
                    self._take(line)
        for self.last_step in decode_lines(last_step):
            self.last_at = max(self.last_at, number(self.last_step.get("at")) or 0.0)

    def _take(self, line: bytes) -> None:
        for record in decode_lines(line):
            self.last_at = max(self.last_at, number(record.get("at")) or 0.0)
            kind = record["kind"]
            if kind in ("start", "end"):
                self._processes.append(record)
                self.num_sessions += kind == "start"
            elif kind == "plan":
                self.plan = record
            elif kind in ("save", "warning"):
                (self.saves if kind == "save" else self.warnings).append(record)
            if isinstance(names := record.get("not_finite"), dict):
                self.not_finite.append(record | {"not_finite": dict(itertools.islice(names.items(), _MOST_NAMES))})

    @property
    def end(self) -> Record:
        """That of the last session; empty if it did not end."""
        return self._processes[-1] if self._processes and self._processes[-1]["kind"] == "end" else {}

    @property
    def sessions(self) -> list[models.Session]:
        """The processes that wrote it."""
        found: list[models.Session] = []
        for line in self._processes:
            if line["kind"] == "start":
                found += _made(models.Session, [line])
            elif found:
                found[-1] = found[-1].model_copy(update={"ended_at": number(line.get("at"))})
        return found

    @property
    def state(self) -> models.State:
        """The state of the run."""
        if not (sessions := self.sessions):
            return "unknown"
        if self.end:
            return "failed" if self.end.get("reason") == "failed" else "done"
        if sessions[-1].host == socket.gethostname() and sessions[-1].pid > 0:
            return "training" if _is_alive(sessions[-1]) else "killed"
        patience_s = max(_LEAST_HEARTBEAT_S, _HEARTBEAT_STEPS * (number(self.last_step.get("step_s")) or 0.0))
        return "training" if time.time() - self.last_at < patience_s else "lost"


class RunJournals:
    """The journals in a run's folder. Usable from any thread; calls block on the file system."""

    def __init__(self, folder: Folder, most_steps: int = 2000) -> None:
        """`most_steps`: a multiple of 4; 0: none is kept but the last."""
        self._folder, self._most_steps = folder, most_steps
        self._journals: dict[str, _Journal] = {}
        self._num_replaced = 0
        """Rises whenever another file took a journal's name, so that no sum with the number of sessions comes twice."""
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def _read(self) -> Iterator[list[_Journal]]:
        """Read the new lines; yield the journals, the one whose last line is the newest at the end, with the lock."""
        with self._lock:
            before, self._journals = self._journals, {}
            try:
                for name in journals(self._folder):
                    size, journal = self._folder.size(name), before.get(name)
                    if journal is None or size < journal.offset:
                        self._num_replaced += 0 if journal is None else journal.num_sessions + 1
                        journal = _Journal(self._folder, name, self._most_steps)
                    journal.read_on(size)
                    self._journals[name] = journal
            except (OSError, ZstoreError):  # removed meanwhile
                pass
            yield sorted(self._journals.values(), key=lambda journal: journal.last_at)

    def summary(self, name: str, location: str) -> models.RunSummary:
        """Return what the newest journal says in short."""
        with self._read() as found:
            if not found:
                return models.RunSummary(name=name, location=location, state="unknown")
            journal, last, problem = found[-1], found[-1].last_step, found[-1].end.get("problem")
            session = next(reversed(journal.sessions), None)
            save = next(reversed(_made(models.SaveEvent, journal.saves)), None)
            wrong = next(reversed(_made(models.NotFinite, journal.not_finite)), None)
            step = number(last.get("step"))
            return models.RunSummary(
                name=name,
                location=location,
                state=journal.state,
                error=problem if isinstance(problem, str) else None,
                not_finite_step=wrong.step if wrong else None,
                failed_save=f"step {save.step}: {save.problem}" if save and save.state == "failed" else None,
                run_id=session.run_id if session else None,
                step=int(step) if step is not None else session.first_step if session else None,
                total_steps=session.total_steps if session else None,
                loss=number(last.get("loss")),
                tokens_per_s=number(last.get("tokens_per_s")),
                updated_at=journal.last_at or None,
            )

    def detail(self, summary: models.RunSummary) -> models.RunDetail:
        """Return the run with its newest sessions, saves and warnings."""
        with self._read() as found:
            saves = {(save.step, save.tag): save for one in found for save in _made(models.SaveEvent, one.saves)}
            sessions = [session for one in found for session in one.sessions]
            warnings = [warned for one in found for warned in _made(models.Warned, one.warnings)]
            not_finite = [wrong for one in found for wrong in _made(models.NotFinite, one.not_finite)]
        return models.RunDetail(
            summary=summary,
            sessions=sorted(sessions, key=lambda one: one.started_at)[-_MOST_SESSIONS:],
            saves=sorted(saves.values(), key=lambda one: one.at)[-_MOST_SAVES:],
            warnings=sorted(warnings, key=lambda one: one.at)[-_MOST_EVENTS:],
            not_finite=sorted(not_finite, key=lambda one: one.at)[-_MOST_EVENTS:],
        )

    def steps(self, after: int, points: int) -> models.Steps:
        """Return the steps after one, as at most `points` rows."""
        with self._read() as found:
            epoch = self._num_replaced + sum(journal.num_sessions for journal in found)
            records = [record for one in found for sample in one.samples.values() for record in sample.records()]
        columns = steps(
            sorted(records, key=lambda record: tuple(number(record.get(key)) or 0.0 for key in ("at", "step")))
        )
        chosen = [place for place, step in enumerate(columns["step"]) if (step or 0) > after]
        if len(chosen) > points:  # the last one is the newest
            chosen = [chosen[-1 - place * len(chosen) // points] for place in reversed(range(points))]
        shown = {name: [column[place] for place in chosen] for name, column in columns.items()}
        return models.Steps(columns=shown, epoch=epoch)

    def placement(self) -> models.Placement:
        """Return the tiers of a run's bytes, by the plan of its newest journal."""
        with self._read() as found:
            plan = found[-1].plan if found else {}
        keys = ("name", "tier", "kind", "nbytes")
        arrays = [dict(zip(keys, row, strict=False)) for row in _list(plan, "arrays") if isinstance(row, list)]
        budgets = (number(plan.get(key)) for key in ("host_budget_bytes", "device_bytes"))
        host, device = (None if nbytes is None else int(nbytes) for nbytes in budgets)
        return models.Placement(
            host_budget_bytes=host,
            device_bytes=device,
            parts=_made(models.PlanPart, _list(plan, "parts")),
            arrays=_made(models.PlacedArray, arrays),
        )
