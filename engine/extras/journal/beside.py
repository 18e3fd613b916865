"""Beside the training thread: warnings, failures, and the progress of saves."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zstore.checkpoint import SaveHandle, SaveSummary
from zstore.journal.writer import JournalWriter

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
