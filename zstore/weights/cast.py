"""Casts of weights, round to nearest even, that detect values that the target type cannot hold.

[Note: cast libraries]
Casts between fp32 and 16-bit types are numkong's if it is installed, else torch's if the process has loaded it, else numpy's,
with integer arithmetic for fp32 to fp16 (below). torch is not loaded for a cast: that takes 200 MB and as long as casting a
billion elements. Finite results have the same bits from each. Tiles with other values are left to numpy: libraries differ in
their NaNs, and values that were too large have to be counted.

[Note: fp32 to fp16]
numpy casts one element after another; integer arithmetic over tiles gives the same bits at nearly twice the speed. For normal
fp16 numbers, the bits of the magnitude, moved to fp16's exponents and rounded at bit 13, are the result. For subnormal ones,
adding 0.5 rounds the magnitude to multiples of 2^-24, whose count is the last bits of the sum. Both are computed for all
elements, and the smaller is the result: a value that does not apply is not less than the other.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..format.arrays import Array, numpy_dtype

Overflow = Literal["error", "inf", "clamp"]
CastLibrary = Literal["numkong", "torch", "numpy"]
"""The library that casts. See [Note: cast libraries]."""

_TILE_NUMEL = 64 * 1024
"""Elements of a tile, which stays in the cache between the cast and the check."""
_SERIAL_NUMEL = 32 * 1024
"""Elements that torch casts without its threads, which would compete with ours."""
_INFINITY_BITS = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
_FAST = (("float32", "float16"), ("float32", "bfloat16"), ("float16", "float32"))
"""Casts that libraries do faster than numpy."""

_Cast = Callable[[Array, Array], bool]
"""Casts a tile, 1-D and contiguous; returns False, with the target overwritten, if numpy has to cast it."""


def cast_into(source: Array, target: Array, dtype: str, overflow: Overflow, *, by: CastLibrary | None = None) -> int:
    """Cast `source` into `target` (both 1-D, `target` of `dtype`); return how many finite values became infinite.

    With "clamp" they become the largest finite value of their sign. The bits depend neither on the library, by default
    the fastest available, nor on how the elements are divided into calls. See [Note: cast libraries].
    """
    if source.dtype == numpy_dtype(dtype):
        target[:] = source
        return 0
    lost = 0
    cast = _cast_of(source, target, dtype, by or cast_libraries()[0])
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for first in range(0, source.size, _TILE_NUMEL):
            piece, out = source[first : first + _TILE_NUMEL], target[first : first + _TILE_NUMEL]
            if not (cast(piece, out) and _all_finite(out, dtype)):
                lost += _cast_all(piece, out, dtype, overflow)
    return lost


def _cast_all(source: Array, target: Array, dtype: str, overflow: Overflow) -> int:
    """Cast a tile with values that may not be finite; see `cast_into`."""
    np.copyto(target, source, casting="unsafe")
    infinite = _infinite(target, dtype)
    if not infinite.any():
        return 0
    infinite &= np.isfinite(source.astype(np.float64))
    if overflow == "clamp":
        target[infinite] = np.copysign(_LARGEST[dtype], source[infinite].astype(np.float64)).astype(target.dtype)
    return int(infinite.sum())


def cast_libraries() -> list[CastLibrary]:
    """Return the available cast libraries, fastest first; torch only if it is loaded."""
    found: list[CastLibrary] = ["numpy"]
    if "torch" in sys.modules:
        found.insert(0, "torch")
    if _numkong is not None:
        found.insert(0, "numkong")
    return found


def _cast_of(source: Array, target: Array, dtype: str, by: CastLibrary) -> _Cast:
    """Return the function that casts the tiles."""
    plain = source.flags.c_contiguous and target.flags.c_contiguous and sys.byteorder == "little"
    if not plain or (source.dtype.name, dtype) not in _FAST:
        return _by_numpy
    if by == "numkong":
        return _by_numkong
    if by == "torch" and source.flags.writeable:  # it warns of other memory
        return _by_torch
    return _to_half if dtype == "float16" else _by_numpy


def _by_numpy(source: Array, target: Array) -> bool:
    np.copyto(target, source, casting="unsafe")
    return True


_numkong: Any = None
with contextlib.suppress(ImportError):
    _numkong = importlib.import_module("numkong")


def _by_numkong(source: Array, target: Array) -> bool:
    _numkong.astype(source, target.dtype.name, out=target)
    return True


def _by_torch(source: Array, target: Array) -> bool:
    from ..io.memory import as_torch

    for first in range(0, source.size, _SERIAL_NUMEL):
        part = slice(first, first + _SERIAL_NUMEL)
        as_torch(target[part]).copy_(as_torch(source[part]))
    return True


class _Scratch(threading.local):
    """Memory of a tile, of each thread."""

    def __init__(self) -> None:
        self.words = np.empty((2, _TILE_NUMEL), np.uint32)
        self.signs = np.empty(_TILE_NUMEL, np.uint16)


_scratch = _Scratch()
_MIN_NORMAL = 113 << 23
"""Bits of 2^-14 in fp32."""
_TO_EXPONENT = np.uint32((0xFFF - _MIN_NORMAL) % 2**32)
"""Moves the smallest normal number of fp16 to 0, and adds half of the last kept bit, less one."""


def _to_half(source: Array, target: Array) -> bool:
    """Cast a tile of fp32 to fp16; False, with `target` overwritten, if a result is not finite. See [Note: fp32 to fp16]."""
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


def _all_finite(values: Array, dtype: str) -> bool:
    """Return whether all values are finite; False if that is unknown."""
    limit = _INFINITY_BITS.get(dtype)
    if limit is None:
        return False
    # On the bits: of positive numbers as signed integers, of negative ones as unsigned.
    signed, unsigned = (values.view(f"{kind}{values.itemsize}") for kind in "iu")
    sign = 1 << 8 * values.itemsize - 1
    return bool(signed.max(initial=0) < limit and unsigned.max(initial=0) < sign + limit)


def _infinite(values: Array, dtype: str) -> npt.NDArray[np.bool_]:
    # On the bits: isinf of 16-bit types is ten times slower.
    if values.itemsize == 2:
        found: npt.NDArray[np.bool_] = (values.view(np.uint16) & np.uint16(0x7FFF)) == np.uint16(_INFINITY_BITS[dtype])
        return found
    return np.isinf(values)
