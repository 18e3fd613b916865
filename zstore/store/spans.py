"""The batches of a pass: spans of a group, or small groups that share files. Pure arithmetic over layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..format.arrays import LocalShard
from .tiers import ChunkSpan, DiskTier, MemoryTier, Tier

_LEAST_SPANS_IN_POOL = 3
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
"""Spans that share a buffer: one of a group, or groups that are small, each of them whole."""


def plan_batches(
    groups: Groups,
    *,
    tiers: Mapping[str, Tier],
    shards: Mapping[str, LocalShard],
    pool_bytes: int,
    chunks: tuple[int, int] | None = None,
) -> list[Batch]:
    """Return the batches of a pass over `groups`, in order, through a pool of `pool_bytes`; of chunks `[first, stop)`
    of each shard if `chunks` are given. Raises UsageError for groups that no pass goes over."""
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
        self.in_memory = all(isinstance(self.tiers[name], MemoryTier) for group in self.groups for name in group)

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
        """Return the number of chunks of the group in a span: a request to the disk, of which the pool holds several."""
        on_disk = [t.span_chunks(name) for name in group if isinstance(t := self.tiers[name], DiskTier)]
        if self.in_memory or not on_disk:
            least = min(tier.tile_numel for name in group if isinstance(tier := self.tiers[name], MemoryTier))
            return max(1, least // max(self.shards[group[0]].grid.chunk_numel, 1))
        chunk_bytes = sum(self.tiers[name].span_bytes(name, 1) for name in group)
        return max(1, min(*on_disk, self.pool_bytes // (_LEAST_SPANS_IN_POOL * chunk_bytes)))

    def is_small(self, group: int) -> bool:
        """Return whether no array of a group needs a separate request."""
        tiers = [(self.tiers[name], name) for name in self.groups[group]]
        return all(not isinstance(tier, DiskTier) or tier.is_packed(name) for tier, name in tiers)

    def cut(self, small: Sequence[SpanPlan]) -> list[Batch]:
        """Return whole groups in as few batches as requests hold, alike in bytes."""
        sizes = [
            sum(self.tiers[name].span_bytes(name, plan.span.num_chunks) for name in self.groups[plan.group])
            for plan in small
        ]
        if not any(sizes):
            return [(plan,) for plan in small]
        count = -(-sum(sizes) // min(_BATCH_BYTES, self.pool_bytes // _LEAST_SPANS_IN_POOL))
        batches: list[list[SpanPlan]] = []
        before = 0
        for plan, size in zip(small, sizes, strict=True):
            if before * count >= len(batches) * sum(sizes):
                batches.append([])
            batches[-1].append(plan)
            before += size
        return [tuple(batch) for batch in batches]
