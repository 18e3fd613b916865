"""The order of step snapshots: each is committed before the state changes again.

[Note: step snapshots]
With `durability: "step"` each step is followed by a snapshot, a checkpoint in all but name, in a folder of its own. It is made
without waiting for the drive, and without changing what it reads:

    step() of step t     changes the state to version t, and begins its snapshot
    behind               each rank saves its part; rank 0 commits when all have, and removes the snapshot of t-1
    step t+1             before its first change each rank waits until the snapshot of t is committed

So version t-1 is whole on all ranks until version t is, and a kill takes back only the step under way, and the one before
it if that was not committed yet. Slow ranks delay rank 0's commit, and rank 0 the others: no rank changes version t before
all have saved it. If a snapshot fails, as on a full disk, the next step raises that before it changes anything.

Who takes snapshots says how they are saved, what their number is, and when the state is about to change: an engine in
`snapshots`, an offloaded optimizer in `adapters/torch_optim/snapshots`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

from .pending import Handle, Pending


@dataclass(kw_only=True)
class SnapshotOrder(Generic[Handle]):
    """Lets one snapshot follow the other. See [Note: step snapshots]."""

    pending: Pending[Handle]
    """The snapshot under way."""
    committed: Callable[[Any], None] | None = None
    """Called with the result of each that was committed, by `complete`."""
    step: int = 0
    """Step of the snapshot that was begun last; 0 before the first."""
    committed_step: int | None = None
    """Step of the last snapshot that is known to be committed."""
    stall_s: float = 0.0
    """Seconds for which snapshots delayed training."""

    def begin(self, step: int, start: Callable[[], Handle]) -> None:
        """Begin the snapshot of the step that ended, once the one before is committed."""
        self.complete()
        started = time.perf_counter()
        self.step = step
        self.pending.begin(start)
        self.stall_s += time.perf_counter() - started

    def complete(self) -> None:
        """Return when the snapshot under way is committed; raise its error on every rank. It may be interrupted."""
        if self.pending.handle is None:
            return
        started = time.perf_counter()
        try:
            result = self.pending.complete()
        except Exception as error:
            error.add_note(
                f"This happened while the snapshot of step {self.step} was taken; nothing has changed since, and the snapshot "
                "before it is intact."
            )
            raise
        finally:
            self.stall_s += time.perf_counter() - started
        self.committed_step = self.step
        if self.committed is not None:
            self.committed(result)
