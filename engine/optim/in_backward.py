"""Updates in the backward, in step mode `backward`: the updater's thread applies gradients as they become final.

[Note: an update in the backward]
The update goes over the parameters in the order in which their gradients are expected, and takes each when its gradient
is final. One that is not expected, or is late, is updated when the backward is over.

A read of a parameter after its update had begun would get other bits than in the other modes. So it is an error:
a node of the graph that saved the parameter finds another version counter, and a module that is called again,
for recomputation in the backward or a forward before `step()`, is watched.

A gradient is freed as its update takes it. If the update falls behind, the backward waits for it: no more than a few
units' gradients are held. The changes are final: an update that is abandoned has changed what it has.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from zstore.errors import UsageError

from ..params.record import ParameterRecord
from ..runtime.device import Event
from ..runtime.signals import interrupts_wait
from ..zero.fetch import Fetcher
from ..zero.hooks import ModuleHook
from ..zero.unit_gradients import UnitGradients
from .state import OptimizerState
from .update import StepSettings, Update
from .updater import Updater

LEAST_WAITING_BYTES = 32 * 1024 * 1024
"""Bytes of gradients that may wait for their update whatever the size of a unit."""
_UNITS_WAITING = 2
"""Units of the largest size whose gradients may wait, if these are more bytes."""


class ReadGuard:
    """Raises when a module is called whose parameters are `changed`."""

    def __init__(self, model: nn.Module, records: Mapping[nn.Parameter, ParameterRecord]) -> None:
        self.changed: set[ParameterRecord] = set()
        """Parameters whose update in this backward may have begun."""
        self.recomputes = False
        """Whether a module ran without gradients in the model's last forward: reentrant checkpointing, which brings
        gradients in parts."""
        self._handles = [model.register_forward_pre_hook(ModuleHook(self._enter), prepend=True)]
        for name, module in model.named_modules():
            own = [records[p] for p in module.parameters() if p in records]
            if own:
                before = partial(self._before, name or type(module).__name__, own)
                # Ahead of the hooks that gather them.
                self._handles.append(module.register_forward_pre_hook(ModuleHook(before), prepend=True))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.recomputes = not torch.is_grad_enabled()

    def _before(self, name: str, own: list[ParameterRecord], module: nn.Module, args: Any) -> None:
        self.recomputes |= not torch.is_grad_enabled()
        if self.changed and not self.changed.isdisjoint(own):
            raise UsageError(
                f"module {name!r} is called after the backward updated parameters of it, and before step(): with "
                '"step_overlap": "backward" a forward between backward() and step(), and a '
                'recomputation after the parameter\'s last gradient, would see updated values; set it to "forward" or "none"'
            )

    def remove(self) -> None:
        """Remove the hooks from the modules."""
        for handle in self._handles:
            handle.remove()


class FinalGradients:
    """The final gradients of a backward, which its thread puts here and the updater's takes. If more than `most_bytes` wait
    the backward waits too: not for an update that waits for the backward itself, nor for one that ended."""

    def __init__(self, most_bytes: int) -> None:
        self.changed = threading.Condition()
        self.records: dict[ParameterRecord, int] = {}
        """The parameters, and how many fetches whose headers are looked at late may have led to the gradient of each."""
        self._most_bytes = most_bytes
        self._waiting: dict[ParameterRecord, int] = {}
        """Bytes of gradients that the update did not take yet."""
        self._awaited: ParameterRecord | None = None
        """The record that the update waits for."""
        self._is_over = False
        """Whether the backward is over."""
        self._update_ended = False

    def put(self, record: ParameterRecord, num_unseen: int, nbytes: int) -> None:
        """Hand a gradient over, and wait for room (the backward's thread)."""
        with self.changed:
            self.records[record], self._waiting[record] = num_unseen, nbytes
            self.changed.notify_all()
            self.changed.wait_for(self._has_room)

    def _has_room(self) -> bool:
        # An update that waits for the backward must not be waited for, nor one that frees nothing.
        starved = self._awaited is not None and self._awaited not in self.records
        return starved or self._update_ended or sum(self._waiting.values()) <= self._most_bytes

    def end(self, *, drop: bool = False) -> None:
        """End the backward; with `drop` the update takes no more of them."""
        with self.changed:
            if drop:
                self.records.clear()
            self._is_over = True
            self.changed.notify_all()

    def find(self, record: ParameterRecord, *, wait: bool) -> int | None:
        """Return the number of fetches of a gradient; None if it is not final, even if with `wait` the backward was waited for
        (the updater's thread)."""
        with self.changed:
            if wait:
                self._awaited = record
                self.changed.notify_all()
                self.changed.wait_for(lambda: record in self.records or self._is_over)
                self._awaited = None
            return self.records.get(record)

    def note_taken(self, record: ParameterRecord) -> None:
        """Note that a gradient waits no longer."""
        with self.changed:
            self._waiting.pop(record, None)
            self.changed.notify_all()

    def note_end_of_update(self) -> None:
        """Note that the update takes no more."""
        with self.changed:
            self._update_ended = True
            self.changed.notify_all()


class UpdateInBackward:
    """Updates parameters in the last backward of a step, begun before their gradients exist: at most one such update is
    under way, from `start` until it is ended or abandoned. The backward's thread tells it of each final gradient.

    See [Note: an update in the backward].
    """

    def __init__(
        self,
        model: nn.Module,
        state: OptimizerState,
        gradients: UnitGradients,
        updater: Updater,
        fetcher: Fetcher | None = None,
    ) -> None:
        self.under_way = False
        """Whether an update has begun that `step()` has not ended yet."""
        self._state = state
        self._gradients = gradients
        self._updater = updater
        self._fetcher = fetcher
        self._guard = ReadGuard(model, {record.parameter: record for record in state.scalars})
        self._settings = StepSettings(step=0, factor=1.0, groups=())
        self._final = FinalGradients(0)
        self._last_reads: dict[ParameterRecord, Event] = {}
        """When each gradient was final: from then on nothing may read the parameter."""
        self._admitted: set[ParameterRecord] = set()

    def start(self, settings: StepSettings) -> None:
        """Start the update, which takes each record when its gradient is final (before the backward)."""
        if self.under_way:
            raise UsageError(
                'a second backward before step(), but with "step_overlap": "backward" the first one has '
                'updated the parameters: call step() after each backward, or set "step_overlap" to "forward" or "none"'
            )
        self._settings = settings
        most_bytes = max(LEAST_WAITING_BYTES, _UNITS_WAITING * self._gradients.largest_unit_bytes)
        self._final = FinalGradients(most_bytes)
        self._admitted, self._last_reads = set(), {}
        with interrupts_wait():
            self._gradients.on_final = self._note_final
            self._gradients.comes_in_parts = self._guard.recomputes
            update = self._update(self._gradients.expected)
            self._updater.start(update, self._admit, self._final.note_end_of_update)
            self.under_way = True

    def _update(self, records: list[ParameterRecord]) -> Update:
        return Update(self._state, records, self._settings, self._take, self._last_reads)

    # -- the backward's thread --------------------------------------------------------------------------------------

    def _note_final(self, record: ParameterRecord) -> None:
        self._guard.changed.add(record)
        torch.autograd.graph.increment_version(record.parameter)
        record.version += 1
        self._last_reads[record] = self._state.transfers.streams.record()  # from here on a read is an error
        num_unseen = 0 if self._fetcher is None else self._fetcher.num_unseen
        self._final.put(record, num_unseen, self._gradients.waiting_bytes(record))

    def end_backward(self, *, drop: bool = False) -> None:
        """Let the update end with the final gradients; with `drop`, with what it has begun."""
        self._final.end(drop=drop)
        self._gradients.on_final = None

    # -- the updater's thread ---------------------------------------------------------------------------------------

    def _admit(self, record: ParameterRecord, wait: bool) -> bool:
        if record in self._admitted:  # a pass that had no room for it asks again
            return True
        num_unseen = self._final.find(record, wait=wait)
        if num_unseen is None:
            return False
        if self._fetcher is not None:  # raises if values that could not be read led to the gradient
            self._fetcher.check_before(num_unseen)
        if not self._may_change(record):
            self._final.note_taken(record)  # it is left to `step()`
            return False
        self._admitted.add(record)
        return True

    def _may_change(self, record: ParameterRecord) -> bool:
        """Return whether the gradient is finite: if it is not `step()` finds that in the norm, on every rank."""
        squares = self._gradients.squares(record)
        return squares is None or math.isfinite(squares)

    def _take(self, record: ParameterRecord) -> torch.Tensor | None:
        rows = self._gradients.take(record)
        self._final.note_taken(record)
        return rows

    # -- step() -----------------------------------------------------------------------------------------------------

    def _changed_settings(self, now: StepSettings) -> Iterator[tuple[int, str, Any, Any]]:
        """Yield group, name and both values of the settings that are others `now` than when the update began."""
        for number, (before, after) in enumerate(zip(self._settings.groups, now.groups, strict=True)):
            for name, value in before.items():
                if name in after and _plain(after[name]) != _plain(value):
                    yield number, name, value, after[name]

    def finish(self, now: StepSettings) -> None:
        """Return when every final gradient was used (after the backward).

        Raises UsageError if the settings `now` differ from those that the update began with.
        """
        self._updater.join_or_raise()
        self._last_reads = {}  # who called the backward may have read parameters since
        used = [record for record in self._final.records if record in self._admitted or self._may_change(record)]
        self._update([record for record in used if record not in self._admitted]).run()
        self._update(used).note_scalars(used)
        self._guard.changed.clear()
        for number, name, before, after in self._changed_settings(now):
            raise UsageError(
                f"parameter group {number}: {name} was {before!r} at the backward and is {after!r} at step(), "
                'but with "step_overlap": "backward" the update runs in the backward: set it before '
                'engine.backward(), or set "step_overlap" to "forward" or "none"'
            )
        self.under_way = False

    def abandon(self) -> bool:
        """Stop after the updates that have begun; return whether anything is changed, here or on another rank."""
        self.end_backward(drop=True)
        self._updater.reset()
        self._guard.changed.clear()
        self.under_way = False
        return bool(self._admitted) or self._gradients.has_sent

    def close(self) -> None:
        """Remove the hooks from the modules."""
        self._guard.remove()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value
