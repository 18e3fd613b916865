"""Tickets of an update, one for each parameter: the loop, the backward, readers and saves go by them.

[Note: an update in the backward]
The update processes the parameters in the order in which their gradients are expected, each once its gradient is final. It
starts nothing more when the backward is over: `step()` updates the others, or starts that in the background.

A read of a parameter after its update had begun would get other bits than in the other modes. So it is an error:
a node of the graph that saved the parameter finds another version counter, and a module that is called again,
for recomputation in the backward or a forward before `step()`, is watched.

A gradient is freed as its update takes it. Gradients of offloaded state wait in host memory if the budget holds them, and
never block the backward; of others no more than a few units' are held, and a backward that gets ahead waits for the update.
The changes are final: an abandoned update's changes stay.
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
"""An error's message. See [Note: which state is whole]."""


class TicketState(Enum):
    """How far the update of one parameter is."""

    EXPECTED = "expected"
    """Its gradient is not final: the backward may still read the parameter, and nothing waits for its update."""
    FINAL = "final"
    """Its gradient is final and the update may begin; no module may read the parameter until `step()`."""
    RUNNING = "running"
    """Its state is, or will be, changed: readers wait."""
    DONE = "done"
    """The new state is the current one, unless the update failed."""


@dataclass(eq=False, slots=True)
class UpdateTicket:
    """The update of one parameter."""

    record: ParameterRecord
    state: TicketState
    num_unseen: int = 0
    """How many fetches whose headers are looked at late may have led to the gradient."""
    waiting_bytes: int = 0
    """Bytes of the final gradient that the update frees and did not take yet."""
    last_read: Event = None
    """When the device has read the parameter for the last time, as its gradient was final."""
    turn: int = 0
    """How many units' gradients had been handed over before it."""
    pins: list[LatePin] = field(default_factory=list)
    """Pins that wait for the new state."""

    @property
    def is_begun(self) -> bool:
        """Whether the update may have changed anything."""
        return self.state in (TicketState.RUNNING, TicketState.DONE)


class Tickets:
    """The tickets of the running update, through which its thread, the backward's, readers and saves wait for each other."""

    def __init__(self, state: OptimizerState) -> None:
        self.of: dict[ParameterRecord, UpdateTicket] = {}
        """Tickets by record; records without rows on this rank have one in the backward only."""
        self.error: BaseException | None = None
        """The error that ended the last update early."""
        self._state = state
        self._changed = threading.Condition()
        self._is_open = False
        """Whether a backward may bring further gradients."""
        self._awaited: UpdateTicket | None = None
        """The ticket whose gradient the thread waits for."""
        self._waiting_bytes, self._max_waiting_bytes = 0, math.inf
        """Bytes of final gradients that wait for the update, and their maximum; unlimited if no update runs."""
        self._num_put = 0
        """Units whose gradients were handed over."""

    def begin(self, records: Iterable[ParameterRecord], max_waiting_bytes: float, *, in_backward: bool) -> None:
        """Begin an update of `records`: in the background, or in a backward, with a limit on bytes of pending gradients."""
        state = TicketState.EXPECTED if in_backward else TicketState.RUNNING
        with self._changed:
            self.of.clear()
            self.of.update((one, UpdateTicket(one, state)) for one in records if in_backward or one.owned_numel)
            self._is_open, self._waiting_bytes, self._max_waiting_bytes = in_backward, 0, max_waiting_bytes
            self._num_put = 0

    def forget(self) -> None:
        """Forget an update that has ended, and its error."""
        with self._changed:
            self.of.clear()
            self.error = None

    def put(self, waiting_bytes: Mapping[ParameterRecord, int], num_unseen: int, last_read: Event) -> None:
        """Hand over the final gradients of a unit, with the bytes of each that its update frees, and wait for room."""
        with self._changed:
            self._num_put += 1
            for record, nbytes in waiting_bytes.items():
                ticket = self.of.setdefault(record, UpdateTicket(record, TicketState.EXPECTED))
                ticket.state, ticket.num_unseen, ticket.turn = TicketState.FINAL, num_unseen, self._num_put
                ticket.last_read, ticket.waiting_bytes = last_read, nbytes
                self._waiting_bytes += nbytes
            self._changed.notify_all()
            self._changed.wait_for(self._has_room)

    def _has_room(self) -> bool:
        # Never wait for an update that waits for the backward, nor for one that frees nothing.
        starved = self._awaited is not None and self._awaited.state is TicketState.EXPECTED
        return starved or self._waiting_bytes <= self._max_waiting_bytes

    def close(self) -> None:
        """Mark the backward as over: the thread starts no further record."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def find(self, record: ParameterRecord, *, wait: bool) -> UpdateTicket | None:
        """Return the ticket of a record whose update may begin, with `wait` once its gradient is final; None: it is not, or
        the backward is over."""
        with self._changed:
            ticket = self.of[record]
            if wait:
                self._awaited = ticket
                self._changed.notify_all()
                self._changed.wait_for(lambda: ticket.state is not TicketState.EXPECTED or not self._is_open)
                self._awaited = None
            may_begin = self._is_open and ticket.state is TicketState.FINAL
            return ticket if may_begin or ticket.is_begun else None  # asked again by a pass that had no buffer for it

    def last_read(self, records: Iterable[ParameterRecord]) -> Event:
        """Return when the device has read all of `records` for the last time."""
        return max((self.of[record] for record in records), key=lambda ticket: ticket.turn).last_read

    def note_taken(self, records: Iterable[ParameterRecord]) -> None:
        """Mark gradients as no longer pending."""
        with self._changed:
            for record in records:
                self._waiting_bytes -= self.of[record].waiting_bytes
                self.of[record].waiting_bytes = 0
            self._changed.notify_all()

    def done(self, record: ParameterRecord) -> None:
        """Mark a parameter's new state as the current one."""
        with self._changed:
            ticket = self.of[record]
            if ticket.pins:
                self._state.transfers.synchronize()
            while ticket.pins:
                ticket.pins.pop().resolve(self._state.store, None)
            ticket.state = TicketState.DONE
            self._changed.notify_all()

    def end(self, error: BaseException | None, *, forget: bool) -> None:
        """Mark the update as ended; with `forget`, drop its tickets."""
        with self._changed:
            # Together with the error: from now on nothing is pinned.
            self.error, self._max_waiting_bytes = error, math.inf
            begun = [ticket for ticket in self.of.values() if ticket.is_begun]
            for ticket in begun:
                ticket.state = TicketState.DONE
            if forget:
                self.of.clear()
            self._changed.notify_all()
        for pin in (pin for ticket in begun for pin in ticket.pins):
            pin.resolve(self._state.store, error)

    def wait_for(self, records: Iterable[ParameterRecord], wait: bool = True) -> bool:
        """Return whether none of `records` waits for its update, with `wait` when that is so; raise the error that ended the
        update.

        Before an update in the backward is admitted, the backward may still read the parameters that it will change.
        """
        if not self.of and self.error is None:
            return True
        with self._changed:
            found = (self.of.get(record) for record in records)
            running = [one for one in found if one is not None and one.state is TicketState.RUNNING]
            if wait:
                self._changed.wait_for(lambda: all(one.state is TicketState.DONE for one in running))
            if self.error is not None:
                raise self.error
            return all(one.state is TicketState.DONE for one in running)

    def pin(self, record: ParameterRecord, names: Sequence[str]) -> dict[str, PinnedShard]:
        """Return pins of arrays of `record`: of the current version, or of the version that its update will create.
        Raises UsageError if the update failed."""
        store = self._state.store
        with self._changed:
            if self.error is not None:
                raise UsageError(TORN) from self.error
            ticket = self.of.get(record)
            if ticket is None or ticket.state is TicketState.DONE:
                return dict(store.snapshot(names).pins)
            late = {name: LatePin(store, name) for name in names}
            ticket.pins += late.values()
            return dict(late)


class ReadGuard:
    """Raises when a module is called whose parameters an update in the backward may have changed."""

    def __init__(
        self,
        model: nn.Module,
        records: Iterable[ParameterRecord],
        tickets: Callable[[], Mapping[ParameterRecord, UpdateTicket]],
    ) -> None:
        self._tickets = tickets
        """Returns the tickets of an update in the backward that `step()` has not ended."""
        self.recomputes = False
        """Whether a module ran without gradients in the model's last forward: reentrant checkpointing, which brings
        gradients in parts."""
        self.handles = [model.register_forward_pre_hook(ModuleHook(self._enter), prepend=True)]
        of = {record.parameter: record for record in records}
        for name, module in model.named_modules():
            own = [of[p] for p in module.parameters() if p in of]
            if own:
                before = partial(self._before, name or type(module).__name__, own)
                # Ahead of the hooks that gather them.
                self.handles.append(module.register_forward_pre_hook(ModuleHook(before), prepend=True))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.recomputes = not torch.is_grad_enabled()

    def _before(self, name: str, own: list[ParameterRecord], module: nn.Module, args: Any) -> None:
        self.recomputes |= not torch.is_grad_enabled()
        tickets = self._tickets()
        final = (tickets[one].state is not TicketState.EXPECTED for one in own if one in tickets) if tickets else ()
        if any(final):
            raise UsageError(
                f"module {name!r} is called after the backward updated parameters of it, and before step(): with "
                '"step_overlap": "backward" a forward between backward() and step(), and a recomputation after the '
                f"parameter's last gradient, would see updated values; {OTHER_MODES}"
            )

    def remove(self) -> None:
        """Remove the hooks from the modules."""
        for handle in self.handles:
            handle.remove()


class LatePin:
    """A pin of the version that a running update will make. See `PinnedShard`."""

    def __init__(self, store: Store, name: str) -> None:
        self._name = name
        self.local = store.local(name)
        self.tier = store.tier(name).name
        self.has_file = self.tier == "disk" and not store.tier(name).is_packed(name)
        self.version: int | None = None
        self._found: Future[PinnedShard] = Future()
        self._lock = threading.Lock()

    def resolve(self, store: Store, error: BaseException | None) -> None:
        """Pin the current version, or store the error that prevented it (called by the update)."""
        with self._lock:
            if self._found.done():  # released before
                return
            try:
                if error is not None:
                    raise error
                self._found.set_result(store.snapshot([self._name]).pins[self._name])
            except BaseException as raised:
                self._found.set_exception(raised)

    def copy_into(self, out: Bytes, grid: Grid, shard: int) -> None:
        """Wait for the update, then do as `PinnedShard.copy_into`. Raises UsageError if the update failed."""
        self._made().copy_into(out, grid, shard)

    def checksums(self, res: IoResources, grid: Grid, shard: int) -> tuple[int, ...]:
        """Wait for the update, then do as `PinnedShard.checksums`. Raises UsageError if the update failed."""
        return self._made().checksums(res, grid, shard)

    def publish(self, res: IoResources, path: str | Path, grid: Grid, shard: int, priority: Priority) -> ShardSummary:
        """Wait for the update, then do as `PinnedShard.publish`. Raises UsageError if the update failed."""
        return self._made().publish(res, path, grid, shard, priority)

    def _made(self) -> PinnedShard:
        error = self._found.exception()
        if error is not None:
            raise UsageError(
                f"array {self._name!r}: its update failed, so there is nothing to save: {error}"
            ) from error
        return self._found.result()

    def release(self) -> None:
        with self._lock:
            if not self._found.done():
                self._found.set_exception(UsageError(f"array {self._name!r}: the pin was released"))
            if self._found.exception() is None:
                self._found.result().release()
