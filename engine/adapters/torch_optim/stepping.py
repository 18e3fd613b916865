"""Updates of an offloaded optimizer: in `step()`, behind it, or in the backward.

[Note: overlap]
none      `step()` updates everything before it returns.
forward   `step()` fixes the step's settings and returns; a thread updates parameter after parameter. Modules wait for their
          own before they run (`forward_hooks`), and so does every read of the state.
backward  A parameter is updated once the backward has its gradient; `step()` waits for the others. A step is one backward.
All give the same bits. An error is raised by the next wait, and the state is a mixture of two steps from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch

from zstore.engine.optim.update import StepSettings, Update
from zstore.engine.optim.updater import Updater
from zstore.engine.params.record import ParameterRecord
from zstore.errors import UsageError
from zstore.io import Ticket, Workers

from .local_state import LocalState
from .records import LocalRecord

_WAITING_BYTES = 64 * 1024 * 1024
"""Gradients that wait for their update in the backward before the backward does, at most, and one more."""
Rows = dict[LocalRecord, torch.Tensor]


def taking(rows: Rows) -> Callable[[ParameterRecord], torch.Tensor | None]:
    """Return the function that gives the rows of a record, once."""
    return cast(Callable[[ParameterRecord], torch.Tensor | None], rows.pop)


class Stepping:
    """Carries updates out, at once or behind the caller."""

    def __init__(self) -> None:
        self.torn: BaseException | None = None
        """The error that ended an update early, so that the state is a mixture."""
        self.steps = 0
        """Steps that were begun."""
        self._state: LocalState
        self._updater: Updater

    def connect(self, state: LocalState) -> None:
        """Work on this state from now on."""
        self._state = state
        self._updater = Updater(state.arrays.store, state.arrays.transfers)

    def require_whole(self) -> None:
        """Raise UsageError if an update stopped half way."""
        if self.torn is not None:
            raise UsageError(
                "an update stopped half way, so that parameters and optimizer state are a mixture of two steps: load both "
                "before going on"
            ) from self.torn

    def settings(self, groups: Iterable[Mapping[str, Any]], factor: float) -> StepSettings:
        """Return the settings of the next step."""
        self.steps += 1
        return StepSettings.of(list(groups), step=self.steps, factor=factor)

    def run(self, rows: Rows, settings: StepSettings, *, behind: bool) -> None:
        """Update the parameters that have rows here."""
        update = Update(self._state.arrays, list(rows), settings, taking(rows))
        records = list(rows)
        try:
            if behind:
                update.note_scalars(records)
                self._updater.start(update)
            else:
                if records and self._state.whole.takes(records[0]):
                    self._state.whole.run(update)
                else:
                    update.run()
                update.note_scalars(records)
        except BaseException as error:
            self.torn = error
            raise
        self._state.note_update(records)

    @property
    def is_behind(self) -> bool:
        """Whether an update may run behind the caller."""
        return self._updater.is_behind

    def wait(self, records: Iterable[LocalRecord] | None = None) -> None:
        """Return when no update of `records` (all by default) is under way; raise the error that ended it."""
        try:
            if records is None:
                self._updater.complete()
            else:
                self._updater.wait_for(list(records))
        except BaseException as error:
            if error is self._updater.error:
                self.torn = error
            raise

    def forget(self) -> None:
        """Forget an update that failed: the state was replaced."""
        self._updater.forget()
        self.torn = None

    def close(self) -> None:
        """End the thread, once the work under way is done."""
        self._updater.close()


class InBackward:
    """Updates parameters in the backward, whose thread hands gradients over; a thread of its own takes all that wait.

    From the first `put` to `finish` it is one step.
    """

    def __init__(self, stepping: Stepping, state: LocalState) -> None:
        self._stepping = stepping
        self._state = state
        self.groups: list[dict[str, Any]] = []
        """The optimizer's parameter groups."""
        self._changed = threading.Condition()
        self._waiting: Rows = {}
        self._seen: set[LocalRecord] = set()
        self._over = False
        self._error: BaseException | None = None
        self._workers: Workers | None = None
        self._running: Ticket[None] | None = None

    def put(self, record: LocalRecord, rows: torch.Tensor) -> None:
        """Hand a gradient over. Raises UsageError for a second one before `finish`, and the error that ended the update."""
        self._stepping.require_whole()
        if record in self._seen:
            raise UsageError(
                f'a second gradient of parameter {record.name!r} before step(), but with overlap="backward" the first one has '
                'updated it: call step() after each backward, or use overlap "forward" or "none"'
            )
        if self._running is None:
            self._start()
        self._state.watch_memory([record])
        self._seen.add(record)
        torch.autograd.graph.increment_version(record.parameter)
        with self._changed:
            self._waiting[record] = rows
            self._changed.notify_all()
            self._changed.wait_for(self._has_room)
        self._raise_error()

    def _has_room(self) -> bool:
        return self._error is not None or sum(rows.nbytes for rows in self._waiting.values()) <= _WAITING_BYTES

    def _start(self) -> None:
        self._state.before_change()
        if self._workers is None:
            self._workers = Workers(1, "zstore-update")
        self._over, self._error = False, None
        settings = self._stepping.settings(self.groups, 1.0)
        context = self._state.arrays.transfers.stream_context()

        def work() -> None:
            with context():
                self._work(settings)

        self._running = self._workers.submit(work)

    def _work(self, settings: StepSettings) -> None:
        try:
            while batch := self._take():
                records = list(batch)
                update = Update(self._state.arrays, records, settings, taking(batch))
                update.run()
                update.note_scalars(records)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _take(self) -> Rows:
        """Return the gradients that wait, at least one; none once the backward is over and all were taken."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._over)
            batch, self._waiting = self._waiting, {}
            self._changed.notify_all()
            return batch

    def finish(self, rest: Rows) -> None:
        """End the step; `rest` are gradients of the step that the backward did not give. Raises the error of the update."""
        left = {record: rows for record, rows in rest.items() if record not in self._seen}
        if self._running is None and not left:
            return
        if self._running is None:
            self._start()
        self._state.watch_memory(left)
        with self._changed:
            self._waiting |= left
            self._seen |= left.keys()
            self._over = True
            self._changed.notify_all()
        self._wait()
        seen, self._seen = self._seen, set()
        self._raise_error()
        self._state.note_update(seen)

    def _raise_error(self) -> None:
        if self._error is not None:
            self._stepping.torn = self._error
            raise self._error

    def _wait(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.wait()

    def abandon(self) -> None:
        """Forget a step under way, which may have changed some parameters."""
        with self._changed:
            self._over = True
            self._waiting = {}
            self._changed.notify_all()
        self._wait()
        self._seen.clear()

    def close(self) -> None:
        """Abandon a step under way and end the thread."""
        self.abandon()
        if self._workers is not None:
            self._workers.close()
            self._workers = None
