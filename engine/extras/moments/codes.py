"""Codes of moments: bf16, or 8 bits with a scale for each block. See [Note: stored moments] in `tiles`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from hashlib import blake2b

import numpy as np
import torch

from zstore.checkpoint import LARGEST_POSITIVE, LARGEST_SIGNED, LEAST_POSITIVE, LEAST_SIGNED, STEP_BITS, values_of_codes

NUM_WORDS = 1 << 17
"""Random words, after which they repeat along a parameter."""
_NOISE_BITS = 16
_ABOVE_ZERO = 2.0**-8


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, block: int, out: torch.Tensor, room: torch.Tensor
) -> torch.Tensor:
    """Set `out`, fp32, to the values of `codes`, 1-D, with a scale for each `block` of them, and return it.

    `room` is scratch memory of the shape and type of `out`.
    """
    index = room.view(torch.int32).copy_(codes)
    if codes.dtype == torch.int8:
        index += 128
    torch.index_select(_values(codes.dtype, codes.device), 0, index, out=out)
    for rows, factors in _blocks(out, scales, block):
        rows.mul_(factors)
    return out


Noise = tuple[int, int]
"""The place of the first value's random word in the table, and which half of the words is meant, 0 or 1."""


def quantize(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, block: int, noise: Noise, room: torch.Tensor
) -> None:
    """Set `codes` and `scales` to those of `values`, 1-D fp32, which are overwritten, as is `room`, scratch memory like
    them."""
    signed = codes.dtype == torch.int8
    sizes = torch.abs(values, out=room) if signed else values
    for (rows, factors), (absolute, _) in zip(
        _blocks(values, scales, block), _blocks(sizes, scales, block), strict=True
    ):
        factors.copy_(absolute.amax(1, keepdim=True).div_(LARGEST_SIGNED if signed else LARGEST_POSITIVE))
        # Of a block of zeros: 0 / 1.
        rows.div_(factors + (factors == 0))
    bits, signs = values.view(torch.int32), room.view(torch.int32)
    if signed:
        torch.bitwise_right_shift(bits, 31, out=signs)
        values.abs_().add_(_ABOVE_ZERO)
    least, (word, half) = LEAST_SIGNED if signed else LEAST_POSITIVE, noise
    bits.add_(_noise(values.device, half, least)[word : word + values.numel()])
    bits.bitwise_right_shift_(STEP_BITS).clamp_(0, 127 if signed else 255)
    if signed:
        bits.bitwise_xor_(signs).sub_(signs)
    codes.copy_(bits)


def round_to_bf16(values: torch.Tensor, out: torch.Tensor, noise: Noise) -> None:
    """Set `out` to `values`, 1-D fp32, which are overwritten."""
    bits, (word, half) = values.view(torch.int32), noise
    bits.add_(_noise(values.device, half, None)[word : word + values.numel()])
    out.view(torch.int16).copy_(bits.bitwise_right_shift_(_NOISE_BITS))


def _blocks(values: torch.Tensor, scales: torch.Tensor, block: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield whole blocks as rows with their scales [blocks, 1], and the remainder of a last one."""
    whole = values.numel() // block
    if whole:
        yield values[: whole * block].view(whole, block), scales[:whole].unsqueeze(1)
    if whole * block < values.numel():
        yield values[whole * block :].unsqueeze(0), scales[whole:].unsqueeze(1)


def word_of(name: str, step: int) -> int:
    """Return the place in the table of random words at which a parameter begins in a step."""
    return int.from_bytes(blake2b(f"{step} {name}".encode(), digest_size=4).digest(), "little") % NUM_WORDS


@cache
def random_words() -> torch.Tensor:
    """Return the table of random words, int64 below 2^32, twice in a row."""
    # Raw output: the same in every version of numpy, which it does not promise for its distributions.
    words = np.random.Philox(key=0).random_raw(NUM_WORDS // 2).view("<u4").astype(np.int64)
    return torch.from_numpy(np.concatenate([words, words]))


@cache
def _noise(device: torch.device, half: int, least: int | None) -> torch.Tensor:
    """Return the summand of fp32 bits before they are cut off, by word: for bf16, or for codes that begin at `least`."""
    noise = (random_words() >> (_NOISE_BITS * half)) & 0xFFFF
    if least is not None:
        # In the middle of the range that the 16 bits leave open, so that it is fair.
        missing = STEP_BITS - _NOISE_BITS
        noise = (noise << missing) + (1 << missing - 1) - least
    return noise.to(device, torch.int32)


@cache
def _values(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values_of_codes(str(dtype).removeprefix("torch."))).to(device)
