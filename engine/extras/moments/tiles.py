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

import torch

from zstore.checkpoint import Moments, scale_slot, stored_slots
from zstore.errors import UsageError

from ...config.config import Config
from ...optim.kernel import Kernel, ParameterStep, SlotArray, SlotCodec, SlotTiles, Tensors
from ...optim.stepper import WholeKernel, whole_step_error
from ...runtime.device import Scratch
from .codes import NUM_WORDS, dequantize, quantize, round_to_bf16, word_of

_PIECE_NUMEL = 1 << 16
"""Elements that are in fp32 at a time, if the processor updates them: they stay in its cache."""


class MomentCodec(SlotCodec):
    """Keeps averages of gradients and of their squares in fewer bits. See [Note: stored moments]."""

    is_plain = False

    def __init__(self, moments: Moments) -> None:
        self._moments = moments

    def stored(self, slots: Sequence[SlotArray], stored_shape: tuple[int, ...]) -> list[SlotArray]:
        plain = [slot.name for slot in slots if slot.dtype == torch.float32 and slot.block == 1 and slot.shape is None]
        kept = stored_slots(plain, self._moments, stored_shape)
        found: list[SlotArray] = []
        for slot in slots:
            if slot.name in kept:
                found += [SlotArray(k.name, getattr(torch, k.dtype), k.block, slot.entry) for k in kept[slot.name]]
            else:
                found.append(slot)
        return found

    def tiles(
        self, stored: Sequence[SlotArray], name: str, step: int, first: int, former: SlotTiles | None = None
    ) -> SlotTiles:
        return MomentTiles(stored, name, step, first, former)


def moment_codec(config: Config, kernels: Sequence[Kernel], kind: str) -> SlotCodec | None:
    """Return the codec that `zstore.moments` asks for, None for none. Raises UsageError if an optimizer of a `kind` has no
    moment that could be in fewer bits, or takes its own step."""
    moments, slots = config.moments, [kernel.slots for kernel in kernels]
    if moments == "fp32":
        return None
    if any(isinstance(kernel, WholeKernel) for kernel in kernels):
        raise whole_step_error(kind, "moments")
    if any(stored_slots(names, moments, (1,)) for names in slots):
        return MomentCodec(moments)
    kept = ", ".join(dict.fromkeys(name for names in slots for name in names)) or "nothing"
    raise UsageError(
        f'"moments": "{moments}": expected an optimizer that keeps averages of gradients or of their squares, got {kind}, '
        f"which keeps {kept}: in fewer bits that would not be what it is for; leave the key out, or use Adam or SGD with "
        "momentum"
    )


class MomentTiles(SlotTiles):
    """The slots of a parameter whose arrays are `stored`. See [Note: stored moments].

    `first` is the place of this rank's first element in the whole parameter. The memory of a `former` one, which is not used
    any more, is reused.
    """

    def __init__(
        self, stored: Sequence[SlotArray], name: str, step: int, first: int, former: SlotTiles | None = None
    ) -> None:
        super().__init__(stored)
        self._start = word_of(name, step) + first
        self._scratch: Scratch = former._scratch if isinstance(former, MomentTiles) else Scratch()

    def update(
        self, step: ParameterStep, master: torch.Tensor, gradient: torch.Tensor, views: Tensors, first: int
    ) -> None:
        piece = _PIECE_NUMEL if master.device.type == "cpu" else max(master.numel(), 1)
        for begin in range(0, master.numel(), piece):
            stop = min(begin + piece, master.numel())
            parts = [view[begin // n : -(-stop // n)] for view, n in zip(views, self.blocks, strict=True)]
            values = self._dequantize(parts, self._scratch)
            step.tile(master[begin:stop], gradient[begin:stop], values)
            self.quantize(values, parts, first + begin)

    def dequantize(self, views: Tensors) -> list[torch.Tensor]:
        return self._dequantize(views, Scratch())

    def _dequantize(self, views: Tensors, scratch: Scratch) -> list[torch.Tensor]:
        values: list[torch.Tensor] = []
        for number, (slot, view, scales) in enumerate(self._slots(views)):
            if view.dtype == torch.float32:
                values.append(view)
                continue
            value = scratch.take(str(number), view, torch.float32)
            if scales is None:
                value.copy_(view)
            else:
                dequantize(view, scales, slot.block, value, scratch.take("codes", view, torch.float32))
            values.append(value)
        return values

    def quantize(self, values: Tensors, views: Tensors, first: int) -> None:
        for number, (value, (slot, view, scales)) in enumerate(zip(values, self._slots(views), strict=True)):
            if view.dtype == torch.float32:
                if value is not view:
                    view.copy_(value)
                continue
            for begin in range(0, value.numel(), NUM_WORDS):
                stop = min(begin + NUM_WORDS, value.numel())
                noise = ((self._start + first + begin) % NUM_WORDS, number % 2)
                if scales is None:
                    round_to_bf16(value[begin:stop], view[begin:stop], noise)
                else:
                    part = scales[begin // slot.block : -(-stop // slot.block)]
                    room = self._scratch.take("codes", view, torch.float32, stop - begin)
                    quantize(value[begin:stop], view[begin:stop], part, slot.block, noise, room)

    def _slots(self, views: Tensors) -> Iterator[tuple[SlotArray, torch.Tensor, torch.Tensor | None]]:
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
