"""Gathers of parameters as 8-bit integers (ZeRO++ qwZ).

Each rank quantizes its rows of the matrices that a unit gathers, all ranks get the bytes of all, and each dequantizes them,
its own too: so every rank computes with the same bits. The stored rows stay as they are. See [Note: blocks].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zstore.ranks.work import Work
from zstore.ranks.world import World

from ...params.record import ParameterRecord
from ...plan.quantized import BLOCK_NUMEL, WEIGHT_BITS, is_matrix
from ...zero.collectives import Bucket, plan_buckets, unpack
from ...zero.exchanges import Rows
from .block_code import BlockCode


@dataclass
class QuantizedGather:
    """A gather under way. The memory of its parameters must be there when it is finished."""

    work: Work
    bucket: Bucket
    code: BlockCode
    sent: torch.Tensor
    """uint8 [1, row_bytes]"""
    gathered: torch.Tensor
    """uint8 [world, row_bytes]"""

    def finish(self) -> None:
        """Dequantize the received bytes into `full` of the parameters."""
        target = self._target()
        if target is not None:
            self.code.decode(self.gathered, target)
        else:
            matrix = torch.empty(
                self.gathered.shape[0], self.bucket.cols, dtype=self.bucket.dtype, device=self.gathered.device
            )
            unpack(self.bucket, self.code.decode(self.gathered, matrix), lambda record: record.full)
        for segment in self.bucket.segments:
            segment.record.is_rounded = True

    def _target(self) -> torch.Tensor | None:
        """Return the parameter's own memory [world, cols], if the gather is of one parameter and of all of it."""
        first = self.bucket.segments[0]
        if len(self.bucket.segments) > 1 or self.bucket.cols != first.shard_numel:
            return None
        return first.record.padded_full(self.gathered.shape[0] * self.bucket.cols).view(-1, self.bucket.cols)


class QuantizedGathers:
    """Gathers matrices of floating types as integers; see `Gathers`."""

    def takes(self, record: ParameterRecord) -> bool:
        return record.dtype.is_floating_point and is_matrix(record.grid)

    def start(
        self, world: World, records: Sequence[ParameterRecord], limit_numel: int, rows: Rows
    ) -> Iterator[QuantizedGather]:
        for bucket in plan_buckets(records, world.world_size, limit_numel, align_numel=BLOCK_NUMEL):
            code = BlockCode(tuple(segment.stop - segment.first for segment in bucket.segments), WEIGHT_BITS)
            parts = [rows(segment.record)[segment.first : segment.stop] for segment in bucket.segments]
            sent = code.encode(torch.cat(parts)[None] if len(parts) > 1 else parts[0][None])
            gathered = sent.new_empty(world.world_size, code.row_bytes)
            work = world.start_all_gather(gathered.view(-1), sent.view(-1))
            yield QuantizedGather(work, bucket, code, sent, gathered)
