"""Arrays and scalars of numpy from pickles, built from their bytes here."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .pickles import PickledObject, Table, inert

_KINDS = "biuf"
_MOST_DIMS, _MOST_EXTENT = 64, 2**48

NUMPY: Table = {
    **inert(
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
        "numpy._core.numeric._frombuffer",
        "numpy.core.numeric._frombuffer",
        "numpy.dtype",
    ),
    "numpy.ndarray": None,
}
"""Globals of numpy's data; `numpy_value` gives their values."""


def numpy_value(found: PickledObject) -> npt.NDArray[Any] | float | None:
    """Return the array or number that an object of `NUMPY` represents; None if it is of no plain type, or damaged."""
    kind = found.name.rpartition(".")[2]
    try:
        if kind == "scalar":
            dtype, data = found.args
            number: float = _array(data, dtype, ()).item()
            return number
        if kind == "_reconstruct":
            _, shape, dtype, fortran, data = found.state
            return _array(data, dtype, shape, fortran=bool(fortran))
        if kind == "_frombuffer":
            data, dtype, shape, order = found.args
            return _array(data, dtype, shape, fortran=order == "F")
    except (TypeError, ValueError):
        pass
    return None


def _array(data: Any, dtype: Any, shape: Any, *, fortran: bool = False) -> npt.NDArray[Any]:
    plain = _dtype(dtype)
    if not isinstance(data, bytes) or type(shape) is not tuple or len(shape) > _MOST_DIMS:
        raise ValueError("expected bytes and a shape")
    if any(type(n) is not int or not 0 <= n <= _MOST_EXTENT for n in shape):
        raise ValueError("expected extents")
    if len(data) != math.prod(shape) * plain.itemsize:
        raise ValueError("the bytes are not those of the shape")
    array = np.frombuffer(data, plain).reshape(shape, order="F" if fortran else "C")
    # As they are if possible: many arrays may be made of the same bytes.
    return array.astype(plain.newbyteorder("<"), order="C", copy=False)


def _dtype(found: Any) -> np.dtype[Any]:
    text = found.args[0] if isinstance(found, PickledObject) and found.name == "numpy.dtype" and found.args else None
    if not isinstance(text, str) or len(text) > 3 or text[:1] not in _KINDS:
        raise ValueError("no plain type")
    order = found.state[1] if isinstance(found.state, tuple) and len(found.state) > 1 else "<"
    return np.dtype(text).newbyteorder(">" if order == ">" else "<")
