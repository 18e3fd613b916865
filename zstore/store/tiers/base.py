"""The interface of all tiers: how a rank's shard is stored, how passes and pins access it; and the batches of a pass.

[Note: a pass]
All bulk access is a pass over whole chunks, driven by `zstore.store.stream` from one thread per shard:

    begin(name, mode)                      once; may wait until a pin of memory is released
      DiskTier.load(pieces, ...)           for spans, ahead of their use, into a buffer sized by `span_bytes`
      views(name, span, buffer, mode)      when the load's ticket is done: one view per chunk; each is verified when it
                                           is yielded, and sealed when the next is requested, while still in cache
      DiskTier.save(pieces, ...)           after the consumer has changed all views (not in mode READ)
    end(name, ok)                          once (not in mode READ), when every ticket is done; only then does a new
                                           version become current

One pass at a time changes a shard. While it does so in place, the shard can be neither read nor pinned: its contents
are neither the old version nor the new one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
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
    """Adjacent chunks of a shard that are transferred in one request."""

    first_chunk: int
    num_chunks: int

    @property
    def chunks(self) -> range:
        """Numbers of the chunks."""
        return range(self.first_chunk, self.first_chunk + self.num_chunks)


@dataclass(frozen=True)
class Piece:
    """A span of an array, as a slice of memory that it shares with others."""

    name: str
    span: ChunkSpan
    memory_offset: int
    """Offset of its bytes in the memory."""
    nbytes: int

    @property
    def kind(self) -> str:
        """The first part of the array's name."""
        return self.name.partition("/")[0]

    def slice_of(self, memory: Bytes) -> Bytes:
        """Return its bytes."""
        return memory[self.memory_offset : self.memory_offset + self.nbytes]


@dataclass(frozen=True)
class Tile:
    """One chunk, or in memory several, of every array of a group: local flat elements `[first, stop)` without padding.

    `views` are 1-D, in the group's order: numpy arrays from the host and disk tiers, torch tensors from the device tier. They
    are valid until the next tile is requested. In a read-only pass, the views of a tile without `ends_buffer` stay valid
    until the tile after the next `ends_buffer` tile is requested.
    """

    group: int
    first: int
    stop: int
    views: tuple[View, ...]
    ends_buffer: bool = True
    """Whether the memory of the views is reused when the next tile is requested."""


@dataclass(eq=False)
class Snapshot(Closing):
    """Pinned versions of shards: their contents at the time of the snapshot."""

    pins: dict[str, PinnedShard]

    def release(self) -> None:
        """Allow changes in place again; a second call does nothing."""
        for pin in self.pins.values():
            pin.release()

    def close(self) -> None:
        """Alias of `release`."""
        self.release()


TierName = Literal["device", "host", "pinned", "disk"]
"""Names of tiers. "pinned" is host memory, registered with CUDA if the options request it; `tier_of` reports "host"."""


class Tier(ABC):
    """A place for shards. See [Note: a pass] for the order of calls."""

    name: TierName
    tile_numel = 0
    """Approximate elements of a tile in memory; 0 for a tier on disk, whose shards are transferred in spans."""

    @abstractmethod
    def create(self, local: LocalShard, memory: torch.Tensor | None = None) -> None:
        """Register the shard, all zeros, or with its values in `memory` if the tier can adopt it."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a shard and free its space. Raises UsageError if it is pinned or being changed."""

    @abstractmethod
    def rename(self, name: str, local: LocalShard) -> None:
        """Rename a shard with no pass in progress to another array of the same layout. Raises UsageError as `remove` does."""

    def is_pinned_in_place(self, name: str) -> bool:
        """Return whether `begin` of a pass that changes the shard would wait for a pin."""
        return False

    @abstractmethod
    def version(self, name: str) -> int:
        """Return the version number of the shard's contents: while it is the same, no pass has changed the shard."""

    def is_packed(self, name: str) -> bool:
        """Return whether the shard shares its file with others."""
        return False

    def file_position(self, name: str) -> tuple[str, int]:
        """Return a key that sorts shards that share a file by their offset in it; the same key for all other shards."""
        return "", 0

    @abstractmethod
    def begin(self, name: str, mode: Mode) -> None:
        """Start a pass. Raises UsageError while another pass changes the shard in place."""

    def span_chunks(self, name: str) -> int:
        """Return how many chunks of the shard fit in one disk request; 0 for a tier in memory."""
        return 0

    def span_bytes(self, name: str, num_chunks: int) -> int:
        """Return the bytes of buffer that a span of `num_chunks` needs; 0 if views are of the tier's own memory."""
        return 0

    @abstractmethod
    def views(self, name: str, span: ChunkSpan, buffer: Bytes, mode: Mode) -> Iterator[View]:
        """Yield a view of each chunk's elements, without padding, verified when it is yielded; changes to it are recorded
        when the next one is requested. Raises CorruptionError."""

    @abstractmethod
    def end(self, name: str, ok: bool) -> None:
        """End a pass that changes the shard; unless `ok`, restore the previous version if the tier still has it."""

    @abstractmethod
    def pin(self, name: str) -> PinnedShard:
        """Pin the current version. Raises UsageError while a pass changes the shard in place."""

    @abstractmethod
    def close(self) -> None:
        """Release all memory and files."""


_versions = count(1)


def new_version() -> int:
    """Return a version number that is unique in this process."""
    return next(_versions)


def busy_error(name: str) -> UsageError:
    """Return the error for a call on a shard that is being changed by a pass."""
    return UsageError(f"array {name!r} is being changed by a pass: exhaust that or close it first")


def copy_into(view: View, source: Array) -> None:
    """Copy `source`, of the view's size and data type, into a view of any tier."""
    if isinstance(view, np.ndarray):
        view[:] = source
    else:
        import torch

        # torch warns about memory that is not writable.
        writable = source if source.flags.writeable else source.copy()
        view.view(torch.uint8).copy_(torch.from_numpy(writable.view(np.uint8)))


def copy_out(view: View, out: Array) -> None:
    """Copy a view of any tier into host memory of the same size and any shape, without temporary memory if `out` is
    contiguous."""
    target = out.view(np.uint8)
    if isinstance(view, np.ndarray):
        target[...] = view.view(np.uint8).reshape(target.shape)
        return
    import torch

    source = view.detach().view(torch.uint8)
    if source.device.type == "cpu":
        target[...] = source.numpy().reshape(target.shape)  # torch's copy would start threads
    else:
        torch.from_numpy(target).copy_(source.view(target.shape))


_MIN_SPANS_IN_POOL = 3
_BATCH_BYTES = 4 * 1024 * 1024
"""Approximate bytes of small groups that share a buffer."""

Groups = Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class SpanPlan:
    """A planned span of a group, without memory yet."""

    group: int
    span: ChunkSpan
    starts_group: bool
    ends_group: bool


Batch = tuple[SpanPlan, ...]
"""Spans that share a buffer: one span of a group, or several small groups, each in one span."""


def plan_batches(
    groups: Groups,
    *,
    tiers: Mapping[str, Tier],
    shards: Mapping[str, LocalShard],
    pool_bytes: int,
    chunks: tuple[int, int] | None = None,
) -> list[Batch]:
    """Return the batches of a pass over `groups`, in order, with a pool of `pool_bytes`. `chunks` limits the pass to chunks
    `[first, stop)` of each shard. Raises UsageError for groups that no pass can process."""
    _check_groups(groups, shards)
    planner = _Planner(groups, tiers, shards, pool_bytes)
    batches: list[Batch] = []
    small: list[SpanPlan] = []
    for plan in planner.plans(chunks):
        if plan.starts_group and plan.ends_group and planner.is_small(plan.group):
            small.append(plan)
        else:
            batches += [*planner.merge_small(small), (plan,)]
            small = []
    return [*batches, *planner.merge_small(small)]


def _check_groups(groups: Groups, shards: Mapping[str, LocalShard]) -> None:
    seen: set[str] = set()
    num_seen = 0
    for group in groups:
        seen.update(group)
        num_seen += len(group)
        if not group or len(seen) < num_seen:
            raise UsageError(f"a pass visits each array once, and a group has at least one array: got {group}")
        first = shards[group[0]]
        for name in group[1:]:
            shard = shards[name]
            if shard.shard != first.shard or first.grid != shard.grid:
                raise UsageError(f"the arrays of a group share one layout, got different ones for {', '.join(group)}")


@dataclass
class _Planner:
    """Splits a pass into batches."""

    groups: Groups
    tiers: Mapping[str, Tier]
    shards: Mapping[str, LocalShard]
    pool_bytes: int

    def __post_init__(self) -> None:
        self.in_memory = all(self.tiers[name].tile_numel for group in self.groups for name in group)

    def plans(self, chunks: tuple[int, int] | None) -> Iterator[SpanPlan]:
        """Yield the spans of each group, of about equal size."""
        for number, group in enumerate(self.groups):
            shard = self.shards[group[0]]
            num_chunks = shard.grid.present_chunks(shard.shard) if shard.valid_numel else 0
            start, stop = (0, num_chunks) if chunks is None else chunks
            stop = min(stop, num_chunks)
            max_chunks = self._span_chunks(group)
            step = max_chunks
            if not self.in_memory and stop > start:
                count = -(-(stop - start) // max_chunks)
                step = -(-(stop - start) // count)
            for first in range(start, stop, step):
                yield SpanPlan(number, ChunkSpan(first, min(step, stop - first)), first == start, first + step >= stop)

    def _span_chunks(self, group: Sequence[str]) -> int:
        """Return how many chunks of the group make a span: about one disk request, and several fit in the pool."""
        on_disk = [max_chunks for name in group if (max_chunks := self.tiers[name].span_chunks(name))]
        if not on_disk:
            smallest = min(self.tiers[name].tile_numel for name in group)
            return max(1, smallest // max(self.shards[group[0]].grid.chunk_numel, 1))
        chunk_bytes = sum(self.tiers[name].span_bytes(name, 1) for name in group)
        return max(1, min(*on_disk, self.pool_bytes // (_MIN_SPANS_IN_POOL * chunk_bytes)))

    def is_small(self, group: int) -> bool:
        """Return whether no array of a group needs a separate request."""
        tiers = [(self.tiers[name], name) for name in self.groups[group]]
        return all(tier.tile_numel or tier.is_packed(name) for tier, name in tiers)

    def merge_small(self, plans: Sequence[SpanPlan]) -> list[Batch]:
        """Return batches of whole groups: as few as possible, of about equal size."""
        sizes = [
            sum(self.tiers[name].span_bytes(name, plan.span.num_chunks) for name in self.groups[plan.group])
            for plan in plans
        ]
        if not any(sizes):
            return [(plan,) for plan in plans]
        count = -(-sum(sizes) // min(_BATCH_BYTES, self.pool_bytes // _MIN_SPANS_IN_POOL))
        batches: list[list[SpanPlan]] = []
        assigned_bytes = 0
        for plan, size in zip(plans, sizes, strict=True):
            if assigned_bytes * count >= len(batches) * sum(sizes):
                batches.append([])
            batches[-1].append(plan)
            assigned_bytes += size
        return [tuple(batch) for batch in batches]
