"""The updates of a run: when they begin, what waits for them, and whether the state is consistent.

[Note: step modes]
none      `step()` takes the norm and updates everything before it returns.
forward   `step()` takes the norm and fixes the step's settings: skipped or not, learning rates, step counts. Resident
          parameters, which code can read without a hook, are updated inside `step()`; all others in the background, in order,
          while the loop continues. Gathering a parameter waits for its update, in evaluation too. The next backward waits for
          the remaining updates, and so does every call that reads the state. A save pins each array once it is updated.
backward  An update in the last backward of a step changes each parameter once its gradient is final, until the end of
          that backward; `step()` continues with the remaining ones as in `forward`. It cannot be undone: clipping and loss
          scaling are not possible, and a gradient that is not finite leaves the state unusable until a checkpoint is loaded.
All modes are bit-identical: they run the same `Changes`, just at different times. An error is raised, with its step's number,
in every call that waits for the update, and the state is torn from then on. docs/design/0005-step.md lists all failures.

[Note: which state is consistent]
The state becomes torn (neither trained nor saved until a load replaces it) after an error inside `changing` (an update
in `step()`, a caller's write, a load) and after an error of an update in the background: on other ranks, once they have
agreed on its outcome. A backward that fails, or a `step()` that fails before its update, leaves the previous step's state,
unless an update was running in the backward: then it is torn if any rank changed anything, and always in `step()`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial

import torch
from torch import nn

from zstore.errors import UsageError
from zstore.io import Ticket, Workers
from zstore.io.closing import deferred_interrupts
from zstore.ranks.world import World

from ..params.record import OTHER_MODES, ParameterRecord, Residency
from ..runtime.device import StreamContext
from ..zero.fetch import Fetcher
from ..zero.gradients import Gradients
from .changes import Changes, UpdatePlan
from .kernel import StepSettings
from .rules import Stepper
from .state import OptimizerState
from .tickets import TORN, ReadGuard, Tickets

_log = logging.getLogger("zstore")

MIN_PENDING_BYTES = 32 * 1024 * 1024
"""Bytes of gradients that may always wait for an update in the backward, besides those of offloaded state."""
_MAX_PENDING_UNITS = 2
"""If it is more, this many times the largest unit's gradients may wait instead."""


class StepMode(Enum):
    """When the update runs. See [Note: step modes]."""

    NONE = "none"
    """In `step()`."""
    BACKWARD = "backward"
    """In the backward, as gradients arrive; what remains, in the background after `step()`."""
    FORWARD = "forward"
    """In the background after `step()`, before the next forward needs it."""


class UpdatePhase(Enum):
    """State of the update thread."""

    IDLE = "idle"
    """It runs no update."""
    IN_BACKWARD = "in backward"
    """It updates parameters whose gradients are final, until `step()` ends this phase."""
    IN_BACKGROUND = "in background"
    """It completes the last step, or has completed it; see `Update.agree` for how ranks learn the outcome."""


class Update:
    """A run's updates: at most one at a time, on a background thread, with one ticket per record.

    `fetcher` gathers parameters once their update is done. Safe to use from several threads.
    """

    def __init__(
        self,
        model: nn.Module,
        state: OptimizerState,
        gradients: Gradients,
        world: World,
        mode: StepMode,
        fetcher: Fetcher | None,
        stepper: Stepper | None,
    ) -> None:
        self.state, self.world, self.mode = state, world, mode
        self._gradients = gradients
        self.stepper = stepper
        """Takes the steps of an optimizer that needs whole tensors; None: steps are taken in tiles."""
        self.phase = UpdatePhase.IDLE
        self._is_agreed = True
        """Whether the ranks have exchanged the outcome of the last update in the background. They may do so at the end of
        the next backward, in any phase."""
        self._settings: StepSettings | None = None
        """Settings of the last update in a backward."""
        self.tickets = Tickets(state)
        self._is_inconsistent = False
        """Whether a block of `changing`, or an abandoned update, has modified only a part of the state."""
        self._fetcher = fetcher
        self._workers: Workers | None = None
        self._running: Ticket[None] | None = None
        self._prefetched: UpdatePlan | None = None
        """Plan of the update whose state is prefetched."""
        if fetcher is not None:
            fetcher.ready = self.tickets.wait_for
        tickets = lambda: self.tickets.by_record if self.is_in_backward else {}  # noqa: E731
        self.guard = ReadGuard(model, state.scalars, tickets) if self.runs_in_backward else None

    @property
    def runs_in_backward(self) -> bool:
        """Whether updates run in the backward."""
        return self.mode is StepMode.BACKWARD

    @property
    def is_in_backward(self) -> bool:
        """Whether an update started in a backward has not yet been completed by `step()`."""
        return self.phase is UpdatePhase.IN_BACKWARD

    @property
    def torn(self) -> bool:
        """Whether the state is inconsistent. See [Note: which state is consistent]."""
        # The error that ended an update in the backward is raised in step(), on every rank.
        return self._is_inconsistent or (self.tickets.error is not None and not self.is_in_backward)

    def require_consistent(self) -> None:
        """Raise UsageError if the state is torn, which must be neither trained nor saved."""
        if self.torn:
            raise UsageError(TORN) from self.tickets.error

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Mark the state inconsistent unless the block completes."""
        self._is_inconsistent = True
        yield
        self._is_inconsistent = False  # not after an error

    def split_by_mode(self) -> tuple[list[ParameterRecord], list[ParameterRecord]]:
        """Return the records with a gradient that are updated in `step()`, and those in the background: the same on all
        ranks, regardless of what a backward has updated."""
        records = self._gradients.with_gradient(self.state.scalars)

        def divide() -> tuple[list[ParameterRecord], list[ParameterRecord]]:
            # Packed arrays first: adjacent ones are transferred in one request.
            tier = self.state.store.tier
            records.sort(key=lambda r: not any(tier(name).is_packed(name) for name in self.state.all_arrays(r)))
            in_step = {r for r in records if self.mode is StepMode.NONE or r.residency is Residency.RESIDENT}
            return [r for r in records if r in in_step], [r for r in records if r not in in_step]

        return self.state.planned((Update, *records), divide)

    def _not_started(self, records: Iterable[ParameterRecord]) -> list[ParameterRecord]:
        """Return the `records` that no update in a backward has changed."""
        return [r for r in records if (ticket := self.tickets.by_record.get(r)) is None or not ticket.has_started]

    def read_ahead(self) -> None:
        """Start prefetching the state of the first records from disk, unless a backward has already updated some."""
        # Holds pool buffers: nothing may block on the pool until the update runs.
        now, later = self.split_by_mode() if self.stepper is None and not self.is_in_backward else ([], [])
        if now or later:
            self._prefetched = UpdatePlan.of(self.state, now or later, in_background=not now)
            self._prefetched.read_ahead(self.state.store)

    def drop_prefetched(self) -> None:
        """Free the buffers of prefetched state that was not used."""
        while self._prefetched is not None and self._prefetched.started:
            self._prefetched.started.pop().drop()
        self._prefetched = None

    def run(self, records: Sequence[ParameterRecord], settings: StepSettings) -> None:
        """Wait for an update in the backward, then update all other `records` synchronously.

        Raises UsageError if the settings differ from those with which the update in the backward began.
        """
        if self.is_in_backward:
            self.join()
            if self.tickets.error is not None:
                raise self.tickets.error
            for index, name, before, after in self._settings.differences(settings) if self._settings else ():
                raise UsageError(
                    f"parameter group {index}: {name} was {before!r} in the backward and is {after!r} at step(), but with "
                    '"step_overlap": "backward" the update runs in the backward: set it before engine.backward(), or '
                    + OTHER_MODES
                )
        updated = [ticket.record for ticket in self.tickets.by_record.values() if ticket.has_started]
        remaining = self._not_started(records)
        # The caller may have read parameters since their last read in the backward.
        changes = Changes(self.state, remaining, settings, self._gradients.take)
        if self.stepper is None:
            changes.run()
        else:
            self.stepper.run(changes)
        changes.note_scalars([*updated, *remaining])

    def start_async(self, records: Sequence[ParameterRecord], settings: StepSettings) -> None:
        """Start updating `records` in the background, except those that the backward has updated; takes ownership of their
        gradients now. `records` are the same on all ranks, which agree on the outcome later if there are any."""
        remaining = self._not_started(records)
        if self.is_in_backward:
            self.tickets.forget()  # `run` has joined its thread
        self.phase = UpdatePhase.IDLE
        if not records:
            return
        rows = dict(zip(remaining, self._gradients.take(remaining), strict=True))
        changes = Changes(self.state, remaining, settings, partial(map, rows.pop), in_background=True)
        changes.note_scalars(remaining)
        self._start(changes, UpdatePhase.IN_BACKGROUND)
        self._is_agreed = False

    def _start(self, changes: Changes, phase: UpdatePhase, max_pending_bytes: float = math.inf) -> None:
        self.join()
        if self.tickets.error is not None:
            raise self.tickets.error
        if self._workers is None:
            # A daemon thread: the interpreter would join any other at exit, although its backward may never come.
            self._workers = Workers(1, "zstore-update")
            # Start this thread's OpenMP team: once oversubscribed, idle OpenMP threads stop spinning on its cores.
            self._workers.submit(lambda: torch.ones(torch.get_num_threads() << 15).mul_(1.0))
        in_backward = phase is UpdatePhase.IN_BACKWARD
        work = partial(self._run, changes, self.state.transfers.streams.stream_context(), in_backward=in_backward)
        self.tickets.begin(changes.records, max_pending_bytes, in_backward=in_backward)
        self.phase = phase
        self._running = self._workers.submit(work)

    def _run(self, changes: Changes, context: StreamContext, *, in_backward: bool) -> None:
        error = None
        try:
            with context():
                changes.run(admit=self._admit if in_backward else None, done=self.tickets.mark_done)
        except BaseException as raised:
            raised.add_note(f"This happened in the update of step {changes.settings.step}, which was applied in part.")
            error = raised
        self.tickets.end(error, forget=not in_backward)

    def join(self) -> None:
        """Wait until the thread has finished its update. Ctrl-C interrupts only the wait: the next call waits again."""
        if self._running is not None:
            self._running.wait_for_end()
            self._running = None

    def wait(self) -> None:
        """Wait for any running update, except one in a backward; raise its error on every rank (all ranks)."""
        self.drain()
        self.agree()

    def drain(self) -> None:
        """Wait for an update in the background on this rank; with several ranks the caller calls `agree` next."""
        if self.phase is UpdatePhase.IN_BACKGROUND:
            self.join()
            if self.world.world_size == 1:
                self.agree()

    def agree(self) -> None:
        """Raise on every rank the error that ended the update in the background on any of them (all ranks)."""
        if self._is_agreed:
            return
        self._is_agreed, error = True, None  # an update in the backward only starts if the previous one succeeded here
        if self.phase is UpdatePhase.IN_BACKGROUND:
            self.phase, error = UpdatePhase.IDLE, self.tickets.error
        try:
            self.world.raise_on_all_ranks(error)
        except BaseException:
            self._is_inconsistent = True
            raise

    def forget(self) -> None:
        """Wait for the end of an update, and discard its outcome: a load replaces the state."""
        self.abandon()
        self.join()
        self.tickets.forget()
        self.phase, self._is_agreed = UpdatePhase.IDLE, True

    def close(self) -> None:
        """Stop the thread, and remove the hooks from the modules."""
        # First: an update that waits for a backward would never end.
        self.abandon()
        self.join()
        if self.tickets.error is not None and not self._is_agreed:
            _log.warning("the last update failed and its error was never raised: %s", self.tickets.error)
        self.forget()
        if self._workers is not None:
            self._workers.close()
            self._workers = None
        if self.guard is not None:
            self.guard.remove()

    def start_in_backward(self, settings: StepSettings) -> None:
        """Start an update in step mode `backward`, before the backward; it takes each record once its gradient is final.

        If the previous update failed on this rank, this call starts none; all ranks raise its error after the backward.
        """
        if self.is_in_backward:
            raise UsageError(
                'a second backward before step(), but with "step_overlap": "backward" the first one has updated parameters: '
                f"call step() after each backward, or {OTHER_MODES}"
            )
        if self.tickets.error is not None and not self._is_agreed:
            return
        self.require_consistent()
        max_bytes = max(MIN_PENDING_BYTES, _MAX_PENDING_UNITS * self._gradients.largest_unit_bytes)
        with deferred_interrupts():
            self._gradients.step.on_final = self._note_final
            self._gradients.step.arrives_in_parts = self.guard is not None and self.guard.recomputes
            take, last_read = self._take, self.tickets.last_read
            changes = Changes(self.state, self._gradients.expected, settings, take, last_read, in_background=True)
            self._settings = settings
            self._start(changes, UpdatePhase.IN_BACKWARD, max_bytes)

    def _note_final(self, records: Sequence[ParameterRecord]) -> None:
        """Hand over final gradients, and block while too many wait for the update (autograd thread)."""
        for record in records:
            torch.autograd.graph.increment_version(record.parameter)
            record.version += 1
        last_read = self.state.transfers.streams.record()  # a later read is an error
        num_unchecked = 0 if self._fetcher is None else len(self._fetcher.unchecked)
        values = {record: self._gradients.by_record[record].values for record in records}  # None: on disk
        stays = self._gradients.rules.to_host
        pending = {r: 0 if rows is None or r in stays else rows.nbytes for r, rows in values.items()}
        self.tickets.put(pending, num_unchecked, last_read)

    def end_backward(self) -> None:
        """Keep an update in the backward from starting on further records."""
        if self.is_in_backward:
            self.tickets.close()
            self._gradients.step.on_final = None

    def _admit(self, record: ParameterRecord, wait: bool) -> bool:
        """Return whether a gradient is final; with `wait`, block until it is or the backward ends (update thread)."""
        ticket = self.tickets.find(record, wait=wait)
        if ticket is None or ticket.has_started:
            return ticket is not None
        if self._fetcher is not None:  # raises if the gradient was computed from values that could not be read
            self._fetcher.check_first(ticket.num_unchecked)
        squares = self._gradients.by_record[record].squares(self._gradients.by_record.values())
        if squares is not None and not math.isfinite(squares):  # `step()` detects that in the norm, on every rank
            self.tickets.mark_taken([record])
            return False
        self.tickets.start(record)
        return True

    def _take(self, records: Sequence[ParameterRecord]) -> list[torch.Tensor | None]:
        rows = self._gradients.take(records)
        self.tickets.mark_taken(records)
        return rows

    def abandon(self, *, in_step: bool = False) -> bool:
        """Abandon an update in a backward (`in_step`: of a failed step) once the changes that it has started are
        complete; return whether the state is now inconsistent."""
        if not self.is_in_backward:
            return False
        was_inconsistent, self._is_inconsistent = self._is_inconsistent, True  # also if this is interrupted
        self.end_backward()
        self.join()
        has_changed = in_step or any(ticket.has_started for ticket in self.tickets.by_record.values())
        # Another rank may have changed parameters that this one had not reached by the end of the backward.
        has_changed = has_changed or self._gradients.has_sent
        self.tickets.forget()
        self.phase = UpdatePhase.IDLE
        self._is_inconsistent = was_inconsistent or has_changed
        return has_changed
