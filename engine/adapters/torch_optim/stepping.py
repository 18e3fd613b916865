"""Updates of an offloaded optimizer: in `step()`, behind it, or in the backward.

[Note: overlap]
none      `step()` updates everything before it returns.
forward   `step()` fixes the step's settings and returns; a thread updates parameter after parameter. Modules wait for their
          own before they run (`forward_hooks`), and so does every read of the state.
backward  A parameter is updated once the backward has its gradient; `step()` waits for the others. A step is one backward.
All give the same bits. An error is raised by the next wait, and the state is a mixture of two steps from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from zstore.engine.optim.in_backward import LEAST_WAITING_BYTES, DirectUpdate
from zstore.engine.optim.update import StepSettings, Update
from zstore.engine.optim.updater import Updater
from zstore.engine.params.record import ParameterRecord
from zstore.errors import UsageError

from .local_state import LocalState
from .records import LocalRecord

Rows = dict[LocalRecord, torch.Tensor]


class Stepping:
    """Carries updates out, at once or `behind` the caller."""

    def __init__(self, state: LocalState, *, behind: bool = False) -> None:
        self.torn: BaseException | None = None
        """The error that ended an update early, so that the state is a mixture."""
        self.groups: Sequence[Mapping[str, Any]] = ()
        """The optimizer's parameter groups."""
        self._steps = 0
        self._state = state
        self._behind = behind
        self._updater = Updater(state.arrays.store, state.arrays.transfers)
        state.wait = self.wait

    def require_whole(self) -> None:
        """Raise UsageError if an update stopped half way."""
        if self.torn is not None:
            raise UsageError(
                "an update stopped half way, so that parameters and optimizer state are a mixture of two steps: load both "
                "before going on"
            ) from self.torn

    def _settings(self, factor: float) -> StepSettings:
        """Return the settings of the next step."""
        self._steps += 1
        return StepSettings.of(self.groups, step=self._steps, factor=factor)

    def run(self, rows: Rows, factor: float) -> None:
        """Update the parameters that have rows here, of gradients multiplied by `factor`."""
        records = list(rows)
        self._state.watch_memory(records)
        take = cast(Callable[[ParameterRecord], torch.Tensor | None], rows.pop)
        update = Update(self._state.arrays, records, self._settings(factor), take)
        try:
            if self._behind:
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
                self._updater.join_or_raise()
            else:
                self._updater.wait_for(list(records))
        except BaseException as error:
            if error is self._updater.error:
                self.torn = error
            raise

    def forget(self) -> None:
        """Forget an update under way, or one that failed: the state is replaced."""
        self._updater.reset()
        self.torn = None

    def close(self) -> None:
        """End the thread, once the work under way is done."""
        self._updater.close()


class InBackward(Stepping):
    """Updates parameters in the backward, which hands gradients over (`put`). From the first to `run` it is one step."""

    largest_unit_bytes = LEAST_WAITING_BYTES
    has_sent = False
    comes_in_parts = False

    def __init__(self, state: LocalState) -> None:
        super().__init__(state)
        self.on_final: Callable[[ParameterRecord], None] | None = None
        self._rows: dict[ParameterRecord, torch.Tensor] = {}
        self._seen: dict[LocalRecord, None] = {}
        self._expected: list[LocalRecord] = []
        """The parameters of the step before, in order."""
        gradients: Any = self  # in place of UnitGradients, as far as the update asks these
        self._update = DirectUpdate(nn.Module(), state.arrays, gradients, self._updater)
        self._at_start: StepSettings

    @property
    def expected(self) -> list[ParameterRecord]:
        return [*self._expected] or [*reversed(self._state.records.values())]

    def waiting_bytes(self, record: ParameterRecord) -> int:
        return self._rows[record].nbytes

    def take(self, record: ParameterRecord, *, keep: bool) -> torch.Tensor | None:
        return self._rows.pop(record)

    def squares(self, record: ParameterRecord) -> float | None:
        return None

    def put(self, record: LocalRecord, rows: torch.Tensor) -> None:
        """Hand a gradient over. Raises UsageError for a second one before `run`, and the error that ended the update."""
        self.require_whole()
        if record in self._seen:
            raise UsageError(
                f'a second gradient of parameter {record.name!r} before step(), but with overlap="backward" the first one has '
                'updated it: call step() after each backward, or use overlap "forward" or "none"'
            )
        if not self._update.under_way:
            self._at_start = self._settings(1.0)
            self._update.start(self._at_start)
        self._state.watch_memory([record])
        self._seen[record], self._rows[record] = None, rows
        if self.on_final is not None:
            self.on_final(record)
        super().wait([])  # for none, but an error is raised

    def run(self, rows: Rows, factor: float) -> None:
        """End the step; `rows` are gradients of it that the backward may not have given. Raises the error of the update."""
        for record in [record for record in rows if record not in self._seen]:
            self.put(record, rows[record])
        if not self._update.under_way:
            return
        self._update.end_backward()
        try:
            self._update.finish(self._at_start)
        except BaseException as error:
            self.torn = error
            raise
        self._state.note_update(self._seen)
        self._expected, self._seen = list(self._seen), {}

    def wait(self, records: Iterable[LocalRecord] | None = None) -> None:
        """Updates that wait for the backward are not waited for."""
        super().wait(self._state.records.values() if records is None else records)

    def forget(self) -> None:
        if self._update.under_way:
            self._update.abandon()
        self._seen, self._rows = {}, {}
        super().forget()

    def close(self) -> None:
        self.forget()
        super().close()
