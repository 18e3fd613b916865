"""Tickets of an update, one per parameter, on which the loop, the backward, readers and saves wait.

[Note: an update in the backward]
The update processes the parameters in the order in which their gradients are expected, each once its gradient is final. It
starts no further updates once the backward is over: `step()` updates the remaining ones, or starts that in the background.

A read of a parameter after its update has started would yield different bits from those in the other modes. So it is an
error: a node of the graph that saved the parameter sees that its version counter has changed, and `ReadGuard` detects a
module that is called again, for recomputation in the backward or in a forward before `step()`.

A gradient is freed when its update takes it. Gradients of offloaded state wait in host memory if the budget allows, and
never block the backward; for other gradients, at most a few units' worth may be pending; beyond that the backward waits.
The changes are final: an abandoned update does not undo them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zstore.errors import UsageError
from zstore.format import Bytes, Grid
from zstore.io import IoResources, Priority, ShardSummary
from zstore.store import PinnedShard, Store

from ..params.record import OTHER_MODES, ParameterRecord
from ..runtime.device import Event
from ..zero.hooks import ModuleHook
from .state import OptimizerState

TORN = "a previous step or load failed partway, so the state is inconsistent; load a checkpoint before continuing"
"""Error message. See [Note: which state is consistent]."""


class TicketState(Enum):
    """How far the update of one parameter has progressed."""

    EXPECTED = "expected"
    """Its gradient is not final: the backward may still read the parameter, and nothing waits for its update."""
    FINAL = "final"
    """Its gradient is final and the update may start; no module may read the parameter until `step()`."""
    RUNNING = "running"
    """Its state is being changed, or will be: readers wait."""
    DONE = "done"
    """The new state is the current one, unless the update failed."""


@dataclass(eq=False, slots=True)
class UpdateTicket:
    """The update of one parameter."""

    record: ParameterRecord
    state: TicketState
    num_unchecked: int = 0
    """How many fetches with unchecked headers may have contributed to the gradient."""
    pending_bytes: int = 0
    """Bytes of the final gradient that the update frees when it takes it; 0 once it has."""
    last_read: Event = None
    """The device's last read of the parameter, recorded when its gradient became final."""
    unit_number: int = 0
    """Index of its unit, in the order in which the units' gradients were handed over, from 1."""
    pins: list[DeferredPin] = field(default_factory=list)
    """Pins that wait for the new state."""

    @property
    def has_started(self) -> bool:
        """Whether the update may have changed anything."""
        return self.state in (TicketState.RUNNING, TicketState.DONE)


class Tickets:
    """The tickets of the running update: its thread, the backward's thread, readers and saves wait for each other on them."""

    def __init__(self, state: OptimizerState) -> None:
        self.by_record: dict[ParameterRecord, UpdateTicket] = {}
        """Tickets by record; records without rows on this rank have one in the backward only."""
        self.error: BaseException | None = None
        """The error that ended the last update early."""
        self._state = state
        self._changed = threading.Condition()
        self._is_open = False
        """Whether a backward is running that may produce further gradients."""
        self._awaited: UpdateTicket | None = None
        """The ticket whose gradient the update thread is waiting for."""
        self._pending_bytes, self._max_pending_bytes = 0, math.inf
        """Bytes of final gradients that wait for the update, and their maximum; unlimited if no update runs."""
        self._num_units = 0
        """Units whose gradients have been handed over."""

    def begin(self, records: Iterable[ParameterRecord], max_pending_bytes: float, *, in_backward: bool) -> None:
        """Begin an update of `records`: in the background, or during a backward, with a limit on pending gradients."""
        state = TicketState.EXPECTED if in_backward else TicketState.RUNNING
        with self._changed:
            self.by_record.clear()
            self.by_record.update((r, UpdateTicket(r, state)) for r in records if in_backward or r.owned_numel)
            self._is_open, self._pending_bytes, self._max_pending_bytes = in_backward, 0, max_pending_bytes
            self._num_units = 0

    def forget(self) -> None:
        """Forget an update that has ended, and its error."""
        with self._changed:
            self.by_record.clear()
            self.error = None

    def put(self, pending_bytes: Mapping[ParameterRecord, int], num_unchecked: int, last_read: Event) -> None:
        """Hand over the final gradients of a unit and the number of bytes that each one's update frees, and wait for room."""
        with self._changed:
            self._num_units += 1
            for record, nbytes in pending_bytes.items():
                ticket = self.by_record.setdefault(record, UpdateTicket(record, TicketState.EXPECTED))
                ticket.state, ticket.num_unchecked, ticket.unit_number = (
                    TicketState.FINAL,
                    num_unchecked,
                    self._num_units,
                )
                ticket.last_read, ticket.pending_bytes = last_read, nbytes
                self._pending_bytes += nbytes
            self._changed.notify_all()
            self._changed.wait_for(self._has_room)

    def _has_room(self) -> bool:
        # Never wait for an update that waits for the backward; bytes that the update would not free are not counted.
        starved = self._awaited is not None and self._awaited.state is TicketState.EXPECTED
        return starved or self._pending_bytes <= self._max_pending_bytes

    def close(self) -> None:
        """Mark the backward as over: the update thread starts no further updates."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def find(self, record: ParameterRecord, *, wait: bool) -> UpdateTicket | None:
        """Return the ticket of a record whose update may start; with `wait`, wait until its gradient is final. Return None
        if it is not final, or the backward is over."""
        with self._changed:
            ticket = self.by_record[record]
            if wait:
                self._awaited = ticket
                self._changed.notify_all()
                self._changed.wait_for(lambda: ticket.state is not TicketState.EXPECTED or not self._is_open)
                self._awaited = None
            may_start = self._is_open and ticket.state is TicketState.FINAL
            return ticket if may_start or ticket.has_started else None  # a pass that had no buffer asks again

    def start(self, record: ParameterRecord) -> None:
        """Mark the update of a record as running."""
        with self._changed:
            self.by_record[record].state = TicketState.RUNNING

    def last_read(self, records: Iterable[ParameterRecord]) -> Event:
        """Return the device's last read of any of `records`."""
        return max((self.by_record[record] for record in records), key=lambda ticket: ticket.unit_number).last_read

    def mark_taken(self, records: Iterable[ParameterRecord]) -> None:
        """Mark gradients as taken by the update."""
        with self._changed:
            for record in records:
                self._pending_bytes -= self.by_record[record].pending_bytes
                self.by_record[record].pending_bytes = 0
            self._changed.notify_all()

    def mark_done(self, record: ParameterRecord) -> None:
        """Mark a parameter's new state as the current one."""
        with self._changed:
            ticket = self.by_record[record]
            if ticket.pins:
                self._state.transfers.synchronize()
            while ticket.pins:
                ticket.pins.pop().resolve(self._state.store, None)
            ticket.state = TicketState.DONE
            self._changed.notify_all()

    def end(self, error: BaseException | None, *, forget: bool) -> None:
        """Mark the update as ended; with `forget`, drop its tickets."""
        with self._changed:
            # Under the lock, together with the error: nothing is pinned from now on.
            self.error, self._max_pending_bytes = error, math.inf
            started = [ticket for ticket in self.by_record.values() if ticket.has_started]
            for ticket in started:
                ticket.state = TicketState.DONE
            if forget:
                self.by_record.clear()
            self._changed.notify_all()
        for pin in (pin for ticket in started for pin in ticket.pins):
            pin.resolve(self._state.store, error)

    def wait_for(self, records: Iterable[ParameterRecord], wait: bool = True) -> bool:
        """Return whether no update of `records` is running; if `wait`, wait until none is. Raises the update's error.

        A record whose update may start later does not count: until then the backward may read the parameter.
        """
        if not self.by_record and self.error is None:
            return True
        with self._changed:
            tickets = (self.by_record.get(record) for record in records)
            running = [ticket for ticket in tickets if ticket is not None and ticket.state is TicketState.RUNNING]
            if wait:
                self._changed.wait_for(lambda: all(ticket.state is TicketState.DONE for ticket in running))
            if self.error is not None:
                raise self.error
            return all(ticket.state is TicketState.DONE for ticket in running)

    def pin(self, record: ParameterRecord, names: Sequence[str]) -> dict[str, PinnedShard]:
        """Return pins of arrays of `record`: of the current version, or of the version that its update will create.
        Raises UsageError if the update failed."""
        store = self._state.store
        with self._changed:
            if self.error is not None:
                raise UsageError(TORN) from self.error
            ticket = self.by_record.get(record)
            if ticket is None or ticket.state is TicketState.DONE:
                return dict(store.snapshot(names).pins)
            deferred = {name: DeferredPin(store, name) for name in names}
            ticket.pins += deferred.values()
            return dict(deferred)


class ReadGuard:
    """Raises if a module is called after an update in the backward may have changed its parameters."""

    def __init__(
        self,
        model: nn.Module,
        records: Iterable[ParameterRecord],
        tickets: Callable[[], Mapping[ParameterRecord, UpdateTicket]],
    ) -> None:
        self._tickets = tickets
        """Returns the tickets of an update in the backward that `step()` has not completed."""
        self.recomputes = False
        """Whether a module ran without gradients in the last forward (reentrant checkpointing: gradients arrive in parts)."""
        self.handles = [model.register_forward_pre_hook(ModuleHook(self._before_model), prepend=True)]
        record_of = {record.parameter: record for record in records}
        for name, module in model.named_modules():
            used = [record_of[p] for p in module.parameters() if p in record_of]
            if used:
                before = partial(self._before_module, name or type(module).__name__, used)
                # They run before the hooks that gather the parameters.
                self.handles.append(module.register_forward_pre_hook(ModuleHook(before), prepend=True))

    def _before_model(self, module: nn.Module, args: Any) -> None:
        self.recomputes = not torch.is_grad_enabled()

    def _before_module(self, name: str, records: list[ParameterRecord], module: nn.Module, args: Any) -> None:
        self.recomputes |= not torch.is_grad_enabled()
        tickets = self._tickets()
        final = (tickets[r].state is not TicketState.EXPECTED for r in records if r in tickets) if tickets else ()
        if any(final):
            raise UsageError(
                f"module {name!r} was called after the backward updated some of its parameters, and before step(): with "
                '"step_overlap": "backward" a forward between backward() and step(), and a recomputation after the '
                f"parameter's last gradient, would see updated values; {OTHER_MODES}"
            )

    def remove(self) -> None:
        """Remove the hooks from the modules."""
        for handle in self.handles:
            handle.remove()


class DeferredPin:
    """A pin of the version that a running update will create. See `PinnedShard`."""

    def __init__(self, store: Store, name: str) -> None:
        self._name = name
        self.local = store.local(name)
        self.tier = store.tier(name).name
        self.has_file = self.tier == "disk" and not store.tier(name).is_packed(name)
        self.version: int | None = None
        self._pin: Future[PinnedShard] = Future()
        self._lock = threading.Lock()

    def resolve(self, store: Store, error: BaseException | None) -> None:
        """Pin the current version, or store the error that prevented it (called by the update)."""
        with self._lock:
            if self._pin.done():  # already released
                return
            try:
                if error is not None:
                    raise error
                self._pin.set_result(store.snapshot([self._name]).pins[self._name])
            except BaseException as raised:
                self._pin.set_exception(raised)

    def copy_into(self, out: Bytes, grid: Grid, shard: int) -> None:
        """Wait for the update, then call `PinnedShard.copy_into`. Raises UsageError if the update failed."""
        self._wait_for_pin().copy_into(out, grid, shard)

    def checksums(self, res: IoResources, grid: Grid, shard: int) -> tuple[int, ...]:
        """Wait for the update, then call `PinnedShard.checksums`. Raises UsageError if the update failed."""
        return self._wait_for_pin().checksums(res, grid, shard)

    def publish(self, res: IoResources, path: str | Path, grid: Grid, shard: int, priority: Priority) -> ShardSummary:
        """Wait for the update, then call `PinnedShard.publish`. Raises UsageError if the update failed."""
        return self._wait_for_pin().publish(res, path, grid, shard, priority)

    def _wait_for_pin(self) -> PinnedShard:
        error = self._pin.exception()
        if error is not None:
            raise UsageError(
                f"array {self._name!r}: its update failed, so there is nothing to save: {error}"
            ) from error
        return self._pin.result()

    def release(self) -> None:
        with self._lock:
            if not self._pin.done():
                self._pin.set_exception(UsageError(f"array {self._name!r}: the pin was released"))
            if self._pin.exception() is None:
                self._pin.result().release()
