"""Masters that are stored as bf16 weights and the bits that these lack: names, and the fp32 values from both.

See "Split masters" in docs/format.md. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointMismatchError
from ..format.arrays import ArraySpec, numpy_dtype
from ..format.partition import BITS
from .source import ArraySource, StoredArray

LOW = "optimizer/master_low"
"""Group of the low 16 bits of each master."""
TIE = "optimizer/master_tie"
"""Group of the bits that tell ties that were rounded down."""


def ties_spec(spec: ArraySpec) -> ArraySpec:
    """Return the array that has a bit for each element of a parameter's array `spec`."""
    name = f"{TIE}/{spec.name.partition('/')[2]}"
    return ArraySpec(name=name, shape=(-(-spec.numel // BITS),), dtype="uint8")


def rest_of_master(arrays: Mapping[str, StoredArray], name: str) -> tuple[str, str] | None:
    """Return the names of the arrays that complete the array `name` ("model/...") of a checkpoint; None if it is whole.

    Raises CheckpointMismatchError if one of the two is missing or they do not fit.
    """
    fqn = name.partition("/")[2]
    low, ties = f"{LOW}/{fqn}", f"{TIE}/{fqn}"
    if not name.startswith("model/") or (low not in arrays and ties not in arrays):
        return None
    spec = arrays[name].spec
    wanted = {
        name: (spec.shape, "bfloat16"),
        low: (spec.shape, "uint16"),
        ties: (ties_spec(spec).shape, "uint8"),
    }
    found = {n: (arrays[n].spec.shape, arrays[n].spec.dtype) for n in wanted if n in arrays}
    if found != wanted:
        raise CheckpointMismatchError(f"the master of {fqn!r} is split: expected arrays {wanted}, got {found}")
    return low, ties


def complete_master(
    reader: ArraySource, name: str, first: int, weight: npt.NDArray[Any]
) -> npt.NDArray[np.float32] | None:
    """Return the fp32 master of which `weight` is the bf16 elements from `first` on, 1-D; None if that is all."""
    rest = rest_of_master(reader.arrays, name)
    if rest is None:
        return None
    stop = first + weight.size
    low = np.empty(weight.size, numpy_dtype("uint16"))
    reader.read(rest[0], first, stop, low)
    begin = first // BITS
    ties = np.empty(-(-stop // BITS) - begin, np.uint8)
    reader.read(rest[1], begin, begin + ties.size, ties)
    rounded_down = np.unpackbits(ties, bitorder="little")[first % BITS :][: weight.size]
    bits = weight.view(np.int16).astype(np.int32)
    bits += rounded_down
    bits <<= 16
    bits += low.view(np.int16)
    return bits.view(np.float32)
