"""A pinned version of the store's shards."""

from __future__ import annotations

from typing import Self

from ..io.closing import Closing
from .tiers import PinnedShard
from .tiers.memory import MemoryPin


class Snapshot(Closing):
    """A pinned version: the shards' contents when it was taken, whatever happens to them since."""

    def __init__(self, version: int, pins: dict[str, PinnedShard]) -> None:
        self.version = version
        self.pins = pins

    def copied_when_changed(self) -> Self:
        """Return it; from now on a change of a shard in memory copies it first instead of waiting for `release`."""
        for pin in self.pins.values():
            if isinstance(pin, MemoryPin):
                pin.copy_when_changed()
        return self

    def release(self) -> None:
        """Allow changes in place again; a second call does nothing."""
        for pin in self.pins.values():
            pin.release()

    def close(self) -> None:
        """Do as `release`."""
        self.release()
