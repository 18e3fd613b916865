"""The optimizer in the backward, for step mode `backward`: the updater's thread applies gradients as they become final.

[Note: an update in the backward]
The update goes over the parameters in the order in which their gradients are expected, and takes each when its gradient
is final. One that is not expected, or is late, is updated when the backward is over. If the update falls behind, the
backward waits for it: no more than a few units' gradients are held.

A read of a parameter after its update had begun would get other bits than in the other modes. So it is an error:
a node of the graph that saved the parameter finds another version counter, and a module that is called again,
for recomputation in the backward or a forward before `step()`, is watched.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from zstore.errors import UsageError

from ..params.record import ParameterRecord
from ..runtime.signals import interrupts_wait
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
                '"step_overlap": "backward" neither a forward between backward() and step() nor a recomputation after the '
                'parameter\'s last gradient has the values of before; set it to "forward" or "none"'
            )

    def remove(self) -> None:
        """Remove the hooks from the modules."""
        for handle in self._handles:
            handle.remove()


class OptimizerInBackward:
    """Updates parameters in the last backward of a step, begun before their gradients exist: at most one such update is
    under way, from `start` to `finish` or `abandon`. The backward's thread tells it of each final gradient.

    See [Note: an update in the backward].
    """

    def __init__(self, model: nn.Module, state: OptimizerState, gradients: UnitGradients, updater: Updater) -> None:
        self.under_way = False
        """Whether an update has begun that `step()` has not ended yet."""
        self._state = state
        self._gradients = gradients
        self._updater = updater
        self._guard = ReadGuard(model, {record.parameter: record for record in state.scalars})
        self._settings = StepSettings(step=0, factor=1.0, groups=())
        self._changed = threading.Condition()
        self._final: dict[ParameterRecord, None] = {}
        self._admitted: set[ParameterRecord] = set()
        self._waiting: dict[ParameterRecord, int] = {}
        """Bytes of final gradients that the update did not take yet."""
        self._most_waiting_bytes = 0
        self._awaited: ParameterRecord | None = None
        """The record that the update waits for."""
        self._is_over = False
        """Whether the backward is over."""
        self._ended = False
        """Whether the update is."""

    def start(self, settings: StepSettings) -> None:
        """Start the update, which takes each record when its gradient is final (before the backward)."""
        if self.under_way:
            raise UsageError(
                'a second backward before step(), but with "step_overlap": "backward" the first one has updated the '
                'parameters: call step() after each backward, or set "step_overlap" to "forward" or "none"'
            )
        self._settings = settings
        self._final, self._admitted, self._waiting = {}, set(), {}
        self._awaited, self._is_over, self._ended = None, False, False
        self._most_waiting_bytes = max(LEAST_WAITING_BYTES, _UNITS_WAITING * self._gradients.largest_unit_bytes)
        with interrupts_wait():
            self._gradients.on_final = self._note_final
            self._gradients.comes_in_parts = self._guard.recomputes
            self._updater.start(self._update(self._gradients.expected), self._admit, self._note_end)
            self.under_way = True

    def _update(self, records: list[ParameterRecord]) -> Update:
        return Update(self._state, records, self._settings, self._take)

    # -- the backward's thread --------------------------------------------------------------------------------------

    def _note_final(self, record: ParameterRecord) -> None:
        self._guard.changed.add(record)
        torch.autograd.graph.increment_version(record.parameter)
        record.version += 1
        with self._changed:
            self._final[record] = None
            self._waiting[record] = self._gradients.waiting_bytes(record)
            self._changed.notify_all()
            self._changed.wait_for(self._has_room)

    def _has_room(self) -> bool:
        # An update that waits for the backward must not be waited for.
        starved = self._awaited is not None and self._awaited not in self._final
        return starved or self._ended or sum(self._waiting.values()) <= self._most_waiting_bytes

    def end_backward(self) -> None:
        """Let the update end with the final gradients."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._gradients.on_final = None

    # -- the updater's thread ---------------------------------------------------------------------------------------

    def _admit(self, record: ParameterRecord, wait: bool) -> bool:
        with self._changed:
            if wait:
                self._awaited = record
                self._changed.notify_all()
                self._changed.wait_for(lambda: record in self._final or self._is_over)
                self._awaited = None
            if record not in self._final:
                return False
        if not self._is_finite(record):
            with self._changed:
                self._waiting.pop(record, None)
                self._changed.notify_all()
            return False
        self._admitted.add(record)
        return True

    def _is_finite(self, record: ParameterRecord) -> bool:
        """Return whether a gradient is used: if it is not finite `step()` finds that in the norm, on every rank."""
        squares = self._gradients.squares(record)
        return squares is None or math.isfinite(squares)

    def _take(self, record: ParameterRecord) -> torch.Tensor | None:
        rows = self._gradients.take(record)
        with self._changed:
            self._waiting.pop(record, None)
            self._changed.notify_all()
        return rows

    def _note_end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    # -- step() -----------------------------------------------------------------------------------------------------

    def finish(self, now: StepSettings) -> None:
        """Return when every final gradient was used (after the backward).

        Raises UsageError if the settings `now` differ from those that the update began with.
        """
        self._updater.complete()
        used = [record for record in self._final if record in self._admitted or self._is_finite(record)]
        self._update([record for record in used if record not in self._admitted]).run()
        self._update(used).note_scalars(used)
        self._guard.changed.clear()
        self._check_settings(now)
        self.under_way = False

    def _check_settings(self, now: StepSettings) -> None:
        for number, (before, after) in enumerate(zip(self._settings.groups, now.groups, strict=True)):
            for name, value in before.items():
                if name in after and _plain(after[name]) != _plain(value):
                    raise UsageError(
                        f"parameter group {number}: {name} was {value!r} at the backward and is {after[name]!r} at step(), "
                        'but with "step_overlap": "backward" the update runs in the backward: set it before '
                        'engine.backward(), or set "step_overlap" to "forward" or "none"'
                    )

    def abandon(self) -> bool:
        """Stop after the updates that have begun; return whether anything was changed, here or on another rank."""
        with self._changed:
            self._final.clear()
        self.end_backward()
        self._updater.forget()
        self._guard.changed.clear()
        self.under_way = False
        return bool(self._admitted) or self._gradients.has_sent

    def close(self) -> None:
        """Remove the hooks from the modules."""
        self._guard.remove()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value
