"""A pinned version of the store's shards."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Self

from ..errors import UsageError
from ..format.arrays import Array
from ..io.closing import Closing
from .tiers import PinnedShard, Tier
from .tiers.memory import MemoryPin


class Snapshot(Closing):
    """A pinned version: the shards' contents when it was taken, whatever happens to them since."""

    def __init__(self, version: int, pins: dict[str, PinnedShard]) -> None:
        self.version = version
        self.pins = pins
        self.is_released = False

    def copied_when_changed(self) -> Self:
        """Return it; from now on a change of a shard in memory copies it first instead of waiting for `release`."""
        for pin in self.pins.values():
            if isinstance(pin, MemoryPin):
                pin.copy_when_changed()
        return self

    def move_out(self, rooms: MutableMapping[str, Array]) -> None:
        """Hold copies of the shards in memory from now on, in the memory of `rooms`, by array; missing ones are added."""
        for name, pin in self.pins.items():
            if isinstance(pin, MemoryPin):
                if name not in rooms:
                    rooms[name] = pin.make_room()
                pin.move_out(rooms[name])

    def restore(self, tiers: Mapping[str, Tier]) -> None:
        """Make the versions the present ones again; `tiers` has the tier of each array. See `TensorStore.restore`."""
        if self.is_released:
            raise UsageError("the snapshot was released, so that its versions are no longer kept: restore it before")
        for name, pin in self.pins.items():
            if tiers[name].name != pin.tier:
                raise UsageError(
                    f"array {name!r} is on tier {tiers[name].name!r}, and its pinned version on {pin.tier!r}"
                )
            tiers[name].restore(name, pin)

    def release(self) -> None:
        """Allow changes in place again; a second call does nothing."""
        self.is_released = True
        for pin in self.pins.values():
            pin.release()

    def close(self) -> None:
        """Do as `release`."""
        self.release()
