"""Optimizer moments stored in bf16 (`zstore.moments`), and in fp32 only during the update.

[Note: stored moments]
This applies to averages of gradients and of squared gradients; see `reduced_slots`. A tile's moments are cast to fp32,
updated by the kernel, and rounded stochastically: an average changes by about a thousandth per step, which rounding to
nearest would always lose. A random word is added before the low bits are truncated. Its index in a table is a hash of the
parameter's name and the step number, plus the element's index in the parameter, so the bits do not depend on tier, world
size or resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from hashlib import blake2b

import numpy as np
import torch

from zstore.errors import UsageError

from ..config.optimizers import reduced_slots
from ..optim.kernel import Kernel, ParameterStep, SlotArray, SlotCodec, Tensors
from ..optim.rules import codecs

_PIECE_NUMEL = 1 << 16
"""Elements cast to fp32 at a time if the CPU updates them, so that they stay in its cache."""
_NUM_WORDS = 1 << 17
"""Number of random words, which repeat along a parameter."""


class MomentCodec(SlotCodec):
    """Stores averages of gradients and of squared gradients in bf16; the first element on this rank uses random word
    `start`. See [Note: stored moments]."""

    is_plain = False

    def __init__(self, start: int = 0) -> None:
        self._start = start

    def stored(self, slots: Sequence[SlotArray]) -> list[SlotArray]:
        reduced = reduced_slots(slot.name for slot in slots if slot.dtype == torch.float32 and slot.shape is None)
        return [replace(slot, dtype=torch.bfloat16) if slot.name in reduced else slot for slot in slots]

    def of(self, name: str, step: int, first: int) -> SlotCodec:
        digest = blake2b(f"{step} {name}".encode(), digest_size=4).digest()
        return MomentCodec(int.from_bytes(digest, "little") % _NUM_WORDS + first)

    def update(
        self, step: ParameterStep, master: torch.Tensor, gradient: torch.Tensor, views: Tensors, first: int
    ) -> None:
        piece = _PIECE_NUMEL if master.device.type == "cpu" else max(master.numel(), 1)
        for begin in range(0, master.numel(), piece):
            stop = min(begin + piece, master.numel())
            parts = [view[begin:stop] for view in views]
            values = [part.float() for part in parts]
            step.tiles([master[begin:stop]], [gradient[begin:stop]], [values])
            self.put(values, parts, first + begin)

    def put(self, values: Tensors, views: Tensors, first: int) -> None:
        for index, (value, view) in enumerate(zip(values, views, strict=True)):
            if view.dtype == torch.float32:
                view.copy_(value)
                continue
            noise = _noise(value.device, index % 2)
            for begin in range(0, value.numel(), _NUM_WORDS):
                part = value[begin : begin + _NUM_WORDS]
                word = (self._start + first + begin) % _NUM_WORDS
                bits = part.view(torch.int32).add_(noise[word : word + part.numel()])
                view[begin : begin + _NUM_WORDS].view(torch.int16).copy_(bits.bitwise_right_shift_(16))


@cache
def _noise(device: torch.device, half: int) -> torch.Tensor:
    """Return the noise to add to fp32 bits, from one half of each random word, repeated twice."""
    # Uses raw output, since numpy's distributions may change between versions.
    words = np.random.Philox(key=0).random_raw(_NUM_WORDS // 2).view("<u4").astype(np.int64)
    noise = (torch.from_numpy(np.concatenate([words, words])) >> (16 * half)) & 0xFFFF
    return noise.to(device, torch.int32)


def _moment_codec(kernels: Sequence[Kernel], kind: str) -> SlotCodec:
    """Return the codec. Raises UsageError if the optimizer `kind` stores no moments that it applies to."""
    if any(reduced_slots(kernel.slots) for kernel in kernels):
        return MomentCodec()
    raise UsageError(
        '"moments": "bf16": expected an optimizer that stores averages of gradients or of squared gradients, got '
        f"{kind}, which stores {', '.join(kernels[0].slots) or 'nothing'}; remove the key, or use Adam"
    )


codecs["bf16"] = _moment_codec
