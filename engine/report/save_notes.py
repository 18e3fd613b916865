"""A journal's notes of one save."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from zstore.checkpoint import SaveSummary
from zstore.journal.writer import JournalWriter


class SaveNotes:
    """The progress of one save, reported from any thread."""

    def __init__(self, writer: JournalWriter, base: Mapping[str, Any], when_uploaded: Callable[[], None]) -> None:
        self._writer = writer
        self._base = base
        self._when_uploaded = when_uploaded
        self._has_failed = False
        self._began = time.perf_counter()
        self.stall_s: float | None = None
        """Seconds for which the save delayed training; set when they are known."""

    def add(self, **values: Any) -> None:
        """Record a state of the save."""
        self._writer.append({**self._base, "at": time.time(), **values})

    def __call__(self, outcome: SaveSummary | BaseException) -> None:
        """Record the result, or the error; see `SaveRequest.told`."""
        if isinstance(outcome, BaseException):
            if not self._has_failed:
                self._has_failed = True
                self.add(state="failed", problem=f"{type(outcome).__name__}: {outcome}")
            return
        done = {
            # Often known only once the save was committed, when the line is written.
            "stall_s": self._stall_s,
            "elapsed_s": outcome.elapsed_s,
            "linked_bytes": outcome.all_linked_bytes,
            "written_bytes": outcome.all_written_bytes,
        }
        if outcome.url is None:
            self.add(state="committed", **done)
            return
        self.add(state="uploaded", **done | {"location": outcome.url, "uploaded_bytes": outcome.all_uploaded_bytes})
        self._when_uploaded()

    def _stall_s(self) -> float:
        """Return for how long training was delayed; so far, if it still is."""
        return time.perf_counter() - self._began if self.stall_s is None else self.stall_s
