"""The update under way; in step modes `backward` and `speculative` it runs in the backward, where the updater's thread
applies gradients as they become final.

[Note: an update in the backward]
The update goes over the parameters in the order in which their gradients are expected, and takes each when its gradient
is final. One that is not expected, or is late, is updated when the backward is over. If the update falls behind, the
backward waits for it: no more than a few units' gradients are held.

A read of a parameter after its update had begun would get other bits than in the other modes. So it is an error:
a node of the graph that saved the parameter finds another version counter, and a module that is called again,
for recomputation in the backward or a forward before `step()`, is watched.

[Note: a speculative update]
An update that begins in the backward, before the norm is known, takes gradients as they are. Where the norm then asks for
something else (clipping, a step that is skipped), the changes are undone bit for bit and made again. On disk a pass over
a pinned shard writes a file of its own, so the former one is still there. Of an array in memory a copy is kept in host
memory, as far as the host budget has room; a parameter that finds no room is updated once the norm is known.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from zstore.errors import UsageError
from zstore.format import Array
from zstore.ranks.world import World
from zstore.store import Snapshot

from ..params.record import ParameterRecord
from ..runtime.signals import interrupts_wait
from ..zero.fetch import Fetcher
from ..zero.gradients import Gradients
from ..zero.hooks import ModuleHook
from ..zero.unit_gradients import UnitGradients
from .state import OptimizerState
from .update import StepSettings, Update
from .updater import StepMode, Updater

_log = logging.getLogger("zstore")

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
                '"step_overlap": "backward" or "speculative" neither a forward between backward() and step() nor a '
                'recomputation after the parameter\'s last gradient has the values of before; set it to "forward" or "none"'
            )

    def remove(self) -> None:
        """Remove the hooks from the modules."""
        for handle in self._handles:
            handle.remove()


class Undo:
    """Keeps the state of parameters, and restores it. With `copies` that of arrays in memory too, as far as the host budget
    has room. See [Note: a speculative update]."""

    def __init__(self, state: OptimizerState, *, copies: bool = True) -> None:
        self._state = state
        self._copies = copies
        self._store = state.store
        self._kept: dict[ParameterRecord, Snapshot] = {}
        self._rooms: dict[str, Array] = {}
        """Memory of copies, by array: for every step, if no budget limits it."""

    def keep(self, record: ParameterRecord) -> bool:
        """Keep the state of a parameter as it is now; false if the host budget has no room for a copy, or if all of it is on
        an accelerator, which is done with the update sooner than with a copy."""
        names = self._state.changed_arrays(record)
        in_memory = {name: tier for name in names if (tier := self._store.tier_of(name)) != "disk"}
        if not self._state.transfers.streams.device_is_host and list(in_memory.values()).count("device") == len(names):
            return False
        nbytes = sum(self._store.local(name).nbytes for name in in_memory if name not in self._rooms)
        free_bytes = self._store.budget.free_bytes
        if (in_memory and not self._copies) or (free_bytes is not None and nbytes > free_bytes):
            return False
        self._store.budget.take(nbytes)
        self._kept[record] = snapshot = self._store.snapshot(names)
        snapshot.move_out(self._rooms)
        return True

    def restore(self, *, refresh: bool) -> None:
        """Let the kept state be the present one; with `refresh` also the parameters' own rows, which are cast from it."""
        for snapshot in self._kept.values():
            self._store.restore(snapshot)
        if refresh:
            self._state.refresh_parameters([record for record in self._kept if record.rest is None])

    def release(self) -> None:
        """Forget the kept state."""
        while self._kept:
            self._kept.popitem()[1].release()
        if self._store.budget.limit_bytes is not None:  # others may need it between the steps
            self.close()

    def close(self) -> None:
        """Free the memory of copies."""
        self._store.budget.release(sum(room.nbytes for room in self._rooms.values()))
        self._rooms.clear()


class OptimizerInBackward:
    """Updates parameters in the last backward of a step, begun before their gradients exist: at most one such update is
    under way, from `start` to `finish` or `abandon`. The backward's thread tells it of each final gradient.

    With `undo` it is speculative: `conclude` takes the place of `finish`. See [Note: an update in the backward].
    """

    def __init__(
        self,
        model: nn.Module,
        state: OptimizerState,
        gradients: UnitGradients,
        updater: Updater,
        undo: Undo | None = None,
        fetcher: Fetcher | None = None,
    ) -> None:
        self.undo = undo
        """Undoes updates that were begun with other settings than the step's; None: that is an error."""
        self.num_kept = 0
        """Parameters whose speculative update was kept, over all steps."""
        self.num_undone = 0
        """Steps whose speculative update was undone."""
        self._waits_for_norm = False
        """Whether the last speculative update was undone, or would have been: then the next one waits for the norm."""
        self.under_way = False
        """Whether an update has begun that `step()` has not ended yet."""
        self._state = state
        self._gradients = gradients
        self._updater = updater
        self._fetcher = fetcher
        self._guard = ReadGuard(model, {record.parameter: record for record in state.scalars})
        self._settings = StepSettings(step=0, factor=1.0, groups=())
        self._changed = threading.Condition()
        self._final: dict[ParameterRecord, int] = {}
        """Final gradients, and how many fetches whose headers are looked at late may have led to each."""
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
        """Start the update, which takes each record when its gradient is final (before the backward). A speculative one does
        not start after a step in which it was in vain, and while somebody watches the tiles of updates."""
        if self.under_way:
            raise UsageError(
                'a second backward before step(), but with "step_overlap": "backward" or "speculative" the first one has '
                'updated the parameters: call step() after each backward, or set "step_overlap" to "forward" or "none"'
            )
        self._settings = replace(settings, keeps_gradients=self.undo is not None)
        if self.undo is not None and (self._waits_for_norm or self._state.observer is not None):
            return
        self._final, self._admitted, self._waiting = {}, set(), {}
        self._awaited, self._is_over, self._ended = None, False, False
        self._most_waiting_bytes = max(LEAST_WAITING_BYTES, _UNITS_WAITING * self._gradients.largest_unit_bytes)
        with interrupts_wait():
            self._gradients.on_final = self._note_final
            self._gradients.comes_in_parts = self._guard.recomputes
            self._updater.start(self._update(self._gradients.expected), self._admit, self._note_end)
            self.under_way = True

    def _update(self, records: list[ParameterRecord]) -> Update:
        return Update(self._state, records, self._settings, self._take, self._gradients.taken)

    # -- the backward's thread --------------------------------------------------------------------------------------

    def _note_final(self, record: ParameterRecord) -> None:
        self._guard.changed.add(record)
        torch.autograd.graph.increment_version(record.parameter)
        record.version += 1
        self._gradients.taken[record] = self._state.transfers.streams.record()  # from here on a read is an error
        with self._changed:
            self._final[record] = 0 if self._fetcher is None else self._fetcher.num_unseen
            self._waiting[record] = self._gradients.waiting_bytes(record)
            self._changed.notify_all()
            self._changed.wait_for(self._has_room)

    def _has_room(self) -> bool:
        # An update that waits for the backward must not be waited for, nor one that frees nothing.
        starved = self._awaited is not None and self._awaited not in self._final
        return (
            self.undo is not None or starved or self._ended or sum(self._waiting.values()) <= self._most_waiting_bytes
        )

    def end_backward(self) -> None:
        """Let the update end with the final gradients."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._gradients.on_final = None

    # -- the updater's thread ---------------------------------------------------------------------------------------

    def _admit(self, record: ParameterRecord, wait: bool) -> bool:
        if record in self._admitted:  # a pass that had no room for it asks again
            return True
        with self._changed:
            if wait:
                self._awaited = record
                self._changed.notify_all()
                self._changed.wait_for(lambda: record in self._final or self._is_over)
                self._awaited = None
            number = self._final.get(record)
            if number is None:
                return False
        if self._fetcher is not None:  # raises if values that could not be read led to the gradient
            self._fetcher.check_before(number)
        if self.undo is not None:
            if not self.undo.keep(record):
                return False
        elif not self._is_finite(record):
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
        rows = self._gradients.take(record) if self.undo is None else self._gradients.take(record, keep=True)
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
        self._gradients.taken.clear()  # who called the backward may have read parameters since
        used = [record for record in self._final if record in self._admitted or self._is_finite(record)]
        self._update([record for record in used if record not in self._admitted]).run()
        self._update(used).note_scalars(used)
        self._guard.changed.clear()
        self._check_settings(now)
        self.under_way = False

    def conclude(self, settings: StepSettings | None) -> set[ParameterRecord]:
        """End a speculative update (after the backward); return the parameters that have taken the step with its
        `settings`. If it began with others, or they are None since the step changes nothing, there are none, and all is as
        before the backward.
        """
        if self.undo is None:
            return set()
        holds = settings is not None and self._is_same(settings)
        self._waits_for_norm = not holds
        if not self.under_way:
            return set()
        self._stop()
        self._updater.complete()
        if holds:
            done = list(self._admitted)
            self._update(done).note_scalars(done)
            self.num_kept += len(done)
        else:
            done = []
            self.undo.restore(refresh=settings is None)
            self.num_undone += 1
        self._end()
        return set(done)

    def _is_same(self, settings: StepSettings) -> bool:
        """Return whether the settings of the step under way are those that its update was to begin with."""
        if self._settings.step != settings.step or self._settings.factor != settings.factor or settings.factors:
            return False
        return not any(self._changed_settings(settings))

    def _check_settings(self, now: StepSettings) -> None:
        for number, name, before, after in self._changed_settings(now):
            raise UsageError(
                f"parameter group {number}: {name} was {before!r} at the backward and is {after!r} at step(), "
                'but with "step_overlap": "backward" the update runs in the backward: set it before '
                'engine.backward(), or set "step_overlap" to "forward" or "none"'
            )

    def _changed_settings(self, now: StepSettings) -> Iterator[tuple[int, str, Any, Any]]:
        """Yield group, name and both values of the settings that are others `now` than when the update began."""
        for number, (before, after) in enumerate(zip(self._settings.groups, now.groups, strict=True)):
            for name, value in before.items():
                if name in after and _plain(after[name]) != _plain(value):
                    yield number, name, value, after[name]

    def abandon(self) -> bool:
        """Stop after the updates that have begun; return whether anything is changed, here or on another rank."""
        self._stop()
        self._updater.forget()
        if self.undo is not None:
            self.undo.restore(refresh=True)
        self._end()
        return self.undo is None and (bool(self._admitted) or self._gradients.has_sent)

    def _stop(self) -> None:
        """Let the update end with what it has begun."""
        with self._changed:
            self._final.clear()
        self.end_backward()

    def _end(self) -> None:
        if self.undo is not None:
            self.undo.release()
        self._guard.changed.clear()
        self.under_way = False

    def close(self) -> None:
        """Remove the hooks from the modules, and free the memory of copies."""
        self._guard.remove()
        if self.undo is not None:
            self.undo.close()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


class PendingUpdate:
    """The update under way, if any, and whether the state is whole: a step that stopped half way leaves a mixture, which must
    be neither trained nor saved."""

    def __init__(self, world: World, updater: Updater, in_backward: OptimizerInBackward | None) -> None:
        self.world = world
        self.updater = updater
        self.in_backward = in_backward
        """Updates in the last backward of a step. None in other step modes, and if gradients are reduced once a step
        (stages 0 and 1 with more ranks): they are final at its end alone."""
        self.torn = False
        """Whether a step or a load stopped half way: the state is a mixture until a load replaces it."""
        self._behind = False
        """Whether an update was started behind `step()` whose end the ranks have not agreed on yet."""

    @property
    def is_in_backward(self) -> bool:
        """Whether an update in the backward is under way, which `step()` ends."""
        return self.in_backward is not None and self.in_backward.under_way

    @property
    def can_undo(self) -> bool:
        """Whether an update in the backward leaves no trace if it is abandoned."""
        return self.in_backward is not None and self.in_backward.undo is not None

    def conclude(self, settings: StepSettings | None) -> set[ParameterRecord]:
        """End a speculative update, if there is one; see `OptimizerInBackward.conclude`."""
        return set() if self.in_backward is None else self.in_backward.conclude(settings)

    def start_behind(self, update: Update) -> None:
        """Start an update behind `step()`."""
        self._behind = True
        self.updater.start(update)

    def abandon(self) -> bool:
        """Abandon an update in a failed backward; return whether it changed anything, so that the state is torn."""
        if self.in_backward is None or not self.in_backward.under_way:
            return False
        before, self.torn = self.torn, True  # also if this is interrupted
        changed = self.in_backward.abandon()
        self.torn = before or changed
        return changed

    def complete(self) -> None:
        """Wait until no update is under way but one in a backward (all ranks).

        Raises, on every rank, the error that ended the update on any, and the state is torn.
        """
        if not self.is_in_backward:
            self.agree(self.wait())

    def wait(self) -> BaseException | None:
        """Wait for the update that runs behind; return the error that ended it, to be agreed on. Alone, raise it."""
        error = self.updater.wait() if self._behind else None
        self.torn |= error is not None
        if error is not None and self.world.world_size == 1:
            raise error
        return error

    def agree(self, error: BaseException | None) -> None:
        """Raise the error that ended the update behind on any rank on every rank (all ranks)."""
        if not self._behind:
            return
        self._behind = False
        try:
            self.world.raise_together(error)
        except BaseException:
            self.torn = True
            raise

    def settle(self) -> None:
        """Wait until no update runs behind; if one failed on any rank the state is torn on all (all ranks)."""
        try:
            self.complete()
        except Exception as error:
            _log.warning("the update that was under way failed: %s", error)

    def require_whole(self) -> None:
        """Raise UsageError if the state is a mixture, which must be neither trained nor saved."""
        # The error that ended an update in the backward is raised in step(), on every rank.
        if self.torn or (not self.is_in_backward and self.updater.error is not None):
            raise UsageError(
                "a step or a load stopped half way, so that the state is a mixture of two: load a checkpoint before going on"
            ) from self.updater.error

    def forget(self) -> None:
        """Wait for the end of an update, and forget its changes: a load replaces the state."""
        self.abandon()
        self.updater.forget()

    def close(self) -> None:
        """End the updater's thread."""
        # Before all else: an update that waits for a backward would never end.
        self.abandon()
        error = self.updater.wait()
        if error is not None and not self.torn:
            _log.warning("the last update failed, and nobody had asked for it yet: %s", error)
        self.updater.close()
        if self.in_backward is not None:
            self.in_backward.close()


def pending_update(
    model: nn.Module,
    state: OptimizerState,
    gradients: Gradients,
    world: World,
    mode: StepMode,
    *,
    copies: bool,
    fetcher: Fetcher | None,
) -> PendingUpdate:
    """Return the updates of a run, in the backward if the step mode says so and gradients are final there; `copies` as in
    `Undo`, and `fetcher` brings the values that gradients are made of, once their update is done."""
    updater = Updater(state.store, state.transfers)
    if fetcher is not None:
        fetcher.ready = updater.wait_for
    if not mode.runs_in_backward or not isinstance(gradients, UnitGradients):
        return PendingUpdate(world, updater, None)
    undo = Undo(state, copies=copies) if mode is StepMode.SPECULATIVE else None
    return PendingUpdate(world, updater, OptimizerInBackward(model, state, gradients, updater, undo, fetcher))
