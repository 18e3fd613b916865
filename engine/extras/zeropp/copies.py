"""Reductions for ranks that hold several copies of the state (`mics_shard_size`).

[Note: the mean of copies]
Each rank needs the mean of its copy's shard, which is that of several neighbouring shards of the grid over all ranks.
On gloo the bucket is reduce-scattered over all ranks, one shard to a rank, in the order and with the rounding of
[Note: the mean]; then the ranks that hold the same shard of their copies gather these. So the bits are those of one copy. On
other backends it is reduced within each group and the part between the groups, which sends less between them: the
backend's own reductions, as without copies. With k ranks for each of c copies, a rank sends of a bucket's bytes

    gloo       (c k - 1) / (c k), of which (k - 1) / (c k) within its group;  then (c - 1) / (c k) to other groups
    others     (k - 1) / k within its group;  then 2 (c - 1) / (c k) to other groups

Nothing blocks before the end: the gather begins as soon as the reduction is seen to be done, in the order in which the
reductions were begun, so that ranks that are elsewhere hold nobody up.
"""

from __future__ import annotations

import torch

from zstore.ranks.groups import Groups
from zstore.ranks.work import Kind, Work
from zstore.ranks.world import World

from ...zero.collectives import Bucket, mean_of_rows


class CopiesReduction:
    """A bucket's reduction to the shards of all copies under way. See [Note: the mean of copies]."""

    def __init__(self, groups: Groups, world: World, bucket: Bucket, matrix: torch.Tensor, kind: Kind) -> None:
        self.bucket = bucket
        self._between, self._kind = groups.between, kind
        size, copies = groups.within.world_size, groups.between.world_size
        self._native = world.backend != "gloo"
        self._gathered: torch.Tensor | None = None
        if self._native:
            # [copy's rank, copies x cols]: neighbouring shards of the grid are one of a copy's.
            self._send = matrix.view(size, -1)
            self._out = matrix.new_empty(copies, bucket.cols)
            self._work: Work = groups.within.reduce_scatter_mean(self._out.view(-1), self._send, kind=kind)
        else:
            # Rank r of copy c, c k + r, gets shard r copies + c.
            self._send = matrix.view(size, copies, -1).transpose(0, 1).reshape(matrix.shape)
            self._out = torch.empty_like(matrix)
            self._work = world.all_to_all(self._out, self._send, kind=kind)

    def done(self) -> bool:
        """Return whether the reduction is done, so that `finish` would not block; begin the next part."""
        if self._gathered is None and self._work.is_completed():
            self._gathered = self._gather()
        return self._gathered is not None and self._work.is_completed()

    def finish(self) -> torch.Tensor:
        """Wait, and return the mean of this rank's rows, [copies, cols]."""
        gathered = self._gather() if self._gathered is None else self._gathered
        self._work.wait()
        return gathered

    def _gather(self) -> torch.Tensor:
        """Begin the gather of the reduction's result, and return the memory that it fills."""
        self._work.wait()
        between = self._between
        if self._native:
            mine = self._out.new_empty(self.bucket.cols)
            between.reduce_scatter_mean(mine, self._out, kind=self._kind).wait()
        else:
            mine = mean_of_rows(self._out)
        self._out = mine
        gathered = mine.new_empty(between.world_size, self.bucket.cols)
        self._work = between.start_all_gather(gathered.view(-1), mine, kind=self._kind)
        return gathered
