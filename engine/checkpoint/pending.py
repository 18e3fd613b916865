"""The save that runs behind training, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from zstore.checkpoint import SaveHandle, SaveSummary
from zstore.io.closing import start_threads
from zstore.ranks.world import World

from ..runtime.signals import interrupts_wait

_END_WELL_S = 5.0
"""How long a save may go on after a rank failed: it may end well, if all ranks did their part before."""


class PendingSave:
    """A save of all ranks: begun by all of them or by none, and given up if a rank fails."""

    def __init__(self, world: World) -> None:
        self.handle: SaveHandle | None = None
        self._world = world
        world.when_broken.append(self._give_up_later)

    def begin(self, start: Callable[[], SaveHandle]) -> SaveHandle:
        """Begin a save on every rank; raise on every rank the error that kept any from it (all ranks)."""
        error: Exception | None = None
        handle: SaveHandle | None = None
        try:
            # Ctrl-C before it is known would leave pins that no save releases, or a save for which nobody waits.
            with interrupts_wait():
                handle = self.handle = start()
        except Exception as raised:
            error = raised
        try:
            self._world.raise_together(error)
        except BaseException:
            self.handle = None
            if handle is not None:
                handle.cancel()
                handle.wait_for_end(_END_WELL_S)  # until then the next save takes its folder for a living save's
            raise
        if handle is None:
            raise RuntimeError("the save did not begin")
        return handle

    def complete(self) -> SaveSummary | None:
        """Return the summary of the save under way once it has ended, None if there is none; raise its error.

        The wait may be interrupted: the save goes on, and the next call waits again.
        """
        handle = self.handle
        if handle is None:
            return None
        handle.wait_for_end()
        self.handle = None
        return handle.wait()

    def _give_up_later(self) -> None:
        if (handle := self.handle) and not start_threads(1, partial(_give_up, handle), "zstore-give-up"):
            handle.cancel()  # the interpreter ends: there is no thread that could wait


def _give_up(handle: SaveHandle) -> None:
    if not handle.wait_for_end(_END_WELL_S):
        handle.cancel()
