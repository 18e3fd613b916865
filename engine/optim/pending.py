"""The update under way, wherever it runs, and whether the state is whole.

[Note: which state is whole]
What stops half way leaves the state torn: a mixture of two, which is neither trained nor saved until a load replaces it.

| that fails | the state |
|---|---|
| a block of `changing`: an update in `step()`, a write of a caller, a load | torn |
| an update behind `step()` | torn, as soon as somebody waits for it |
| `step()` before its update, or a backward | that of the step before |
| the same with an update in the backward under way | torn: if it changed anything on any rank, and in `step()` always |

[Note: who waits for an update]
`PendingUpdate` knows of all ranks, and of updates in the backward; `Updater` is this rank's thread.

| call | waits for | an error of the update is |
|---|---|---|
| `PendingUpdate.complete` | an update behind `step()`, on all ranks; none in a backward | raised on every rank |
| `PendingUpdate.wait`, then `agree` | the same: on this rank, then with the others | returned, then raised on every rank |
| `PendingUpdate.forget` | the end of any update; one in a backward is abandoned | forgotten: the state is replaced |
| `Updater.wait_for` | the updates of some parameters that are read next | raised |
| `Updater.join`, `join_or_raise`, `reset` | the end of any update | returned, raised, forgotten |
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from zstore.errors import UsageError
from zstore.ranks.world import World

from ..zero.fetch import Fetcher
from ..zero.gradients import Gradients
from ..zero.unit_gradients import UnitGradients
from .in_backward import UpdateInBackward
from .state import OptimizerState
from .update import Update
from .updater import StepMode, Updater

_log = logging.getLogger("zstore")


class PendingUpdate:
    """The update under way, if any, and whether the state is whole. See [Note: which state is whole].

    Updates run in the backward if the step mode says so and gradients are final there; `fetcher` brings the values that
    gradients are made of, once their update is done."""

    def __init__(
        self,
        model: nn.Module,
        state: OptimizerState,
        gradients: Gradients,
        world: World,
        mode: StepMode,
        fetcher: Fetcher | None,
    ) -> None:
        self.world = world
        self.updater = Updater(state.store, state.transfers)
        self.in_backward: UpdateInBackward | None = None
        if fetcher is not None:
            fetcher.ready = self.updater.wait_for
        # Gradients that are reduced once a step (stages 0 and 1 with more ranks) are final at its end alone.
        if mode is StepMode.BACKWARD and isinstance(gradients, UnitGradients):
            self.in_backward = UpdateInBackward(model, state, gradients, self.updater, fetcher)
        self.torn = False
        """Whether the state is a mixture."""
        self._behind = False
        """Whether an update was started behind `step()` whose end the ranks have not agreed on yet."""

    @property
    def is_in_backward(self) -> bool:
        """Whether an update in the backward is under way, which `step()` ends."""
        return self.in_backward is not None and self.in_backward.under_way

    def start_behind(self, update: Update) -> None:
        """Start an update behind `step()`."""
        self._behind = True
        self.updater.start(update)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Let the state be torn if the block, which changes it, does not come to its end."""
        self.torn = True
        yield
        self.torn = False  # not after an error

    def abandon(self, *, in_step: bool = False) -> bool:
        """Abandon the update of a backward or, `in_step`, of a step that failed; return whether that tears the state."""
        if self.in_backward is None or not self.in_backward.under_way:
            return False
        before, self.torn = self.torn, True  # also if this is interrupted
        # What this rank did not change by the end of the backward, another did.
        changed = self.in_backward.abandon() or in_step
        self.torn = before or changed
        return changed

    def complete(self) -> None:
        """Wait until no update is under way but one in a backward (all ranks). See [Note: who waits for an update]."""
        if not self.is_in_backward:
            self.agree(self.wait())

    def wait(self) -> BaseException | None:
        """Wait for the update that runs behind; return the error that ended it, to be agreed on. Alone, raise it."""
        error = self.updater.join() if self._behind else None
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
        self.updater.reset()

    def close(self) -> None:
        """End the updater's thread."""
        # Before all else: an update that waits for a backward would never end.
        self.abandon()
        error = self.updater.join()
        if error is not None and not self.torn:
            _log.warning("the last update failed, and nobody had asked for it yet: %s", error)
        self.updater.close()
        if self.in_backward is not None:
            self.in_backward.close()
