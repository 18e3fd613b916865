"""Casts of weights, round to nearest even, that notice what the target type cannot hold.

[Note: fp32 to fp16]
numpy casts one element after another. The same bits come from integer arithmetic over tiles, at nearly twice the speed. For
what is a normal number in fp16, the bits of the magnitude, moved to fp16's exponents and rounded at bit 13, are the
result. For what is subnormal there, adding 0.5 rounds the magnitude to multiples of 2^-24, whose number are the last bits
of the sum. Computed for all elements, each way gives for the other's a number that is not less than theirs, so the lesser
is the result. Tiles with values that are too large, infinite or no number are left to numpy.
"""

from __future__ import annotations

import sys
import threading
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..format.arrays import Array, numpy_dtype

Overflow = Literal["error", "inf", "clamp"]

_TILE_NUMEL = 64 * 1024
"""Elements of a tile: source and target stay in the cache between the cast and the check."""
_INFINITY_BITS = {"float16": 0x7C00, "bfloat16": 0x7F80}
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}


def cast_into(source: Array, target: Array, dtype: str, overflow: Overflow) -> int:
    """Cast `source` into `target` (both 1-D, `target` of `dtype`); return how many finite values became infinite.

    With "clamp" those become the largest finite value of their sign.
    """
    if source.dtype == numpy_dtype(dtype):
        target[:] = source
        return 0
    lost = 0
    to_half = (
        dtype == "float16" and source.dtype == np.float32 and source.flags.c_contiguous and sys.byteorder == "little"
    )
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for first in range(0, source.size, _TILE_NUMEL):
            piece, out = source[first : first + _TILE_NUMEL], target[first : first + _TILE_NUMEL]
            if to_half and _to_half(piece, out):
                continue
            np.copyto(out, piece, casting="unsafe")
            infinite = _infinite(out, dtype)
            if infinite.any():
                infinite &= np.isfinite(piece.astype(np.float64))
                lost += int(infinite.sum())
                if overflow == "clamp":
                    out[infinite] = np.copysign(_LARGEST[dtype], piece[infinite].astype(np.float64)).astype(out.dtype)
    return lost


class _Scratch(threading.local):
    """Memory of a tile, of each thread."""

    def __init__(self) -> None:
        self.words = np.empty((2, _TILE_NUMEL), np.uint32)
        self.signs = np.empty(_TILE_NUMEL, np.uint16)


_scratch = _Scratch()
_LEAST_NORMAL = 113 << 23
"""Bits of 2^-14 in fp32."""
_TO_EXPONENT = np.uint32((0xFFF - _LEAST_NORMAL) % 2**32)
"""Moves the least normal number of fp16 to 0, and half of the last bit that is kept, less one, is added."""


def _to_half(source: Array, target: Array) -> bool:
    """Cast a tile of fp32 to fp16; false, with `target` spoiled, where not all is finite in fp16. See [Note: fp32 to fp16]."""
    bits, halves = source.view(np.uint32), target.view(np.uint16)
    (small, normal), signs = _scratch.words[:, : source.size], _scratch.signs[: source.size]
    np.bitwise_and(bits, np.uint32(0x7FFFFFFF), out=small)
    np.right_shift(small, np.uint32(13), out=normal)
    np.bitwise_and(normal, np.uint32(1), out=normal)  # ties to even
    np.add(normal, small, out=normal)
    np.add(normal, _TO_EXPONENT, out=normal)
    np.right_shift(normal, np.uint32(13), out=normal)
    np.add(normal, np.uint32(0x400), out=normal)
    sums = small.view(np.float32)
    np.add(sums, np.float32(0.5), out=sums)
    np.subtract(small, np.uint32(0x3F000000), out=small)
    np.minimum(normal, small, out=normal)
    if normal.max(initial=0) >= _INFINITY_BITS["float16"]:
        return False
    np.copyto(halves, normal, casting="unsafe")
    np.bitwise_and(bits.view(np.uint16)[1::2], np.uint16(0x8000), out=signs)
    np.bitwise_or(halves, signs, out=halves)
    return True


def _infinite(values: Array, dtype: str) -> npt.NDArray[np.bool_]:
    # On the bits: isinf of 16-bit types is ten times slower.
    if dtype in _INFINITY_BITS:
        found: npt.NDArray[np.bool_] = (values.view(np.uint16) & np.uint16(0x7FFF)) == np.uint16(_INFINITY_BITS[dtype])
        return found
    return np.isinf(values)
