"""A save that runs behind training, in a thread of its own."""

from __future__ import annotations

import threading
from typing import Protocol

from ..errors import CheckpointError
from .request import SaveSummary


class SaveJob(Protocol):
    """What a handle carries out."""

    @property
    def title(self) -> str:
        """What it is, for messages, as "the save of ckpt/step-00000001"."""

    def run(self) -> SaveSummary:
        """Carry it out; called once, by the handle's thread."""

    def cancel(self) -> None:
        """Let `run` raise soon."""


class SaveHandle:
    """A save under way. A clean exit of the interpreter completes it."""

    def __init__(self, job: SaveJob) -> None:
        self._job = job
        self._summary: SaveSummary | None = None
        self._error: BaseException | None = None
        self.stall_s = 0.0
        """Seconds that training stood still for the save, where an engine took it."""
        # Waited for, not the thread: where Ctrl-C interrupts a join, Python 3.11 forgets that the thread runs.
        self._ended = threading.Event()
        # Not a daemon: the interpreter waits for it at its end.
        threading.Thread(target=self._run, name="zstore-save", daemon=False).start()

    def _run(self) -> None:
        try:
            self._summary = self._job.run()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def wait(self, timeout_s: float | None = None) -> SaveSummary:
        """Return once the checkpoint is committed; raises what went wrong, on every rank, or TimeoutError."""
        if not self.wait_for_end(timeout_s):
            raise TimeoutError(f"{self._job.title} is not done after {timeout_s} s")
        if self._error is not None:
            raise self._error
        if self._summary is None:
            raise CheckpointError(f"{self._job.title} ended without a result")
        return self._summary

    def wait_for_end(self, timeout_s: float | None = None) -> bool:
        """Wait until the save ended, well or badly; return whether it did."""
        return self._ended.wait(timeout_s)

    def done(self) -> bool:
        """Tell whether the save ended, well or badly."""
        return self._ended.is_set()

    def cancel(self) -> None:
        """Give the save up at the next shard, as when another rank could not begin it; `wait()` then raises."""
        self._job.cancel()
