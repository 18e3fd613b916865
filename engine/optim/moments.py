"""Optimizer moments kept in bf16, or in codes of 8 bits with a scale for each block; in fp32 for the update alone.

[Note: stored moments]
Which moments are kept so, and in which blocks, is in `zstore.checkpoint.moments`. A tile's moments are dequantized, the
kernel runs over fp32 values, and they are quantized again. Rounding is stochastic: an average moves by a thousandth of
itself a step, which rounding to the nearest would lose every time if numbers are further apart. A table of random words
gives the summand before the low bits are cut off. An element's place in it is a hash of the parameter's name and the
step's number, plus the element's place in the whole parameter: so the bits are the same on every tier, at every world
size, and after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import blake2b

import numpy as np
import torch

from zstore.checkpoint import (
    LARGEST_POSITIVE,
    LARGEST_SIGNED,
    LEAST_POSITIVE,
    LEAST_SIGNED,
    STEP_BITS,
    Moments,
    scale_slot,
    stored_slots,
    values_of_codes,
)
from zstore.errors import UsageError

from ..device import Scratch
from .kernel import ParameterStep, SlotArray

_WORDS = 1 << 17
"""Random words, after which they repeat along a parameter."""
_PIECE_NUMEL = 1 << 16
"""Elements that are in fp32 at a time, if the processor updates them: they stay in its cache."""
_NOISE_BITS = 16
_ABOVE_ZERO = 2.0**-8


def slots_at_rest(slots: Sequence[SlotArray], moments: Moments, stored_shape: tuple[int, ...]) -> list[SlotArray]:
    """Return the stored arrays of a kernel's slots of a parameter, in their order."""
    plain = [slot.name for slot in slots if slot.dtype == torch.float32 and slot.block == 1 and slot.shape is None]
    kept = stored_slots(plain, moments, stored_shape)
    found: list[SlotArray] = []
    for slot in slots:
        if slot.name in kept:
            found += [SlotArray(k.name, getattr(torch, k.dtype), k.block, slot.entry) for k in kept[slot.name]]
        else:
            found.append(slot)
    return found


def check_moments(moments: Moments, slots: Sequence[Sequence[str]], kind: str) -> None:
    """Raise UsageError if an optimizer, whose groups keep `slots`, has no moment that could be in fewer bits."""
    if moments == "fp32" or any(stored_slots(names, moments, (1,)) for names in slots):
        return
    kept = ", ".join(dict.fromkeys(name for names in slots for name in names)) or "nothing"
    raise UsageError(
        f'"moments": "{moments}": expected an optimizer that keeps averages of gradients or of their squares, got {kind}, '
        f"which keeps {kept}: in fewer bits that would not be what it is for; leave the key out, or use Adam or SGD with "
        "momentum"
    )


class MomentTiles:
    """The slots of a parameter, tile by tile, in the kernel's form. See [Note: stored moments].

    `stored` are its arrays, and `first` the place of this rank's first element in the whole parameter. The memory of a
    `former` one, which is not used any more, is reused.
    """

    def __init__(
        self, stored: Sequence[SlotArray], name: str, step: int, first: int, former: MomentTiles | None = None
    ) -> None:
        self._stored = stored
        self._start = word_of(name, step) + first
        self._scratch: Scratch = Scratch() if former is None else former._scratch

    @property
    def blocks(self) -> list[int]:
        """Elements for each value of each array."""
        return [slot.block for slot in self._stored]

    def update(
        self,
        step: ParameterStep,
        master: torch.Tensor,
        gradient: torch.Tensor,
        views: Sequence[torch.Tensor],
        first: int,
    ) -> None:
        """Take `step` over a tile whose first element is this rank's number `first`; `views` are of the arrays."""
        piece = _PIECE_NUMEL if master.device.type == "cpu" else max(master.numel(), 1)
        for begin in range(0, master.numel(), piece):
            stop = min(begin + piece, master.numel())
            parts = [view[begin // n : -(-stop // n)] for view, n in zip(views, self.blocks, strict=True)]
            values = self._expand(parts, self._scratch)
            step.tile(master[begin:stop], gradient[begin:stop], values)
            self.reduce(values, parts, first + begin)

    def expand(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the values of a tile of the arrays, 1-D fp32 [n] a slot; for slots stored in fp32, the views themselves."""
        return self._expand(views, Scratch())

    def _expand(self, views: Sequence[torch.Tensor], scratch: Scratch) -> list[torch.Tensor]:
        values: list[torch.Tensor] = []
        for number, (slot, view, scales) in enumerate(self._slots(views)):
            if view.dtype == torch.float32:
                values.append(view)
                continue
            value = scratch.take(str(number), view, torch.float32)
            if scales is None:
                value.copy_(view)
            else:
                expand_codes(view, scales, slot.block, value, scratch.take("codes", view, torch.float32))
            values.append(value)
        return values

    def reduce(self, values: Sequence[torch.Tensor], views: Sequence[torch.Tensor], first: int) -> None:
        """Set a tile's `views`, whose first element is this rank's number `first`, to `values`, which are overwritten."""
        for number, (value, (slot, view, scales)) in enumerate(zip(values, self._slots(views), strict=True)):
            if view.dtype == torch.float32:
                if value is not view:
                    view.copy_(value)
                continue
            for begin in range(0, value.numel(), _WORDS):
                stop = min(begin + _WORDS, value.numel())
                noise = ((self._start + first + begin) % _WORDS, number % 2)
                if scales is None:
                    reduce_to_bf16(value[begin:stop], view[begin:stop], noise)
                else:
                    part = scales[begin // slot.block : -(-stop // slot.block)]
                    room = self._scratch.take("codes", view, torch.float32, stop - begin)
                    reduce_to_codes(value[begin:stop], view[begin:stop], part, slot.block, noise, room)

    def _slots(self, views: Sequence[torch.Tensor]) -> Iterator[tuple[SlotArray, torch.Tensor, torch.Tensor | None]]:
        """Yield each slot with its view and that of its scales; of one with scales the slot is theirs."""
        number = 0
        while number < len(views):
            slot, view = self._stored[number], views[number]
            following = self._stored[number + 1] if number + 1 < len(views) else None
            if following is not None and following.name == scale_slot(slot.name):
                yield following, view, views[number + 1]
                number += 2
            else:
                yield slot, view, None
                number += 1


def expand_codes(
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


def reduce_to_codes(
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


def reduce_to_bf16(values: torch.Tensor, out: torch.Tensor, noise: Noise) -> None:
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
    return int.from_bytes(blake2b(f"{step} {name}".encode(), digest_size=4).digest(), "little") % _WORDS


@cache
def random_words() -> torch.Tensor:
    """Return the table of random words, int64 below 2^32, twice in a row."""
    # Raw output: the same in every version of numpy, which it does not promise for its distributions.
    words = np.random.Philox(key=0).random_raw(_WORDS // 2).view("<u4").astype(np.int64)
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
