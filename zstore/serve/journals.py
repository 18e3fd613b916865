"""The journals of a run, read incrementally: its state, saves, curves and memory.

Journals of one folder are sessions of one run: the newest one counts for its state, and for steps that several have.

[Note: samples of steps]
A long run has more steps than a curve has points: of its steps, and of its metrics, every n-th line is kept, and the newest
ones; n doubles whenever too many are kept. Most of these lines are never decoded.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..checkpoint.folder import Folder
from ..errors import ZstoreError
from ..journal import Record, decode_lines, journals, number, steps
from . import models

M = TypeVar("M", bound=BaseModel)

_BLOCK_BYTES = 16 * 1024 * 1024
_TAIL_BYTES = 16 * 1024
_MAX_SESSIONS, _MAX_SAVES, _MAX_EVENTS = 20, 200, 100
_MAX_NAMES = 64
"""Key of the non-finite numbers in a line."""
_MIN_HEARTBEAT_S, _HEARTBEAT_STEPS = 60.0, 10
_MAX_START_DELAY_S = 5.0
"""How much later than a journal's first line its process may seem to have started."""


def _validated(model: type[M], lines: Iterable[Mapping[str, Any]]) -> list[M]:
    """Return the content of lines; lines that cannot belong to a journal are left out."""
    found = []
    for line in lines:
        with contextlib.suppress(ValidationError):
            found.append(model.model_validate(line))
    return found


def _time_of(record: Mapping[str, Any]) -> float:
    return number(record.get("at")) or 0.0


def _is_alive(session: models.Session) -> bool:
    """Return whether the process of a session on this machine is running."""
    try:
        with open(f"/proc/{session.pid}/stat", encoding="ascii", errors="replace") as file:
            status, *fields = file.read().rpartition(")")[2].split()
        with open("/proc/uptime", encoding="ascii") as file:
            up_s = float(file.read().split()[0])
        process_started_at = time.time() - up_s + int(fields[18]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return False
    # A zombie counts as ended; another process may have the number by now.
    return status not in "ZX" and process_started_at < session.started_at + _MAX_START_DELAY_S


class _Sample:
    """The kept lines of one kind. See [Note: samples of steps]."""

    def __init__(self, max_lines: int) -> None:
        self._max_lines, self._num_newest = max_lines, max(1, max_lines // 4)
        self._older: list[bytes] = []
        self._every, self._num_older = 1, 0
        self.newest: deque[bytes] = deque()

    def add(self, line: bytes) -> None:
        self.newest.append(line)
        if len(self.newest) > self._num_newest:
            older = self.newest.popleft()
            if self._max_lines and self._num_older % self._every == 0:
                self._older.append(older)
            self._num_older += 1
        if len(self._older) > self._max_lines:
            self._older, self._every = self._older[::2], 2 * self._every

    def records(self) -> list[Record]:
        return decode_lines(b"\n".join([*self._older, *self.newest]))


class RunJournals:
    """The journals in a run's folder. Usable from any thread; calls block on the file system."""

    def __init__(self, folder: Folder, max_steps: int = 2000) -> None:
        """`max_steps`: approximate maximum number of steps kept for curves; 0: only the last step is known."""
        self._folder, self._max_steps = folder, max_steps
        self._epoch = 0
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._done: dict[str, int] = {}
        """Bytes read of each journal."""
        self._samples = {kind: _Sample(self._max_steps) for kind in (b"step", b"metrics")}
        self._last_step: Record = {}
        self._last_at = 0.0
        self._memory: Record = {}
        self._processes: deque[Record] = deque(maxlen=2 * _MAX_SESSIONS)
        """Lines `start` and `end`."""
        self._saves: deque[Record] = deque(maxlen=_MAX_SAVES)
        self._not_finite: deque[Record] = deque(maxlen=_MAX_EVENTS)

    @contextlib.contextmanager
    def _read(self) -> Iterator[None]:
        """Read the new whole lines; the caller then has the lock."""
        with self._lock:
            with contextlib.suppress(OSError, ZstoreError):  # removed in the meantime
                sizes = {name: self._folder.size(name) for name in journals(self._folder)}
                if any(sizes.get(name, 0) < done for name, done in self._done.items()):  # another file has the name
                    self._epoch += 1
                    self._reset()
                new = {name: self._newest_at(name, size) for name, size in sizes.items() if name not in self._done}
                self._done |= dict.fromkeys(sorted(new, key=lambda name: new[name]), 0)
                for name in self._done:
                    self._read_on(name, sizes.get(name, 0))
            newest = self._samples[b"step"].newest
            for self._last_step in decode_lines(newest[-1]) if newest else ():
                self._last_at = max(self._last_at, _time_of(self._last_step))
            yield

    def _newest_at(self, name: str, size: int) -> float:
        """Return the time of a journal's last lines."""
        return max(
            map(_time_of, decode_lines(self._folder.read_range(name, max(0, size - _TAIL_BYTES), size))), default=0.0
        )

    def _read_on(self, name: str, size: int) -> None:
        while (done := self._done[name]) < size:
            data = self._folder.read_range(name, done, min(size, done + _BLOCK_BYTES))
            end = data.rfind(b"\n") + 1 or (len(data) if len(data) == _BLOCK_BYTES else 0)
            if not end:
                break
            self._done[name] = done + end
            for line in data[:end].split(b"\n"):
                kind = line[9:17].partition(b'"')[0] if line.startswith(b'{"kind":"') else b""
                if kind in self._samples:
                    self._samples[kind].add(line)
                if kind not in self._samples or b'"not_finite":{' in line:
                    self._add(line)

    def _add(self, line: bytes) -> None:
        for record in decode_lines(line):
            self._last_at = max(self._last_at, _time_of(record))
            kind = record["kind"]
            self._epoch += kind == "start"
            if kind in ("start", "end"):
                self._processes.append(record)
            elif kind == "save":
                self._saves.append(record)
            elif kind == "memory":
                self._memory = record
            if isinstance(names := record.get("not_finite"), dict):
                self._not_finite.append(record | {"not_finite": dict(islice(names.items(), _MAX_NAMES))})

    def _sessions(self) -> tuple[list[models.Session], Record]:
        """Return the processes that wrote the journals, and the end of the last one; that is empty if it did not end."""
        found: list[models.Session] = []
        end: Record = {}
        for line in self._processes:
            end = line if line["kind"] == "end" else {}
            if not end:
                found += _validated(models.Session, [line])
            elif found:
                found[-1] = found[-1].model_copy(update={"ended_at": number(line.get("at"))})
        return found, end

    def _state(self, session: models.Session | None, end: Record) -> models.State:
        if session is None:
            return "unknown"
        if end:
            return "failed" if end.get("reason") == "failed" else "done"
        if session.host == socket.gethostname() and session.pid > 0:
            return "training" if _is_alive(session) else "killed"
        patience_s = max(_MIN_HEARTBEAT_S, _HEARTBEAT_STEPS * (number(self._last_step.get("step_s")) or 0.0))
        return "training" if time.time() - self._last_at < patience_s else "lost"

    def summary(self, name: str, location: str) -> models.RunSummary:
        """Return a summary of the journals."""
        with self._read():
            sessions, end = self._sessions()
            session = sessions[-1] if sessions else None
            saves, wrong = _validated(models.SaveEvent, self._saves), _validated(models.NotFinite, self._not_finite)
            failed = saves[-1] if saves and saves[-1].state == "failed" else None
            last, problem = self._last_step, end.get("problem")
            step = number(last.get("step"))
            return models.RunSummary(
                name=name,
                location=location,
                state=self._state(session, end),
                error=problem if isinstance(problem, str) else None,
                not_finite_step=wrong[-1].step if wrong else None,
                failed_save=f"step {failed.step}: {failed.problem}" if failed else None,
                run_id=session.run_id if session else None,
                step=int(step) if step is not None else session.first_step if session else None,
                total_steps=session.total_steps if session else None,
                loss=number(last.get("loss")),
                tokens_per_s=number(last.get("tokens_per_s")),
                updated_at=self._last_at or None,
            )

    def detail(self, summary: models.RunSummary) -> models.RunDetail:
        """Return the run with its newest sessions, saves and numbers that are not finite."""
        with self._read():
            return models.RunDetail(
                summary=summary,
                sessions=self._sessions()[0][-_MAX_SESSIONS:],
                saves=_validated(models.SaveEvent, self._saves),
                not_finite=_validated(models.NotFinite, self._not_finite),
            )

    def steps(self, after: int, points: int) -> models.Steps:
        """Return the steps after one, as at most `points` rows."""
        with self._read():
            epoch, records = self._epoch, [one for sample in self._samples.values() for one in sample.records()]
        columns = steps(sorted(records, key=lambda one: (_time_of(one), number(one.get("step")) or 0.0)))
        chosen = [place for place, step in enumerate(columns["step"]) if (step or 0) > after]
        if len(chosen) > points:  # the last one is the newest
            chosen = [chosen[-1 - place * len(chosen) // points] for place in reversed(range(points))]
        shown = {name: [column[place] for place in chosen] for name, column in columns.items()}
        return models.Steps(columns=shown, epoch=epoch)

    def placement(self) -> models.Placement:
        """Return the tiers of a run's bytes, as its last process found them."""
        with self._read():
            memory = self._memory
        keys, rows = ("name", "tier", "kind", "nbytes"), memory.get("arrays")
        rows = [row for row in rows if isinstance(row, list)] if isinstance(rows, list) else []
        arrays = [dict(zip(keys, row, strict=False)) for row in rows]
        host, device = (number(memory.get(key)) for key in ("host_budget_bytes", "device_bytes"))
        return models.Placement(
            host_budget_bytes=None if host is None else int(host),
            device_bytes=None if device is None else int(device),
            arrays=_validated(models.PlacedArray, arrays),
        )
