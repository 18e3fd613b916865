"""Values as small integers: encodes and decodes rows as [Note: blocks] says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from ...plan.quantized import BLOCK_NUMEL, SCALE_BYTES, encoded_bytes

_TILE_NUMEL = {"cpu": 256 * 1024}
_DEVICE_TILE_NUMEL = 16 * 1024 * 1024
"""Elements quantized or dequantized at a time: their fp32 values stay in the processor's caches, and are small beside a
device's memory."""


@dataclass(frozen=True)
class BlockCode:
    """How rows of several parameters, of `lengths` elements each (multiples of 16), are laid out in `bits` (8 or 4) bits an
    element."""

    lengths: tuple[int, ...]
    bits: int

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return sum(encoded_bytes(length, self.bits) for length in self.lengths)

    @cached_property
    def _num_blocks(self) -> int:
        return sum(-(-length // BLOCK_NUMEL) for length in self.lengths)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` [rows, sum of lengths], of any floating type, as bytes, uint8 [rows, row_bytes]."""
        encoded = torch.empty(values.shape[0], self.row_bytes, dtype=torch.uint8, device=values.device)
        scales, elements = self._parts(encoded)
        for columns, blocks, size in self._tiles(values):
            tile = values[:, columns].view(values.shape[0], -1, size).float()
            largest = tile.abs().amax(dim=-1)
            # The largest integer, as a tensor: by a number CUDA multiplies with the inverse, which rounds to other bits.
            scale = largest.div_(largest.new_full((), (1 << (self.bits - 1)) - 1))
            # A block of zeros has the smallest normal number for a scale.
            scale.clamp_(min=torch.finfo(torch.float32).tiny)
            scales[:, blocks] = scale
            whole = torch.div(tile, scale[..., None]).round_().to(torch.int8)
            if self.bits == 4:
                low, high = whole.chunk(2, dim=-1)
                whole = low.bitwise_and_(15).bitwise_or_(high << 4)
            elements[:, self._bytes(columns)] = whole.flatten(1)
        return encoded

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> torch.Tensor:
        """Fill `out` [rows, sum of lengths] with the values of an `encode` result, or `add` them to it; returns `out`. A
        value is the product in fp32, rounded to the type of `out`."""
        scales, elements = self._parts(encoded)
        for columns, blocks, size in self._tiles(out):
            whole = elements[:, self._bytes(columns)].view(out.shape[0], -1, size * self.bits // 8)
            if self.bits == 4:
                whole = torch.cat([(whole << 4) >> 4, whole >> 4], dim=-1)
            values = (whole * scales[:, blocks][..., None]).flatten(1)
            if add:
                out[:, columns].add_(values)
            else:
                out[:, columns] = values
        return out

    def _parts(self, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales, fp32 [rows, blocks], and the elements, int8 [rows, bytes], in `encoded`."""
        split = self._num_blocks * SCALE_BYTES
        return encoded[:, :split].view(torch.float32), encoded[:, split:].view(torch.int8)

    def _bytes(self, columns: slice) -> slice:
        return slice(columns.start * self.bits // 8, columns.stop * self.bits // 8)

    def _tiles(self, values: torch.Tensor) -> Iterator[tuple[slice, slice, int]]:
        """Yield columns of `values`, their blocks, and how many columns a block has there."""
        tile_numel = _TILE_NUMEL.get(values.device.type, _DEVICE_TILE_NUMEL)
        most = max(tile_numel // max(values.shape[0], 1) // BLOCK_NUMEL, 1) * BLOCK_NUMEL
        first = block = 0
        for length in self.lengths:
            for begin, stop in _whole_and_rest(length, most):
                size = min(BLOCK_NUMEL, stop - begin)
                num_blocks = (stop - begin) // size
                yield slice(first + begin, first + stop), slice(block, block + num_blocks), size
                block += num_blocks
            first += length


def _whole_and_rest(length: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `most` elements of whole blocks, and then the shorter block, if there is one."""
    whole = length // BLOCK_NUMEL * BLOCK_NUMEL
    for first in range(0, whole, most):
        yield first, min(first + most, whole)
    if whole < length:
        yield whole, length
