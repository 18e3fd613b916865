"""The contract of every tier: how a rank's shard is kept, and how passes and pins reach it; views of it as numpy arrays.

[Note: a pass]
All bulk access is a pass over whole chunks, driven by `zstore.store.stream` from one thread per shard:

    begin(name, mode)                      once; may wait for a pin of memory to be released
      DiskTier.load(pieces, ...)           of spans, ahead of their use, into a buffer sized by `span_bytes`
      views(name, span, buffer, mode)      when the load's ticket is done: one view a chunk, asked for one by one; each is
                                           checked as it is given, and sealed when the next one is asked for: in cache
      DiskTier.save(pieces, ...)           after the consumer changed all views (not in mode READ)
    end(name, ok)                          once (not in mode READ), when every ticket is done; only now a new version
                                           is the present one

One pass at a time changes a shard. While it does so in place, the shard can be neither read nor pinned: its contents
are neither the old version nor the new one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...checkpoint.part import PinnedShard
from ...errors import UsageError
from ...format.arrays import Array, Bytes, LocalShard
from ...io.closing import Closing

if TYPE_CHECKING:
    import torch

View = Any
"""A 1-D numpy array (host, disk) or torch tensor (device) of the array's data type."""


class Mode(Enum):
    """What a pass does with each chunk."""

    READ = "read"
    """Load it; the consumer changes nothing."""
    UPDATE = "update"
    """Load it and save the changes."""
    FILL = "fill"
    """Do not load it; the consumer sets every element."""


@dataclass(frozen=True)
class ChunkSpan:
    """Adjacent chunks of a shard that are transferred together."""

    first_chunk: int
    num_chunks: int

    @property
    def chunks(self) -> range:
        """Numbers of the chunks."""
        return range(self.first_chunk, self.first_chunk + self.num_chunks)


@dataclass(frozen=True)
class Piece:
    """A span of an array in memory that several share."""

    name: str
    span: ChunkSpan
    first: int
    """First element there."""
    nbytes: int

    @property
    def kind(self) -> str:
        """The first part of the array's name."""
        return self.name.partition("/")[0]

    def of(self, memory: Bytes) -> Bytes:
        """Return its bytes."""
        return memory[self.first : self.first + self.nbytes]


@dataclass(frozen=True)
class Tile:
    """One chunk, or in memory several, of every array of a group: local flat elements `[first, stop)` without padding.

    `views` are 1-D, in the group's order: numpy arrays from the host and disk tiers, torch tensors from the device tier.
    They are valid until the next tile is asked for; without `ends_buffer` those of a pass that only reads stay valid until
    the tile after the next one that has it.
    """

    group: int
    first: int
    stop: int
    views: tuple[View, ...]
    ends_buffer: bool = True
    """Whether the memory of the views is used again when the next tile is asked for."""


@dataclass(eq=False)
class Snapshot(Closing):
    """A pinned version: the shards' contents when it was taken, whatever happens to them since."""

    pins: dict[str, PinnedShard]

    def release(self) -> None:
        """Allow changes in place again; a second call does nothing."""
        for pin in self.pins.values():
            pin.release()

    def close(self) -> None:
        """Do as `release`."""
        self.release()


TierName = Literal["device", "host", "pinned", "disk"]
"""Pinned: host memory that is registered with CUDA if the options say so; `tier_of` calls it host too."""


class Tier(ABC):
    """A place for shards. See [Note: a pass] for the order of calls."""

    name: TierName

    @abstractmethod
    def create(self, local: LocalShard, memory: torch.Tensor | None = None) -> None:
        """Register the shard, all zeros, or kept in `memory` if the tier can adopt it."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Forget a shard that no pass is over, and free its space. Raises UsageError if it is pinned or changed."""

    @abstractmethod
    def rename(self, name: str, local: LocalShard) -> None:
        """Make a shard that no pass is over that of another array, laid out alike. Raises UsageError as `remove` does."""

    def is_pinned_in_place(self, name: str) -> bool:
        """Tell whether `begin` for a change would have to wait for a pin."""
        return False

    @abstractmethod
    def version(self, name: str) -> int:
        """Return a number unique to the shard's contents: while it is the same, no pass changed the shard."""

    def is_packed(self, name: str) -> bool:
        """Tell whether the shard shares its file with others."""
        return False

    def place(self, name: str) -> tuple[str, int]:
        """Return a key that sorts shards that share a file by their place in it; all others are alike."""
        return "", 0

    @abstractmethod
    def begin(self, name: str, mode: Mode) -> None:
        """Start a pass. Raises UsageError while another pass changes the shard in place."""

    def span_bytes(self, name: str, num_chunks: int) -> int:
        """Return the buffer bytes that a span of so many chunks needs; 0 if views lie in the tier's own memory."""
        return 0

    @abstractmethod
    def views(self, name: str, span: ChunkSpan, buffer: Bytes, mode: Mode) -> Iterator[View]:
        """Yield a view of each chunk's elements, without padding, that is right when it is yielded; changes to it are recorded
        when the next one is asked for. Raises CorruptionError."""

    @abstractmethod
    def end(self, name: str, ok: bool) -> None:
        """End a pass that changes; with `ok` false the shard keeps its former version if the tier still has it."""

    @abstractmethod
    def pin(self, name: str) -> PinnedShard:
        """Pin the present version. Raises UsageError while a pass changes it in place."""

    @abstractmethod
    def close(self) -> None:
        """Release all memory and files."""


_versions = count(1)


def new_version() -> int:
    """Return a number that no version of a shard had before in this process."""
    return next(_versions)


def being_changed(name: str) -> UsageError:
    """Return the error of a pass or a pin during a change."""
    return UsageError(f"array {name!r} is being changed by a pass: exhaust that or close it first")


def copy_into(view: View, source: Array) -> None:
    """Copy `source`, of the view's size and data type, into a view of any tier."""
    if isinstance(view, np.ndarray):
        view[:] = source
    else:
        import torch

        # torch warns of memory that it might write to.
        writable = source if source.flags.writeable else source.copy()
        view.view(torch.uint8).copy_(torch.from_numpy(writable.view(np.uint8)))


def copy_out(view: View, out: Array) -> None:
    """Copy a view of any tier into host memory of as many bytes, of any shape; if `out` is contiguous, no other memory is
    taken."""
    target = out.view(np.uint8)
    if isinstance(view, np.ndarray):
        target[...] = view.view(np.uint8).reshape(target.shape)
        return
    import torch

    source = view.detach().view(torch.uint8)
    if source.device.type == "cpu":
        target[...] = source.numpy().reshape(target.shape)  # torch's copy would take threads of its own for it
    else:
        torch.from_numpy(target).copy_(source.view(target.shape))
