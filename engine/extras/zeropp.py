"""ZeRO++: parameters and gradients sent as small integers (qwZ and qgZ), in blocks with one scale each, and a replica of
the parameters, sharded within groups of ranks (hpZ, `zero_hpz_partition_size`).

[Note: blocks]
A block is 256 consecutive elements of one rank's rows of one parameter; the last may be shorter. Its scale is its largest
magnitude over 127 (8 bits) or 7 (4 bits), in fp32; each element is rounded to the nearest multiple, ties to even. So the
error is at most half a scale, and a non-finite value makes its whole block non-finite. With 4 bits a byte has two elements:
element i of the block's first half in the low bits, and element i of its second half in the high bits.

The rows of several parameters are sent as all scales, then all elements: `bits` / 8 bytes per element and 4 bytes per block.
Parameters are split only between blocks, and no block spans two parameters, so a parameter's bytes depend only on itself.

[Note: quantized gathers]
Each rank quantizes its rows of the matrices of a unit. All ranks receive all bytes and dequantize them, including their own,
so their values are bit-identical. The stored rows do not change.

[Note: quantized reductions]
A bucket's matrix [world, cols] is quantized row by row and sent in an all-to-all of rows. Each rank dequantizes the
received rows and sums them in rank order, in fp32; the mean is rounded once, to the dtype of plain reductions.

With several groups of ranks (machines, or groups of `zero_hpz_partition_size`) there are two such hops: each member of a
group receives the rows of the ranks with its position in all groups; their mean over the group is quantized again and sent
between groups. With g ranks in each of n groups, a rank sends (g - 1) n rows within its group and n - 1 between groups,
instead of g n - g: a factor of g fewer bytes leave the group.

[Note: the secondary shards]
After a gather over all ranks, each rank keeps the part of the parameter for its position in its group, so that the group
has all values. Until they change, later gathers (by the backward and further micro-batches) are within the group, and
bit-identical. A step invalidates the secondary shards of trained parameters; those of frozen parameters stay valid. They are in
device memory whatever the tier, and exist on all ranks or none: all ranks take part in gathers, which create them, and in
changes of values, which invalidate them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from zstore.format import Grid
from zstore.ranks.world import Kind, Work, World, make_groups

from ..config.config import Config
from ..params.record import ParameterRecord
from ..params.sharding import Sharding
from ..zero.collectives import Bucket, Exchanges, Replica, Rows, register, unpack

BLOCK_NUMEL = 256
"""Elements per scale; its 4 bytes add 1.6 % with 8 bits, 3 % with 4."""

_WEIGHT_BITS = 8
"""Bits per parameter element in a gather."""
_SCALE_BYTES = 4
_TILE_NUMEL = {"cpu": 256 * 1024}
_DEVICE_TILE_NUMEL = 16 * 1024 * 1024
"""Elements quantized or dequantized at a time: fp32 values that stay in the CPU's caches, or are a small part of a
device's memory."""


def encoded_bytes(numel: int, bits: int) -> int:
    """Return the bytes of one rank's rows of a parameter, `numel` elements with padding. See [Note: blocks]."""
    return numel * bits // 8 + _SCALE_BYTES * -(-numel // BLOCK_NUMEL)


@dataclass(frozen=True)
class BlockCode:
    """Layout of rows of several parameters, of `lengths` elements each (multiples of 16), with `bits` (8 or 4) per
    element."""

    lengths: tuple[int, ...]
    bits: int

    @cached_property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return sum(encoded_bytes(length, self.bits) for length in self.lengths)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` [rows, sum of lengths], of any floating-point dtype, as bytes, uint8 [rows, row_bytes]."""
        encoded = torch.empty(values.shape[0], self.row_bytes, dtype=torch.uint8, device=values.device)
        scales, elements = self._parts(encoded)
        for columns, blocks, size in self._tiles(values):
            tile = values[:, columns].view(values.shape[0], -1, size).float()
            largest = tile.abs().amax(dim=-1)
            # The divisor is a tensor, since with a number CUDA multiplies by its inverse, which rounds differently.
            scale = largest.div_(largest.new_full((), (1 << (self.bits - 1)) - 1))
            # The scale of a block of zeros is the smallest normal number.
            scale.clamp_(min=torch.finfo(torch.float32).tiny)
            scales[:, blocks] = scale
            quantized = torch.div(tile, scale[..., None]).round_().to(torch.int8)
            if self.bits == 4:
                low, high = quantized.chunk(2, dim=-1)
                quantized = low.bitwise_and_(15).bitwise_or_(high << 4)
            elements[:, self._bytes(columns)] = quantized.flatten(1)
        return encoded

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> torch.Tensor:
        """Fill `out` [rows, sum of lengths] with the values of an `encode` result, or `add` them; return `out`. Values are
        products in fp32, rounded to the dtype of `out`."""
        scales, elements = self._parts(encoded)
        for columns, blocks, size in self._tiles(out):
            quantized = elements[:, self._bytes(columns)].view(out.shape[0], -1, size * self.bits // 8)
            if self.bits == 4:
                quantized = torch.cat([(quantized << 4) >> 4, quantized >> 4], dim=-1)
            values = (quantized * scales[:, blocks][..., None]).flatten(1)
            if add:
                out[:, columns].add_(values)
            else:
                out[:, columns] = values
        return out

    def _parts(self, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales, fp32 [rows, blocks], and the elements, int8 [rows, bytes], in `encoded`."""
        split = _SCALE_BYTES * sum(-(-length // BLOCK_NUMEL) for length in self.lengths)
        return encoded[:, :split].view(torch.float32), encoded[:, split:].view(torch.int8)

    def _bytes(self, columns: slice) -> slice:
        return slice(columns.start * self.bits // 8, columns.stop * self.bits // 8)

    def _tiles(self, values: torch.Tensor) -> Iterator[tuple[slice, slice, int]]:
        """Yield columns of `values`, their blocks, and the number of columns per block."""
        tile_numel = _TILE_NUMEL.get(values.device.type, _DEVICE_TILE_NUMEL)
        max_numel = max(tile_numel // max(values.shape[0], 1) // BLOCK_NUMEL, 1) * BLOCK_NUMEL
        first = block = 0
        for length in self.lengths:
            for begin, stop in _block_ranges(length, max_numel):
                size = min(BLOCK_NUMEL, stop - begin)
                num_blocks = (stop - begin) // size
                yield slice(first + begin, first + stop), slice(block, block + num_blocks), size
                block += num_blocks
            first += length


def _block_ranges(length: int, max_numel: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `max_numel` elements of full blocks, then the shorter block, if any."""
    full_numel = length // BLOCK_NUMEL * BLOCK_NUMEL
    for first in range(0, full_numel, max_numel):
        yield first, min(first + max_numel, full_numel)
    if full_numel < length:
        yield full_numel, length


@dataclass
class QuantizedGather:
    """A running gather. `finish` needs `full` of its parameters to be allocated."""

    work: Work
    bucket: Bucket
    code: BlockCode
    sent: torch.Tensor
    """uint8 [1, row_bytes]"""
    gathered: torch.Tensor
    """uint8 [world, row_bytes]"""

    def finish(self) -> None:
        """Dequantize the received bytes into `full` of the parameters."""
        bucket, ranks = self.bucket, self.gathered.shape[0]
        first = bucket.segments[0]
        if len(bucket.segments) == 1 and bucket.cols == first.shard_numel:  # directly into one full parameter
            self.code.decode(self.gathered, first.record.padded_full(ranks * bucket.cols).view(-1, bucket.cols))
        else:
            matrix = torch.empty(ranks, bucket.cols, dtype=bucket.dtype, device=self.gathered.device)
            unpack(bucket, self.code.decode(self.gathered, matrix), lambda record: record.full)
        for segment in bucket.segments:
            segment.record.is_rounded = True


class _Quantized:
    """Sends floating-point matrices as integers."""

    align_numel = BLOCK_NUMEL

    def takes(self, record: ParameterRecord) -> bool:
        # Biases and norms are sent in their own dtype.
        return record.dtype.is_floating_point and record.grid.row_numel > 1


class QuantizedGathers(_Quantized):
    """Gathers floating-point matrices as integers; see `Gathers` and [Note: quantized gathers]."""

    def start(self, world: World, bucket: Bucket, rows: Rows) -> QuantizedGather:
        code = BlockCode(tuple(segment.stop - segment.first for segment in bucket.segments), _WEIGHT_BITS)
        parts = [rows(segment.record)[segment.first : segment.stop] for segment in bucket.segments]
        sent = code.encode(torch.cat(parts)[None] if len(parts) > 1 else parts[0][None])
        gathered = sent.new_empty(world.world_size, code.row_bytes)
        work = world.start_all_gather(gathered.view(-1), sent.view(-1))
        return QuantizedGather(work, bucket, code, sent, gathered)


class QuantizedReducer(_Quantized):
    """Starts reductions of gradients sent as integers (all ranks). A group has `group_size` ranks; if that is all ranks,
    there is one hop, on a second process group of `world`. See [Note: quantized reductions]."""

    def __init__(self, world: World, bits: int, *, group_size: int) -> None:
        self.bits = bits
        self.hops: Sequence[World]
        self.hops = make_groups(world, group_size) if group_size < world.world_size else [world.on_new_group()]

    def start(self, bucket: Bucket, matrix: torch.Tensor, kind: Kind) -> QuantizedReduction:
        """Start the reduction of `matrix` [world, cols] (all ranks, in the same order)."""
        return QuantizedReduction(self, bucket, matrix, kind)

    def release(self) -> None:
        """Destroy the process groups; no reduction may be running."""
        for world in self.hops:
            world.release()


class QuantizedReduction:
    """A running reduce-scatter of a bucket, hop by hop."""

    def __init__(self, reducer: QuantizedReducer, bucket: Bucket, matrix: torch.Tensor, kind: Kind) -> None:
        self.bucket = bucket
        self._reducer = reducer
        self._kind = kind
        self._code = BlockCode(tuple(segment.stop - segment.first for segment in bucket.segments), reducer.bits)
        self._hop = 0
        size = reducer.hops[0].world_size
        if size < matrix.shape[0]:
            # Each member of the group gets the rows for its position in all groups: [members, groups x cols].
            matrix = matrix.view(-1, size, bucket.cols).transpose(0, 1).reshape(matrix.shape)
        self._send(matrix)

    def _send(self, matrix: torch.Tensor) -> None:
        """Start a hop with `matrix` [members x rows, cols]."""
        world = self._reducer.hops[self._hop]
        sent = self._code.encode(matrix)
        self._sent = sent.view(world.world_size, -1)
        self._received = torch.empty_like(self._sent)
        self._work: Work = world.all_to_all(self._received, self._sent, kind=self._kind)

    def _mean(self) -> torch.Tensor:
        """Return the mean over the members of the completed hop, fp32 [rows, cols]."""
        parts = self._received.view(self._received.shape[0], -1, self._code.row_bytes)  # [members, rows, row_bytes]
        total = torch.zeros(parts.shape[1], self.bucket.cols, dtype=torch.float32, device=parts.device)
        for part in parts:
            self._code.decode(part, total, add=True)
        return total.mul_(1.0 / parts.shape[0])

    def done(self) -> bool:
        """Return whether `finish` would return without blocking; start the next hop if the current one is complete."""
        while self._work.is_completed():
            if not self._advance():
                return True
        return False

    def _advance(self) -> bool:
        """Start the next hop once the current one is complete; return False after the last."""
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


class SecondaryShards(Replica):
    """The secondary shards of this rank, in a group of `size` ranks. See [Note: the secondary shards]."""

    def __init__(self, world: World, size: int) -> None:
        self._within, self._between = make_groups(world, size)
        self._rows: dict[ParameterRecord, torch.Tensor] = {}
        self._current: set[ParameterRecord] = set()
        """Parameters whose rows have the current values."""

    @property
    def world(self) -> World:
        return self._within

    def grid(self, record: ParameterRecord) -> Grid:
        return record.grid.joined(self._between.world_size)  # its shard boundaries are among those of all ranks

    def has(self, records: Iterable[ParameterRecord]) -> bool:
        return all(record in self._current for record in records)

    def rows(self, record: ParameterRecord) -> torch.Tensor:
        return self._rows[record]

    def keep(self, records: Sequence[ParameterRecord]) -> None:
        for record in records:
            if record not in self._current:
                numel = self.grid(record).shard_numel
                rows = record.padded_full(self.world.world_size * numel)[self.world.rank * numel :][:numel]
                if record in self._rows:
                    self._rows[record].copy_(rows)
                else:
                    with torch.inference_mode(False):  # tensors created in inference mode could not be written later
                        self._rows[record] = rows.clone()
                self._current.add(record)

    def expire(self) -> None:
        # The buffers are reused for new rows.
        self._current = {record for record in self._current if record.group is None}

    def free(self) -> None:
        self._current.clear()
        self._rows.clear()

    def release(self) -> None:
        self._within.release()
        self._between.release()

    @property
    def held_bytes(self) -> int:
        rank = self.world.rank
        return sum(self.grid(r).shard_valid_numel(rank) * rows.element_size() for r, rows in self._rows.items())


def _exchanges(exchanges: Exchanges, config: Config, sharding: Sharding, world: World) -> Exchanges:
    if config.secondary_size is not None and sharding.parameters:
        exchanges = replace(exchanges, replica=SecondaryShards(world, config.secondary_size))
    if config.zero.zero_quantized_weights:
        exchanges = replace(exchanges, gathers=QuantizedGathers())
    if config.zero.zero_quantized_gradients and sharding.gradients and not config.frozen:
        # There are two hops, the first within groups.
        size = config.secondary_size or world.local_world_size or world.world_size
        group_size = size if 1 < size < world.world_size and world.world_size % size == 0 else world.world_size
        reducer = QuantizedReducer(world, config.zstore.quantized_gradient_bits, group_size=group_size)
        exchanges = replace(exchanges, reducer=reducer)
    return exchanges


register(_exchanges)
