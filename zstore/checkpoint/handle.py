"""A save that runs behind training, in a thread of its own."""

from __future__ import annotations

from functools import partial
from typing import Protocol, Self

from ..io.closing import Completions, run_to_the_end
from ..io.queue import Ticket, promise
from .request import SaveSummary

_completions = Completions()


class SaveJob(Protocol):
    """The work that a handle carries out."""

    @property
    def title(self) -> str:
        """Its name in messages, as "the save of ckpt/step-00000001"."""

    def run(self) -> SaveSummary:
        """Carry it out; called once, by the handle's thread."""

    def cancel(self) -> None:
        """Let `run` raise soon."""


class SaveHandle:
    """A save under way. The end of the program completes it, and exits non-zero if that fails and nobody waited."""

    def __init__(self, job: SaveJob) -> None:
        self._job = job
        self._cancelled = False
        self.stall_s = 0.0
        """Seconds that training was paused for the save, if an engine took it."""
        # Waited for, not the thread: when Ctrl-C interrupts a join, Python 3.11 forgets that the thread runs.
        self._ticket, self._carry_out = promise(self._run)
        self._completion = _completions.begin(job.title, self.wait_for_end)

    def start(self) -> Self:
        """Begin, and return this handle. If this raises, as on Ctrl-C, the save may be under way all the same: see `begun`."""
        try:
            run_to_the_end(self._carry_out, "zstore-save")
        except BaseException:
            if self._ticket.future.cancel():
                _completions.end(self._completion, None)
            raise
        return self

    @property
    def begun(self) -> bool:
        """Whether its thread has it, or will; false when `start` raised before that."""
        return not self._ticket.future.cancelled()

    def _run(self) -> SaveSummary:
        failed: BaseException | None = None
        try:
            return self._job.run()
        except BaseException as error:
            failed = error
            raise
        finally:
            _completions.end(self._completion, None if self._cancelled else failed)

    @property
    def ticket(self) -> Ticket[SaveSummary]:
        """The save as a ticket, that is awaited or waited for."""
        return Ticket(self._ticket.future, partial(_completions.heard, self._completion))

    def wait(self, timeout_s: float | None = None) -> SaveSummary:
        """Return once the checkpoint is committed; raises the save's error, on every rank, or TimeoutError."""
        if not self.wait_for_end(timeout_s):
            raise TimeoutError(f"{self._job.title} is not done after {timeout_s} s")
        return self.ticket.wait()

    def wait_for_end(self, timeout_s: float | None = None) -> bool:
        """Wait until the save ended, well or badly; return whether it did."""
        return self._ticket.wait_for_end(timeout_s)

    def done(self) -> bool:
        """Tell whether the save ended, well or badly."""
        return self._ticket.done()

    def cancel(self) -> None:
        """Give the save up at the next shard, for instance if another rank could not begin it; `wait()` then raises."""
        self._cancelled = True
        self._job.cancel()
