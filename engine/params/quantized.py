"""Values as small integers, in blocks with one scale each: the form in which ranks exchange matrices if the config allows.

[Note: blocks]
A block is 256 consecutive elements of one rank's rows of one parameter, the last one shorter. Its scale is its largest
magnitude over 127 (8 bits) or 7 (4 bits), in fp32; each element is the nearest multiple of it, ties to even. So a value is
off by half a scale at most, and in a block with a value that is not finite none is finite. Two elements of 4 bits make a
byte: element i of a block's first half, and above it element i of its second half.

Several parameters' rows side by side are all scales, then all elements: `bits` / 8 bytes an element and 4 bytes a block.
Blocks never span two parameters, and a parameter is cut between blocks, so the bytes of one do not depend on the others
in the exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from zstore.format import Grid

BLOCK_NUMEL = 256
"""Elements with one scale: 4 bytes of it add 1.6 % to 8 bits, 3 % to 4."""

WEIGHT_BITS = 8
"""Bits of an element of a parameter on its way to be gathered."""
_SCALE_BYTES = 4
_TILE_NUMEL = {"cpu": 256 * 1024}
_DEVICE_TILE_NUMEL = 16 * 1024 * 1024
"""Elements quantized or dequantized at a time: their fp32 values stay in the processor's caches, and are small beside a
device's memory."""


def is_matrix(grid: Grid) -> bool:
    """Return whether a parameter cut so has more than one extent. Others, biases and norms, are sent in their own type."""
    return grid.row_numel > 1


def encoded_bytes(numel: int, bits: int) -> int:
    """Return the bytes of one rank's rows of a parameter, `numel` elements with padding. See [Note: blocks]."""
    return numel * bits // 8 + _SCALE_BYTES * -(-numel // BLOCK_NUMEL)


@dataclass(frozen=True)
class BlockCode:
    """How rows of several parameters, of `lengths` elements each (multiples of 16), are laid out in `bits` (8 or 4) bits an
    element. See [Note: blocks]."""

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
            scale = tile.abs().amax(dim=-1).div_(_largest(self.bits))
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
        split = self._num_blocks * _SCALE_BYTES
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


def _largest(bits: int) -> int:
    """Return the largest of the integers, of which there are as many below zero."""
    return (1 << (bits - 1)) - 1


def _whole_and_rest(length: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `most` elements of whole blocks, and then the shorter block, if there is one."""
    whole = length // BLOCK_NUMEL * BLOCK_NUMEL
    for first in range(0, whole, most):
        yield first, min(first + most, whole)
    if whole < length:
        yield whole, length
