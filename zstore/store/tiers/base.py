"""The contract of every tier: how a rank's shard is stored, how passes and pins access it, and the batches of passes.

[Note: a pass]
All bulk access is a pass over whole chunks, driven by `zstore.store.stream` from one thread per shard:

    begin(name, mode)                      once; may wait for a pin of memory to be released
      DiskTier.load(pieces, ...)           of spans, ahead of their use, into a buffer sized by `span_bytes`
      views(name, span, buffer, mode)      when the load's ticket is done: one view a chunk, requested one by one; each is
                                           checked when yielded, and sealed when the next one is requested: in cache
      DiskTier.save(pieces, ...)           after the consumer changed all views (not in mode READ)
    end(name, ok)                          once (not in mode READ), when every ticket is done; only now a new version
                                           is the current one

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

    `views` are 1-D, in the group's order: numpy arrays from the host and disk tiers, torch tensors from the device tier. They
    are valid until the next tile is requested; without `ends_buffer` the views of a read-only pass stay valid until the tile
    after the next one that has it.
    """

    group: int
    first: int
    stop: int
    views: tuple[View, ...]
    ends_buffer: bool = True
    """Whether the memory of the views is reused when the next tile is requested."""


@dataclass(eq=False)
class Snapshot(Closing):
    """A pinned version: the shards' contents when it was taken, whatever happens to them afterwards."""

    pins: dict[str, PinnedShard]

    def release(self) -> None:
        """Allow changes in place again; a second call does nothing."""
        for pin in self.pins.values():
            pin.release()

    def close(self) -> None:
        """Alias of `release`."""
        self.release()


TierName = Literal["device", "host", "pinned", "disk"]
"""Pinned: host memory, registered with CUDA if the options request it; `tier_of` calls it host too."""


class Tier(ABC):
    """A place for shards. See [Note: a pass] for the order of calls."""

    name: TierName
    tile_numel = 0
    """Elements of a tile of memory, about; 0: shards are on disk, and passes transfer spans of them."""

    @abstractmethod
    def create(self, local: LocalShard, memory: torch.Tensor | None = None) -> None:
        """Register the shard, all zeros, or kept in `memory` if the tier can adopt it."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Forget a shard that no pass is over, and free its space. Raises UsageError if it is pinned or changed."""

    @abstractmethod
    def rename(self, name: str, local: LocalShard) -> None:
        """Rename a shard with no pass in progress to another array of the same layout. Raises UsageError as `remove` does."""

    def is_pinned_in_place(self, name: str) -> bool:
        """Return whether `begin` for a change would wait for a pin."""
        return False

    @abstractmethod
    def version(self, name: str) -> int:
        """Return a number unique to the shard's contents: while it is the same, no pass changed the shard."""

    def is_packed(self, name: str) -> bool:
        """Return whether the shard shares its file with others."""
        return False

    def place(self, name: str) -> tuple[str, int]:
        """Return a key that sorts shards sharing a file by their place in it; it is the same for all others."""
        return "", 0

    @abstractmethod
    def begin(self, name: str, mode: Mode) -> None:
        """Start a pass. Raises UsageError while another pass changes the shard in place."""

    def span_chunks(self, name: str) -> int:
        """Return how many chunks of the shard make one request to the disk; 0 in memory."""
        return 0

    def span_bytes(self, name: str, num_chunks: int) -> int:
        """Return the buffer bytes that a span of `num_chunks` needs; 0 if views are in the tier's own memory."""
        return 0

    @abstractmethod
    def views(self, name: str, span: ChunkSpan, buffer: Bytes, mode: Mode) -> Iterator[View]:
        """Yield a view of each chunk's elements, without padding, valid when it is yielded; changes to it are recorded when
        the next one is requested. Raises CorruptionError."""

    @abstractmethod
    def end(self, name: str, ok: bool) -> None:
        """End a pass that changes; with `ok` false the shard keeps its former version if the tier still has it."""

    @abstractmethod
    def pin(self, name: str) -> PinnedShard:
        """Pin the current version. Raises UsageError while a pass changes it in place."""

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
    """Copy a view of any tier into host memory of the same size, of any shape; if `out` is contiguous, no other memory
    is taken."""
    target = out.view(np.uint8)
    if isinstance(view, np.ndarray):
        target[...] = view.view(np.uint8).reshape(target.shape)
        return
    import torch

    source = view.detach().view(torch.uint8)
    if source.device.type == "cpu":
        target[...] = source.numpy().reshape(target.shape)  # torch's copy would start threads for it
    else:
        torch.from_numpy(target).copy_(source.view(target.shape))


_MIN_SPANS_IN_POOL = 3
_BATCH_BYTES = 4 * 1024 * 1024
"""Bytes of small groups that share a buffer, about."""

Groups = Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class SpanPlan:
    """A span of a group before it has memory."""

    group: int
    span: ChunkSpan
    starts_group: bool
    ends_group: bool


Batch = tuple[SpanPlan, ...]
"""Spans that share a buffer: one span of a group, or several small groups, each whole."""


def plan_batches(
    groups: Groups,
    *,
    tiers: Mapping[str, Tier],
    shards: Mapping[str, LocalShard],
    pool_bytes: int,
    chunks: tuple[int, int] | None = None,
) -> list[Batch]:
    """Return the batches of a pass over `groups`, in order, through a pool of `pool_bytes`; of chunks `[first, stop)`
    of each shard if `chunks` are given. Raises UsageError for groups that no pass can process."""
    _check_groups(groups, shards)
    planner = _Planner(groups, tiers, shards, pool_bytes)
    batches: list[Batch] = []
    small: list[SpanPlan] = []
    for plan in planner.plans(chunks):
        if plan.starts_group and plan.ends_group and planner.is_small(plan.group):
            small.append(plan)
        else:
            batches += [*planner.cut(small), (plan,)]
            small = []
    return [*batches, *planner.cut(small)]


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
    """Cuts a pass into batches."""

    groups: Groups
    tiers: Mapping[str, Tier]
    shards: Mapping[str, LocalShard]
    pool_bytes: int

    def __post_init__(self) -> None:
        self.in_memory = all(self.tiers[name].tile_numel for group in self.groups for name in group)

    def plans(self, chunks: tuple[int, int] | None) -> Iterator[SpanPlan]:
        """Yield the spans of each group, alike in size."""
        for number, group in enumerate(self.groups):
            shard = self.shards[group[0]]
            present = shard.grid.present_chunks(shard.shard) if shard.valid_numel else 0
            start, stop = (0, present) if chunks is None else chunks
            stop = min(stop, present)
            most = self._span_chunks(group)
            step = most
            if not self.in_memory and stop > start:
                count = -(-(stop - start) // most)
                step = -(-(stop - start) // count)
            for first in range(start, stop, step):
                yield SpanPlan(number, ChunkSpan(first, min(step, stop - first)), first == start, first + step >= stop)

    def _span_chunks(self, group: Sequence[str]) -> int:
        """Return the number of chunks of the group in a span: a request to the disk; the pool has room for several."""
        on_disk = [most for name in group if (most := self.tiers[name].span_chunks(name))]
        if not on_disk:
            smallest = min(self.tiers[name].tile_numel for name in group)
            return max(1, smallest // max(self.shards[group[0]].grid.chunk_numel, 1))
        chunk_bytes = sum(self.tiers[name].span_bytes(name, 1) for name in group)
        return max(1, min(*on_disk, self.pool_bytes // (_MIN_SPANS_IN_POOL * chunk_bytes)))

    def is_small(self, group: int) -> bool:
        """Return whether no array of a group needs a separate request."""
        tiers = [(self.tiers[name], name) for name in self.groups[group]]
        return all(tier.tile_numel or tier.is_packed(name) for tier, name in tiers)

    def cut(self, small: Sequence[SpanPlan]) -> list[Batch]:
        """Return whole groups in as few batches as requests hold, alike in bytes."""
        sizes = [
            sum(self.tiers[name].span_bytes(name, plan.span.num_chunks) for name in self.groups[plan.group])
            for plan in small
        ]
        if not any(sizes):
            return [(plan,) for plan in small]
        count = -(-sum(sizes) // min(_BATCH_BYTES, self.pool_bytes // _MIN_SPANS_IN_POOL))
        batches: list[list[SpanPlan]] = []
        before = 0
        for plan, size in zip(small, sizes, strict=True):
            if before * count >= len(batches) * sum(sizes):
                batches.append([])
            batches[-1].append(plan)
            before += size
        return [tuple(batch) for batch in batches]
