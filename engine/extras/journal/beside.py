"""Beside the training thread: warnings, failures, the progress of saves, and requests, which are files beside the journal."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from zstore.checkpoint import SaveHandle, SaveSummary
from zstore.journal.names import request_file
from zstore.journal.requests import Request, read_request
from zstore.journal.writer import JournalWriter

from .file import RunFile

_log = logging.getLogger("zstore")


def number_of(value: Any) -> float | None:
    """Return a number of a loop's as a float: of a tensor of one element its value; None if it is none."""
    if isinstance(value, bool | str | bytes) or (isinstance(value, torch.Tensor) and value.numel() != 1):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def uncaught_error() -> BaseException | None:
    """Return the error that nobody caught, if the interpreter ends because of one."""
    found: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return None if threading.main_thread().is_alive() else found


def error_text(error: BaseException | None) -> str | None:
    """Return the first 2,000 characters of an error for people."""
    return None if error is None else f"{type(error).__name__}: {error}"[:2000]


class JournalFailure:
    """Says once that the journal cannot be written."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, text: str) -> None:
        """Warn of a failure, if it is the first."""
        if not self._said:
            self._said = True
            _log.warning("the run's journal cannot be written, and lines may be missing; training goes on: %s", text)


class Warnings(logging.Filter):
    """Sees the warnings of a logger on their way. Not a handler, with which nothing would be shown any more if nobody
    configured logging."""

    def __init__(self, writer: JournalWriter) -> None:
        super().__init__()
        self._writer = writer

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        if record.levelno >= logging.WARNING:
            self.note(record.getMessage(), record.created)
        return True

    def note(self, text: str, at: float) -> None:
        """Record a warning."""
        self._writer.append({"kind": "warning", "at": at, "text": text})


class SaveNotes:
    """The progress of one save, reported from any thread."""

    def __init__(
        self,
        writer: JournalWriter,
        base: Mapping[str, Any],
        when_begun: Callable[[], None],
        when_uploaded: Callable[[], None],
    ) -> None:
        self._writer = writer
        self._base = base
        self._when_begun, self._when_uploaded = when_begun, when_uploaded
        self._has_failed = False
        self._began = time.perf_counter()
        self._handle: SaveHandle | None = None
        self._add(state="begun")

    def _add(self, **values: Any) -> None:
        """Record a state of the save."""
        self._writer.append({**self._base, "at": time.time(), **values})

    def __call__(self, told: SaveHandle | SaveSummary | BaseException) -> None:
        """Record the result, or the error; see `Extra.save_begins`."""
        if isinstance(told, SaveHandle):
            self._handle = told
            self._when_begun()
            return
        if isinstance(told, BaseException):
            if not self._has_failed:
                self._has_failed = True
                self._add(state="failed", problem=f"{type(told).__name__}: {told}")
            return
        done = {
            # Often known only once the save was committed, when the line is written.
            "stall_s": self._stall_s,
            "elapsed_s": told.elapsed_s,
            "linked_bytes": told.all_linked_bytes,
            "written_bytes": told.all_written_bytes,
        }
        if told.url is None:
            self._add(state="committed", **done)
            return
        self._add(state="uploaded", **done | {"location": told.url, "uploaded_bytes": told.all_uploaded_bytes})
        self._when_uploaded()

    def _stall_s(self) -> float:
        """Return for how long training was delayed; so far, if it still is."""
        known_s = 0.0 if self._handle is None else self._handle.stall_s
        return known_s or time.perf_counter() - self._began


class RequestFinder:
    """Looks for requests twice a second, in the writer's thread of a journal (rank 0). Knows nothing of the engine, which may
    end before the thread. See [Note: carrying out a request] in `report.requests`."""

    def __init__(self, file: RunFile, started_at: float) -> None:
        self._file, self._started_at = file, started_at
        self._path = ""
        self._last_id = ""
        self._problem_said = False
        self.found: deque[Request] = deque(maxlen=1)
        """The last one, until the engine takes it."""
        file.writer.beside = self.look

    def look(self) -> None:
        """Take up the request that is there, if any."""
        opened = self._file.current
        if opened is None:
            return
        path = os.path.join(opened.run_folder, request_file(opened.run_id))
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
                self.found.append(found)
                self._last_id = found.id
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
