"""Updates that begin in the backward, before the norm is known, and are undone if it asks for another step: step mode
`speculative`.

[Note: a speculative update]
An update that begins in the backward, before the norm is known, takes gradients as they are. Where the norm then asks for
something else (clipping, a step that is skipped), the changes are undone bit for bit and made again. On disk a pass over
a pinned shard writes a file of its own, so the former one is still there. Of an array in memory a copy is kept in host
memory, as far as the host budget has room; a parameter that finds no room is updated once the norm is known.
"""

from __future__ import annotations

from torch import nn

from zstore.format import Array
from zstore.store import Snapshot

from ..params.record import ParameterRecord
from ..zero.fetch import Fetcher
from ..zero.unit_gradients import UnitGradients
from .in_backward import UpdateInBackward
from .state import OptimizerState
from .update import StepSettings
from .updater import Updater


class Undo:
    """Keeps the state of parameters, and restores it. With `copies` that of arrays in memory too, as far as the host budget
    has room. See [Note: a speculative update]."""

    def __init__(self, state: OptimizerState, *, copies: bool) -> None:
        self._state = state
        self._copies = copies
        self._store = state.store
        self._kept: dict[ParameterRecord, Snapshot] = {}
        self._rooms: dict[str, Array] = {}
        """Memory of copies, by array: for every step, if no budget limits it."""

    def keep(self, record: ParameterRecord) -> bool:
        """Keep the state of a parameter as it is now; false if the host budget has no room for a copy, or if all of it is on
        an accelerator, which is done with the update sooner than with a copy."""
        names = list(self._state.all_arrays(record))
        in_memory = {name: tier for name in names if (tier := self._store.tier_of(name)) != "disk"}
        if not self._state.transfers.streams.device_is_host and list(in_memory.values()).count("device") == len(names):
            return False
        nbytes = sum(self._store.local(name).nbytes for name in in_memory if name not in self._rooms)
        free_bytes = self._store.budget.free_bytes
        if (in_memory and not self._copies) or (free_bytes is not None and nbytes > free_bytes):
            return False
        self._kept[record] = snapshot = self._store.snapshot(names)
        self._store.budget.take(nbytes)
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


class SpeculativeUpdate(UpdateInBackward):
    """An update in the backward that takes gradients as they are; `conclude` keeps or undoes it once the norm is known, and
    one that is abandoned has changed nothing. See [Note: a speculative update]."""

    keeps_gradients = True

    def __init__(
        self,
        model: nn.Module,
        state: OptimizerState,
        gradients: UnitGradients,
        updater: Updater,
        fetcher: Fetcher | None,
        *,
        copies: bool,
    ) -> None:
        super().__init__(model, state, gradients, updater, fetcher)
        self.num_kept = 0
        """Parameters whose update was kept, over all steps."""
        self.num_undone = 0
        """Steps whose update was undone."""
        self._undo = Undo(state, copies=copies)
        self._waits_for_norm = False
        """Whether the last update was undone, or would have been: then the next one waits for the norm."""

    def _begin(self) -> None:
        """Begin, but not after a step whose update was undone."""
        if not self._waits_for_norm:
            super()._begin()

    def _may_change(self, record: ParameterRecord) -> bool:
        return self._undo.keep(record)

    def conclude(self, settings: StepSettings | None) -> set[ParameterRecord]:
        """End the update (after the backward); return the parameters that have taken the step with its `settings`. If it began
        with others, or they are None since the step changes nothing, there are none, and all is as before the backward.
        """
        holds = settings is not None and self._is_same(settings)
        self._waits_for_norm = not holds
        if not self.under_way:
            return set()
        self.end_backward(drop=True)
        self._updater.join_or_raise()
        if holds:
            done = list(self._admitted)
            self._update(done).note_scalars(done)
            self.num_kept += len(done)
        else:
            done = []
            self._undo.restore(refresh=settings is None)
            self.num_undone += 1
        self._end()
        return set(done)

    def _is_same(self, settings: StepSettings) -> bool:
        """Return whether the settings of the step under way are those that its update was to begin with."""
        if self._settings.step != settings.step or self._settings.factor != settings.factor or settings.factors:
            return False
        return not any(self._changed_settings(settings))

    def abandon(self) -> bool:
        self.end_backward(drop=True)
        self._updater.reset()
        self._undo.restore(refresh=True)
        self._end()
        return False

    def _end(self) -> None:
        self._undo.release()
        super()._end()

    def close(self) -> None:
        """Remove the hooks from the modules, and free the memory of copies."""
        super().close()
        self._undo.close()
