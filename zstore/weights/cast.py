"""Casts of weights, round to nearest even, that notice what the target type cannot hold."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..arrays import numpy_dtype

Array = npt.NDArray[Any]
Overflow = Literal["error", "inf", "clamp"]

_TILE_NUMEL = 128 * 1024
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
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for first in range(0, source.size, _TILE_NUMEL):
            piece, out = source[first : first + _TILE_NUMEL], target[first : first + _TILE_NUMEL]
            np.copyto(out, piece, casting="unsafe")
            infinite = _infinite(out, dtype)
            if infinite.any():
                infinite &= np.isfinite(piece.astype(np.float64))
                lost += int(infinite.sum())
                if overflow == "clamp":
                    out[infinite] = np.copysign(_LARGEST[dtype], piece[infinite].astype(np.float64)).astype(out.dtype)
    return lost


def _infinite(values: Array, dtype: str) -> npt.NDArray[np.bool_]:
    # On the bits: isinf of 16-bit types is ten times slower.
    if dtype in _INFINITY_BITS:
        found: npt.NDArray[np.bool_] = (values.view(np.uint16) & np.uint16(0x7FFF)) == np.uint16(_INFINITY_BITS[dtype])
        return found
    return np.isinf(values)
