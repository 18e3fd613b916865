"""The bytes of values as small integers, in blocks with one scale each: so ranks exchange matrices if the config allows. Pure.

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

from zstore.format import Grid

BLOCK_NUMEL = 256
"""Elements with one scale: 4 bytes of it add 1.6 % to 8 bits, 3 % to 4."""

WEIGHT_BITS = 8
"""Bits of an element of a parameter on its way to be gathered."""
SCALE_BYTES = 4


def is_matrix(grid: Grid) -> bool:
    """Return whether a parameter cut so has more than one extent. Others, biases and norms, are sent in their own type."""
    return grid.row_numel > 1


def encoded_bytes(numel: int, bits: int) -> int:
    """Return the bytes of one rank's rows of a parameter, `numel` elements with padding. See [Note: blocks]."""
    return numel * bits // 8 + SCALE_BYTES * -(-numel // BLOCK_NUMEL)
