"""One save that runs behind training: begun by all ranks or by none, and given up if a rank fails."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from zstore.checkpoint import SaveHandle
from zstore.io.closing import start_threads
from zstore.ranks.world import World

from ..runtime.signals import interrupts_wait

_END_WELL_S = 5.0
"""How long a save may go on after a rank failed: it may end well, if all ranks did their part before."""


class PendingSave:
    """The save under way, if any, of those that follow each other."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.handle: SaveHandle | None = None
        world.when_broken.append(self._give_up_later)

    def begin(self, start: Callable[[], SaveHandle]) -> SaveHandle:
        """Begin a save on every rank; raise on every rank the error that kept any from it (all ranks)."""
        error: Exception | None = None
        handle: SaveHandle | None = None
        try:
            # Ctrl-C here would leave pins that no save releases, or a save that nobody knows of.
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

    def _give_up_later(self) -> None:
        if (handle := self.handle) and not start_threads(1, partial(_give_up, handle), "zstore-give-up"):
            handle.cancel()  # the interpreter ends: there is no thread that could wait


def _give_up(handle: SaveHandle) -> None:
    if not handle.wait_for_end(_END_WELL_S):
        handle.cancel()
