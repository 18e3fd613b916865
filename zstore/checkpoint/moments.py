"""Optimizer moments in fewer bits: which they are, how they are cut into blocks, and their fp32 values. No torch.

[Note: moments in 8 bits]
A moment is cut into blocks along the flat parameter. Of each block a scale is kept, in fp32, and of each element a code of
8 bits: a small floating-point number of 16 steps to a factor of two, which is multiplied by the scale.
signed    int8. Of |code| from 0 to 127: the number whose fp32 bits are ((119 << 4) + |code|) << 19, less 2^-8. Above 2^-8
          the steps grow with the value; below they are even, so that zero is among the values. Largest: 247/256.
positive  uint8. The number whose fp32 bits are ((111 << 4) + code) << 19: from 2^-16 to 31/32, and never zero unless
          the scale is, since a divisor must not vanish. A variance of 2^-16 of its block's largest is a
          gradient of 2^-8.
The scale is the block's largest absolute value, divided by the largest number. A block has as many elements as divide
every cut at every world size, at most 256: so it is in one shard, whatever the number of ranks.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (https://arxiv.org/abs/2110.02861), whose codes are a
table of decimal steps; these have the processor's own exponents, and so need no search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointMismatchError
from ..format.arrays import ArraySpec
from ..format.partition import cut_numel
from .source import ArraySource, StoredArray

Moments = Literal["fp32", "bf16", "int8"]

SIGNED = frozenset({"exp_avg", "momentum_buffer"})
POSITIVE = frozenset({"exp_avg_sq", "square_avg", "acc_delta", "exp_inf"})
"""Slots that are kept in fewer bits: averages that forget, so that roundings do not add up."""
_EXACT_WITH = {"square_avg": ("grad_avg",), "exp_avg_sq": ("max_exp_avg_sq", "max_exp_avg_sqs")}
"""Slots that stay in fp32 beside others: centered RMSprop subtracts the square of a mean, which must not be larger, and in
amsgrad's maximum every rounding up would stay."""

BLOCK_NUMEL = 256
"""Most elements of a block."""
STEP_BITS = 19
"""Low bits of an fp32 number that a code leaves out."""
LEAST_SIGNED = 119 << 23
"""fp32 bits of 2^-8, which is added to the absolute value of a signed one."""
LEAST_POSITIVE = 111 << 23
"""fp32 bits of 2^-16."""
LARGEST_SIGNED = 247 / 256
LARGEST_POSITIVE = 31 / 32
_SCALE = "_scale"


@dataclass(frozen=True)
class StoredSlot:
    """An array that is stored for a slot."""

    name: str
    dtype: str
    block: int = 1
    """Elements of the parameter for each value."""


def block_numel(stored_shape: tuple[int, ...]) -> int:
    """Return the elements of a block of the moments of a parameter: 16 to 256, a power of two."""
    return math.gcd(cut_numel(stored_shape), BLOCK_NUMEL)


def stored_slots(
    slots: Sequence[str], moments: Moments, stored_shape: tuple[int, ...]
) -> dict[str, tuple[StoredSlot, ...]]:
    """Return the stored slots, in order, of those of an optimizer's fp32 slots that `moments` keeps in fewer bits: codes,
    and their scales behind them."""
    if moments == "fp32":
        return {}
    reduced = [
        slot for slot in slots if slot in SIGNED | POSITIVE and not set(slots).intersection(_EXACT_WITH.get(slot, ()))
    ]
    if moments == "bf16":
        return {slot: (StoredSlot(slot, "bfloat16"),) for slot in reduced}
    block = block_numel(stored_shape)
    return {
        slot: (StoredSlot(slot, code_dtype(slot)), StoredSlot(scale_slot(slot), "float32", block)) for slot in reduced
    }


def code_dtype(slot: str) -> str:
    """Return the data type of a slot's codes."""
    return "int8" if slot in SIGNED else "uint8"


def scale_slot(slot: str) -> str:
    """Return the slot of the scales of a slot in 8 bits."""
    return slot + _SCALE


def scale_array(name: str) -> str:
    """Return the array of the scales of a moment's array, "optimizer/exp_avg/w" for instance."""
    group, slot, fqn = name.split("/", 2)
    return f"{group}/{scale_slot(slot)}/{fqn}"


def codes_of_scales(name: str) -> str | None:
    """Return the array of the codes of which `name` would have the scales; None if it cannot have any."""
    group, _, rest = name.partition("/")
    slot, _, fqn = rest.partition("/")
    plain = slot.removesuffix(_SCALE)
    if group != "optimizer" or plain == slot or plain not in SIGNED | POSITIVE:
        return None
    return f"{group}/{plain}/{fqn}"


def scales_of(arrays: Mapping[str, StoredArray], name: str) -> tuple[str, int] | None:
    """Return the array of the scales of a moment's array of a checkpoint, and the elements of a block; None if the
    array has plain values. Raises CheckpointMismatchError if the scales are missing or do not fit."""
    spec = arrays[name].spec
    if not name.startswith("optimizer/") or spec.dtype not in ("int8", "uint8"):
        return None
    slot = name.split("/", 2)[1]
    if slot not in SIGNED | POSITIVE:
        return None
    scales, block = scale_array(name), block_numel(spec.stored_shape)
    wanted = {name: (spec.shape, code_dtype(slot)), scales: ((-(-spec.numel // block),), "float32")}
    found = {n: (arrays[n].spec.shape, arrays[n].spec.dtype) for n in wanted if n in arrays}
    if found != wanted:
        raise CheckpointMismatchError(f"the moment {name!r} is in 8 bits: expected arrays {wanted}, got {found}")
    return scales, block


def scales_spec(codes: ArraySpec) -> ArraySpec:
    """Return the array of the scales of `codes`."""
    block = block_numel(codes.stored_shape)
    return ArraySpec(name=scale_array(codes.name), shape=(-(-codes.numel // block),), dtype="float32")


@cache
def values_of_codes(dtype: str) -> npt.NDArray[np.float32]:
    """Return the number of each code, from the least code on: of 256, by `code + 128` if they are signed."""
    codes = np.arange(256 if dtype == "uint8" else 128, dtype=np.int32) << STEP_BITS
    if dtype == "uint8":
        return (codes + LEAST_POSITIVE).view(np.float32)
    above = (codes + LEAST_SIGNED).view(np.float32) - np.float32(2**-8)
    return np.concatenate([[np.float32(0)], -above[:0:-1], above]).astype(np.float32)


def whole_moment(reader: ArraySource, name: str, first: int, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the fp32 values of a moment of which `stored` is the elements from `first` on, 1-D; `stored` itself if it
    is not in 8 bits."""
    found = scales_of(reader.arrays, name)
    if found is None:
        return stored
    scales, block = found
    begin, stop = first // block, -(-(first + stored.size) // block)
    factors = np.empty(stop - begin, np.float32)
    reader.read(scales, begin, stop, factors)
    least = 0 if stored.dtype == np.uint8 else -128
    values = values_of_codes(stored.dtype.name)[stored.astype(np.int32) - least]
    return values * np.repeat(factors, block)[first % block :][: stored.size]
