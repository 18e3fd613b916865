"""The contract of every tier: how a rank's shard is kept, and how passes and pins reach it; views of it as numpy arrays.

[Note: a pass]
All bulk access is a pass over whole chunks, driven by `zstore.store.stream` from one thread per shard:

    begin(name, mode)                      once; may wait for a pin of memory to be released
      load(name, span, buffer)             for each span, ahead of its use; the buffer was sized by `span_bytes`
      views(name, span, buffer, mode)      when the load's ticket is done: one view a chunk, asked for one by one; each is
                                           checked as it is given, and sealed when the next one is asked for: in cache
      save(name, span, buffer)             after the consumer changed all views (not in mode READ)
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
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from ...errors import UsageError
from ...format.arrays import Array, ArraySpec, Bytes, Grid, numpy_dtype
from ...io.closing import Closing
from ...io.queue import Priority, Ticket
from ...io.shards import IoResources, ShardSummary

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
class LocalShard:
    """The shard of an array that this rank holds."""

    spec: ArraySpec
    grid: Grid
    shard: int

    def __post_init__(self) -> None:
        spec, grid = self.spec, self.grid
        if (grid.rows, grid.row_numel) != (spec.rows, spec.row_numel) or self.shard < 0:
            raise UsageError(
                f"array {spec.name!r} has {spec.rows} rows of {spec.row_numel} elements, got shard {self.shard} of a grid "
                f"of {grid.rows} rows of {grid.row_numel}"
            )

    @property
    def base(self) -> int:
        """Global flat element where the shard begins."""
        return self.shard * self.grid.shard_numel

    @cached_property
    def valid_numel(self) -> int:
        """Elements that are not padding."""
        return self.grid.shard_valid_numel(self.shard)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements that are not padding."""
        return self.valid_numel * self.spec.itemsize

    def chunk_range(self, chunk: int, num_chunks: int = 1) -> tuple[int, int]:
        """Return the local flat elements `[first, stop)` of `num_chunks` from chunk number `chunk` on, padding left out."""
        first, numel = chunk * self.grid.chunk_numel, num_chunks * self.grid.chunk_numel
        return min(first, self.valid_numel), min(first + numel, self.valid_numel)


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


class PinnedShard(Protocol):
    """A shard's version that nobody changes until `release()`; usable from any thread but an I/O thread."""

    @property
    def local(self) -> LocalShard:
        """Which shard of which array."""

    @property
    def tier(self) -> str:
        """The tier of the pinned bytes: device, host or disk."""

    @property
    def has_file(self) -> bool:
        """Whether they are a file of the run folder, so that `publish` may link it."""

    @property
    def version(self) -> int | None:
        """None if it is not known yet, because an update is to make it."""

    def copy_into(self, out: Bytes, grid: Grid, shard: int) -> None:
        """Copy the elements of shard number `shard` on `grid`, without padding, into `out`. Raises UsageError if the pinned
        shard is on disk."""

    def checksums(self, res: IoResources, grid: Grid, shard: int) -> tuple[int, ...]:
        """Return the crc32c of each chunk that a shard file of shard number `shard` on `grid` has."""

    def publish(self, res: IoResources, path: str | Path, grid: Grid, shard: int, priority: Priority) -> ShardSummary:
        """Make the shard file `path` of shard number `shard` on `grid`: a hard link if the disk tier has that very file
        on the same file system, else a copy; durable when this returns, if `res.sync`."""

    def release(self) -> None:
        """Allow changes again; a second call does nothing."""


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

    def load(
        self, name: str, span: ChunkSpan, buffer: Bytes, mode: Mode, priority: Priority = Priority.READ
    ) -> Ticket[None] | None:
        """Start loading the span into `buffer`; None if nothing has to be copied."""
        return None

    @abstractmethod
    def views(self, name: str, span: ChunkSpan, buffer: Bytes, mode: Mode) -> Iterator[View]:
        """Yield a view of each chunk's elements, without padding, that is right when it is yielded; changes to it are recorded
        when the next one is asked for. Raises CorruptionError."""

    def save(self, name: str, span: ChunkSpan, buffer: Bytes) -> Ticket[None] | None:
        """Start saving the span; None if nothing has to be copied."""
        return None

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


def as_numpy(data: Array | torch.Tensor, spec: ArraySpec) -> Array:
    """Return `data` as a 1-D numpy array of the spec's data type, without copying unless torch has its values to negate.

    Raises UsageError if that cannot be.
    """
    dtype = numpy_dtype(spec.dtype)
    if not isinstance(data, np.ndarray):
        import torch

        found = str(data.dtype).removeprefix("torch.")
        if data.device.type != "cpu" or data.dim() != 1 or not data.is_contiguous() or found != spec.dtype:
            raise UsageError(
                f"array {spec.name!r}: expected 1-D contiguous {spec.dtype} on the CPU, got {tuple(data.shape)} of "
                f"{found} on {data.device}"
            )
        from ...io.tensors import host_values

        flat = host_values(data)
        return flat.view(torch.uint8).numpy().view(dtype) if flat.numel() else np.empty(0, dtype)
    if data.ndim != 1 or not data.flags.c_contiguous or data.dtype != dtype:
        raise UsageError(f"array {spec.name!r}: expected 1-D contiguous {dtype}, got {data.shape} of {data.dtype}")
    return data


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
