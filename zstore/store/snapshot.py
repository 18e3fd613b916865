"""A pinned version of the store's shards."""

from __future__ import annotations

from ..io.closing import Closing
from .tiers import PinnedShard


class Snapshot(Closing):
    """A pinned version: the shards' contents when it was taken, whatever happens to them since."""

    def __init__(self, version: int, pins: dict[str, PinnedShard]) -> None:
        self.version = version
        self.pins = pins

    def release(self) -> None:
        """Allow changes in place again; a second call does nothing."""
        for pin in self.pins.values():
            pin.release()

    def close(self) -> None:
        """Do as `release`."""
        self.release()
