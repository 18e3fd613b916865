"""The updates of a run: when each begins, who waits for it, and whether the state is consistent.

[Note: step modes]
none      `step()` takes the norm and updates everything before it returns.
backward  An update begins with the last backward of a step and changes each parameter once its gradient is final;
          `step()` waits for the others. It cannot be undone, so it requires a run without clipping and loss scaling,
          and a gradient that is not finite leaves a state that must be loaded again.
forward   `step()` takes the norm and fixes the step's settings: skipped or not, learning rates, step counts. Resident
          parameters, which a plain read reaches, are updated in it; all others behind it, in order, while the loop
          goes on. Gathering a parameter waits for its update, in evaluation too. The next backward waits for the
          remaining ones, and so does every call that reads the state. A save takes each array as its update is done.
All give the same bits, by the same `Changes`; they differ in when these begin. An error is raised, with the number of its
step, in every call that waits for the update, and the state is torn from then on. Possible failures and their consequences
are in docs/design/0005-step.md.

[Note: which state is whole]
An update or a load that fails partway leaves the state inconsistent, and neither trained nor saved until a load
replaces it.

| that fails | the state |
|---|---|
| a block of `changing`: an update in `step()`, a write of a caller, a load | torn |
| an update behind `step()` | torn, on the other ranks as soon as they agree on its end |
| `step()` before its update, or a backward | unchanged since the previous step |
| the same with an update in the backward under way | torn: if it changed anything on any rank, and in `step()` always |

[Note: who waits for an update]

| call | waits for | an error of the update is |
|---|---|---|
| `wait` | an update behind `step()`, on all ranks; none in a backward | raised on every rank |
| `drain`, then `agree` | the same: on this rank, then with the others | raised by `agree` on every rank |
| `Tickets.wait_for` | the updates of some parameters that are read next | raised |
| `forget` | the end of any update; one in a backward is abandoned | forgotten: the state is replaced |
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial

import torch
from torch import nn

from zstore.errors import UsageError
from zstore.io import Ticket, Workers
from zstore.io.closing import interrupts_wait
from zstore.ranks.world import World

from ..params.record import ParameterRecord, Residency
from ..runtime.device import StreamContext
from ..zero.fetch import Fetcher
from ..zero.gradients import Gradients
from .changes import Changes, UpdatePlan
from .kernel import StepSettings
from .rules import Stepper
from .state import OptimizerState
from .tickets import TORN, ReadGuard, Tickets, TicketState

_log = logging.getLogger("zstore")

LEAST_WAITING_BYTES = 32 * 1024 * 1024
"""Bytes of gradients that may wait for their update in the backward whatever the size of a unit."""
_UNITS_WAITING = 2
"""Gradients of this many largest units may be pending, if that is more."""


class StepMode(Enum):
    """When the update runs. See [Note: step modes]."""

    NONE = "none"
    """In `step()`."""
    BACKWARD = "backward"
    """In the backward, as gradients arrive."""
    FORWARD = "forward"
    """In the background after `step()`, before the next forward needs it."""


class Update:
    """A run's updates, at most one of which runs, on a background thread, with one ticket per record.

    Updates run in the backward if the step mode says so and gradients are final there; `fetcher` gathers parameters
    gradients are made of, once their update is done. Safe to use from several threads.
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
        self._settings: StepSettings | None = None
        """Settings of a started update whose outcome the ranks have not yet exchanged; they do in the next backward, or in step
        mode `backward` in `step()`."""
        self.tickets = Tickets(state)
        self._partial = False
        """Whether a block of `changing`, or an abandoned update, has left a part of the state changed."""
        self._fetcher = fetcher
        self._workers: Workers | None = None
        self._running: Ticket[None] | None = None
        self._ahead: UpdatePlan | None = None
        """Plan of the update whose state is being prefetched."""
        if fetcher is not None:
            fetcher.ready = self.tickets.wait_for
        if mode is StepMode.BACKWARD and not gradients.rules.each_backward:
            # Gradients that are reduced once a step (stages 0 and 1 with more ranks) become final only at its end.
            self.mode = StepMode.NONE
        self._guard = ReadGuard(model, state.scalars, self.tickets.of) if self.runs_in_backward else None

    @property
    def runs_in_backward(self) -> bool:
        """Whether updates run in the backward."""
        return self.mode is StepMode.BACKWARD

    @property
    def is_in_backward(self) -> bool:
        """Whether an update in the backward is under way, which `step()` ends."""
        return self._settings is not None and self.runs_in_backward

    # -- whether the state is whole -----------------------------------------------------------------------------------

    @property
    def torn(self) -> bool:
        """Whether the state is inconsistent. See [Note: which state is whole]."""
        # The error that ended an update in the backward is raised in step(), on every rank.
        return self._partial or (self.tickets.error is not None and not self.is_in_backward)

    def require_whole(self) -> None:
        """Raise UsageError if the state is torn, which must be neither trained nor saved."""
        if self.torn:
            raise UsageError(TORN) from self.tickets.error

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Mark the state inconsistent unless the block completes."""
        self._partial = True
        yield
        self._partial = False  # not after an error

    # -- in step() ----------------------------------------------------------------------------------------------------

    def split(self) -> tuple[list[ParameterRecord], list[ParameterRecord]]:
        """Return the records with a gradient that are updated in `step()`, and those that are updated behind it."""
        if self.is_in_backward:  # the thread has updated some of them
            return [], []
        records = self._gradients.having(self.state.scalars)

        def divide() -> tuple[list[ParameterRecord], list[ParameterRecord]]:
            # Packed arrays first: adjacent ones are transferred in one request.
            tier = self.state.store.tier
            records.sort(key=lambda one: not any(tier(name).is_packed(name) for name in self.state.all_arrays(one)))
            here = {one for one in records if self.mode is not StepMode.FORWARD or one.residency is Residency.RESIDENT}
            return [one for one in records if one in here], [one for one in records if one not in here]

        return self.state.planned((Update, *records), divide)

    def read_ahead(self) -> None:
        """Begin to read from disk the first of the records that are updated next."""
        # Holds pool buffers: nothing may block on the pool until the update runs.
        here, behind = self.split() if self.stepper is None else ([], [])
        if here or behind:
            self._ahead = UpdatePlan.of(self.state, here or behind, behind=not here)
            self._ahead.read_ahead(self.state.store)

    def drop_ahead(self) -> None:
        """Free the memory of prefetched passes that were not used."""
        while self._ahead is not None and self._ahead.begun:
            self._ahead.begun.pop().drop()
        self._ahead = None

    def run(self, records: Sequence[ParameterRecord], settings: StepSettings) -> None:
        """Update `records` synchronously, or finish an update started in the backward.

        Raises UsageError if the settings differ from those that the update in the backward began with.
        """
        if self._settings is not None and self.runs_in_backward:
            self._finish(self._settings, settings)
            return
        changes = Changes(self.state, records, settings, self._gradients.take)
        if self.stepper is None:
            changes.run()
        else:
            self.stepper.run(changes)
        changes.note_scalars(records)

    def start_behind(self, records: Sequence[ParameterRecord], settings: StepSettings) -> None:
        """Start updating `records` in the background, if any; takes ownership of their gradients now."""
        if not records:
            return
        held = dict(zip(records, self._gradients.take(records), strict=True))
        changes = Changes(self.state, records, settings, partial(map, held.pop), behind=True)
        changes.note_scalars(records)
        self._start(changes)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _start(self, changes: Changes, most_bytes: float = math.inf) -> None:
        self.join()
        if self.tickets.error is not None:
            raise self.tickets.error
        if self._workers is None:
            # Daemon threads: at exit the interpreter would wait for others, and those for a backward that never comes.
            self._workers = Workers(1, "zstore-update")
            # Idle threads of OpenMP spin, on cores that this one needs, unless a thread team of its own oversubscribes them.
            self._workers.submit(lambda: torch.ones(torch.get_num_threads() << 15).mul_(1.0))
        self.tickets.begin(changes.records, most_bytes, in_backward=self.runs_in_backward)
        self._settings = changes.settings
        self._running = self._workers.submit(partial(self._run, changes, self.state.transfers.streams.stream_context()))

    def _run(self, changes: Changes, context: StreamContext) -> None:
        in_backward, error = self.runs_in_backward, None
        try:
            with context():
                changes.run(admit=self._admit if in_backward else None, done=self.tickets.done)
        except BaseException as raised:
            raised.add_note(f"This happened in the update of step {changes.settings.step}, which was applied in part.")
            error = raised
        self.tickets.end(error, forget=not in_backward)

    def join(self) -> None:
        """Wait until the thread has ended its update. May be interrupted: the update goes on, and the next call waits again."""
        if self._running is not None:
            self._running.wait_for_end()
            self._running = None

    # -- waits: see [Note: who waits for an update] -------------------------------------------------------------------

    def wait(self) -> None:
        """Wait for any running update, except one in a backward; raise its error on every rank (all ranks)."""
        self.drain()
        self.agree()

    def drain(self) -> None:
        """Wait for an update behind `step()` on this rank; the caller calls `agree` next; on a single rank this does it."""
        if self._settings is not None and not self.runs_in_backward:
            self.join()
            if self.world.world_size == 1:
                self.agree()

    def agree(self) -> None:
        """Raise the error that ended the update behind `step()` on any rank on every rank (all ranks)."""
        if self._settings is None or self.runs_in_backward:
            return
        self._settings = None
        try:
            self.world.raise_together(self.tickets.error)
        except BaseException:
            self._partial = True
            raise

    def forget(self) -> None:
        """Wait for the end of an update, and forget it: a load replaces the state."""
        self.abandon()
        self.join()
        self.tickets.forget()
        self._settings = None

    def close(self) -> None:
        """End the thread, and remove the hooks from the modules."""
        # Before all else: an update that waits for a backward would never end.
        self.abandon()
        self.join()
        if self.tickets.error is not None and self._settings is not None:
            _log.warning("the last update failed and its error was never raised: %s", self.tickets.error)
        self.forget()
        if self._workers is not None:
            self._workers.close()
            self._workers = None
        if self._guard is not None:
            self._guard.remove()

    # -- in the backward: see [Note: an update in the backward] -------------------------------------------------------

    def start_in_backward(self, settings: StepSettings) -> None:
        """Start an update in step mode `backward`, which takes each record when its gradient is final (before the backward)."""
        self.require_whole()
        if self.is_in_backward:
            raise UsageError(
                'a second backward before step(), but with "step_overlap": "backward" the first one has '
                'updated the parameters: call step() after each backward, or set "step_overlap" to "forward" or "none"'
            )
        most_bytes = max(LEAST_WAITING_BYTES, _UNITS_WAITING * self._gradients.largest_unit_bytes)
        with interrupts_wait():
            self._gradients.step.on_final = self._note_final
            self._gradients.step.comes_in_parts = self._guard is not None and self._guard.recomputes
            last_read = lambda record: self.tickets.of[record].last_read  # noqa: E731
            changes = Changes(self.state, self._gradients.expected, settings, self._take, last_read, behind=True)
            self._start(changes, most_bytes)

    def _note_final(self, records: Sequence[ParameterRecord]) -> None:
        """Hand over final gradients, blocking while too many are pending (autograd thread)."""
        for record in records:
            torch.autograd.graph.increment_version(record.parameter)
            record.version += 1
        last_read = self.state.transfers.streams.record()  # from here on a read is an error
        num_unseen = 0 if self._fetcher is None else len(self._fetcher.unseen)
        for record in records:
            values = self._gradients.of[record].values  # None: on disk
            self.tickets.put(record, num_unseen, last_read, 0 if values is None else values.nbytes)

    def end_backward(self, *, drop: bool = False) -> None:
        """Tell a backward update that no more gradients come; with `drop`, discard those it has not started on."""
        if self.is_in_backward:
            self.tickets.close(drop=drop)
            self._gradients.step.on_final = None

    def _admit(self, record: ParameterRecord, wait: bool) -> bool:
        """Return whether a gradient is final and may be used, with `wait` at the end of the backward (the thread)."""
        ticket = self.tickets.find(record, wait=wait)
        if ticket.state is not TicketState.FINAL:
            return ticket.is_begun  # asked again by a pass that had no buffer for it
        if self._fetcher is not None:  # raises if the gradient was computed from values that could not be read
            self._fetcher.check_before(ticket.num_unseen)
        squares = self._gradients.of[record].squares(self._gradients.of.values())
        if squares is not None and not math.isfinite(squares):  # `step()` finds that in the norm, on every rank
            self.tickets.note_taken(record)
            return False
        ticket.state = TicketState.RUNNING
        return True

    def _take(self, records: Sequence[ParameterRecord]) -> list[torch.Tensor | None]:
        rows = self._gradients.take(records)
        for record in records:
            self.tickets.note_taken(record)
        return rows

    def _finish(self, then: StepSettings, now: StepSettings) -> None:
        """Wait until the backward update has consumed every final gradient (called from `step()`)."""
        self.join()
        if self.tickets.error is not None:
            raise self.tickets.error
        used = [ticket for ticket in self.tickets.of.values() if ticket.state is not TicketState.EXPECTED]
        left = [ticket.record for ticket in used if not ticket.is_begun]
        # The caller may have read parameters since, so the recorded last-read events no longer hold.
        changes = Changes(self.state, left, then, self._gradients.take)
        changes.run()
        changes.note_scalars([ticket.record for ticket in used])
        self.tickets.forget()
        for number, name, before, after in then.differences(now):
            raise UsageError(
                f"parameter group {number}: {name} was {before!r} at the backward and is {after!r} at step(), "
                'but with "step_overlap": "backward" the update runs in the backward: set it before '
                'engine.backward(), or set "step_overlap" to "forward" or "none"'
            )
        self._settings = None

    def abandon(self, *, in_step: bool = False) -> bool:
        """Abandon the update of a backward or, `in_step`, of a step that failed, after the changes that have begun; return
        whether the state is now inconsistent."""
        if not self.is_in_backward:
            return False
        before, self._partial = self._partial, True  # also if this is interrupted
        self.end_backward(drop=True)
        self.join()
        # Another rank may have changed what this one had not by the end of the backward.
        begun = any(ticket.is_begun for ticket in self.tickets.of.values()) or self._gradients.has_sent or in_step
        self.tickets.forget()
        self._settings = None
        self._partial = before or begun
        return begun
