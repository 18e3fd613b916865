"""Reductions of gradients as 4- or 8-bit integers (ZeRO++ qgZ).

[Note: quantized reductions]
A bucket's matrix [world, cols] is quantized row by row (see [Note: blocks]) and sent in an all-to-all of rows. Each rank
dequantizes the received rows and adds them up in the order of ranks, in fp32: the mean is rounded once, to the type of
plain reductions, so bits repeat from run to run.

Of several groups of ranks (machines, or groups of `zero_hpz_partition_size`) there are two such hops: each member of a group
gets the rows of the ranks with its place in all groups, their mean over the group is quantized anew, and sent between the
groups. With g ranks in each of n groups a rank sends (g - 1) n rows within its group and n - 1 between groups, not
g n - g: a g-th of the bytes leave it.

"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zstore.ranks.groups import make_groups
from zstore.ranks.work import Kind, Work
from zstore.ranks.world import World

from ...config.config import Config
from ...params.record import ParameterRecord
from ...plan.quantized import BLOCK_NUMEL, is_matrix
from ...zero.collectives import Bucket, TypeOf, plan_buckets
from .block_code import BlockCode


class QuantizedReducer:
    """Starts reductions of gradients sent as integers (all ranks make one). `group_size` ranks make a group; all of
    them is one hop, on the process group of `world`. See [Note: quantized reductions]."""

    def __init__(self, world: World, bits: int, *, group_size: int) -> None:
        self.bits = bits
        self.hops: Sequence[World]
        if group_size < world.world_size:
            groups = make_groups(world, group_size)
            self.hops = [groups.within, groups.between]
        else:
            self.hops = [world.second()]

    def takes(self, record: ParameterRecord) -> bool:
        """Return whether gradients of the parameter are sent as integers: those of matrices."""
        return record.dtype.is_floating_point and is_matrix(record.grid)

    def buckets(
        self, records: Sequence[ParameterRecord], world_size: int, limit_numel: int, dtype_of: TypeOf
    ) -> list[Bucket]:
        """Return buckets of at most `limit_numel` elements of gradients in the types that they have on this rank."""
        return plan_buckets(records, world_size, limit_numel, dtype_of, align_numel=BLOCK_NUMEL)

    def start(self, bucket: Bucket, matrix: torch.Tensor, kind: Kind) -> QuantizedReduction:
        """Begin to reduce `matrix` [world, cols] (all ranks, in one order)."""
        return QuantizedReduction(self, bucket, matrix, kind)

    def release(self) -> None:
        """Destroy the process groups, once nothing is under way."""
        for world in self.hops:
            if world.world_size > 1:
                world.release()


class QuantizedReduction:
    """A bucket's reduce-scatter under way, hop by hop."""

    def __init__(self, reducer: QuantizedReducer, bucket: Bucket, matrix: torch.Tensor, kind: Kind) -> None:
        self.bucket = bucket
        self._reducer = reducer
        self._kind = kind
        self._code = BlockCode(tuple(segment.stop - segment.first for segment in bucket.segments), reducer.bits)
        self._hop = 0
        size = reducer.hops[0].world_size
        if size < matrix.shape[0]:
            # Each member of the group gets the rows of its place in all groups: [members, groups x cols].
            matrix = matrix.view(-1, size, bucket.cols).transpose(0, 1).reshape(matrix.shape)
        self._send(matrix)

    def _send(self, matrix: torch.Tensor) -> None:
        """Begin a hop of `matrix` [members x rows, cols]."""
        world = self._reducer.hops[self._hop]
        sent = self._code.encode(matrix)
        self._sent = sent.view(world.world_size, -1)
        self._got = torch.empty_like(self._sent)
        self._work: Work = world.all_to_all(self._got, self._sent, kind=self._kind)

    def _mean(self) -> torch.Tensor:
        """Return the mean over the members of the hop that is done, fp32 [rows, cols]."""
        parts = self._got.view(self._got.shape[0], -1, self._code.row_bytes)  # [members, rows, row_bytes]
        total = torch.zeros(parts.shape[1], self.bucket.cols, dtype=torch.float32, device=parts.device)
        for part in parts:
            self._code.decode(part, total, add=True)
        return total.mul_(1.0 / parts.shape[0])

    def done(self) -> bool:
        """Return whether the reduction is done, so that `finish` would not block; if a hop is done, the next one begins."""
        while self._work.is_completed():
            if not self._advance():
                return True
        return False

    def _advance(self) -> bool:
        """Begin the next hop; return False if there is none. To be called once the one under way is complete."""
        if self._hop + 1 == len(self._reducer.hops):
            return False
        self._work.wait()
        mean = self._mean()
        self._hop += 1
        self._send(mean)
        return True

    def finish(self) -> torch.Tensor:
        """Wait, and return this rank's row of the mean, [cols]."""
        while True:
            self._work.wait()
            if not self._advance():
                return self._mean().to(self.bucket.dtype)[0]


def quantized_reducer(config: Config, world: World) -> QuantizedReducer:
    """Return the reducer of gradients that the config asks for (all ranks)."""
    group_size = config.quantized_group(world.world_size, world.local_world_size) or world.world_size
    return QuantizedReducer(world, config.own.quantized_gradient_bits, group_size=group_size)
