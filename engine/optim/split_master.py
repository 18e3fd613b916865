"""An fp32 master as its bf16 weight, its low 16 bits, and one bit if these do not determine it.

[Note: the split]
With a master's bits as an integer, `master = (weight << 16) + low + (tie << 16)`, `low` taken as signed. Rounding to the
nearest adds at most half of the weight's last digit, so the difference from the weight is in [-0x8000, 0x8000]: a master
that was rounded up has a negative `low`. The two ends have the same 16 bits; they are ties, of which the even neighbour is
the weight, above or below, and the bit says which. It is one for about one element in 131072, so that all work on the
bits is done for those alone. Bit 0 of the first byte is the first element's; bits behind the last element are zero.

A NaN has no nearest weight: its weight is its high half, and the bit corrects the sign of `low`. (A
signalling NaN with nothing in its high half, which no arithmetic makes, has an infinite weight.) The same holds for
any other value that a processor rounds differently: the master is restored to the bit, always.
"""

from __future__ import annotations

import torch


def join_master(
    weight: torch.Tensor, low: torch.Tensor, ties: torch.Tensor, out: torch.Tensor, room: torch.Tensor
) -> torch.Tensor:
    """Write the master of `weight` (bf16 [n]), `low` (uint16 [n]) and `ties` (uint8 [ceil(n / 8)]) to `out` (fp32 [n]).

    All are 1-D, on one device; returns `out`. `room` is int32 [n], whose values are lost. See [Note: the split].
    """
    bits = out.view(torch.int32)
    # A sum of two types would take ten times as long.
    room.copy_(low.view(torch.int16))
    bits.copy_(weight.view(torch.int16)).bitwise_left_shift_(16).add_(room)
    rare = _nonzero_bytes(ties)
    if rare.numel():
        every = _numbers(ties)
        is_set = (ties[rare].unsqueeze(1) >> every) & 1 == 1
        bits[(rare.unsqueeze(1) * 8 + every)[is_set]] += 1 << 16
    return out


def split_master(
    master: torch.Tensor, weight: torch.Tensor, low: torch.Tensor, ties: torch.Tensor, room: torch.Tensor
) -> None:
    """Set `weight`, `low` and `ties` to those of `master`; shapes as in `join_master`.

    `room` is int32 [n], whose values are lost.
    """
    weight.copy_(master)
    ties.zero_()
    if not master.numel():
        return
    bits = master.view(torch.int32)
    least, most = _split_bits(bits, weight, low, room)
    if least < -_TIE or most >= 3 * _TIE:
        wrong = (room < -_TIE) | (room >= 3 * _TIE)
        weight.view(torch.int16)[wrong] = (bits[wrong] >> 16).to(torch.int16)
        least, most = _split_bits(bits, weight, low, room)
    if most < _TIE:
        return
    found = (room >= _TIE).nonzero().flatten()
    # In a byte with several, each adds its own part to the sum.
    ties.index_add_(0, found // 8, (1 << (found % 8)).to(torch.uint8))


_TIE = 0x8000
"""Difference of a master from its weight, from which on a bit is needed."""


def _nonzero_bytes(ties: torch.Tensor) -> torch.Tensor:
    """Return the indices of bytes that are not zero; eight are looked at together if possible."""
    if not ties.numel() or ties.numel() % 8 or ties.data_ptr() % 8:
        return ties.nonzero().flatten()
    rare = ties.view(torch.int64).nonzero() * 8 + _numbers(ties)
    return rare.flatten()


def _numbers(ties: torch.Tensor) -> torch.Tensor:
    """Return 0 to 7 on the device of `ties`."""
    return ties.new_ones(8, dtype=torch.int64).cumsum(0) - 1


def _split_bits(bits: torch.Tensor, weight: torch.Tensor, low: torch.Tensor, room: torch.Tensor) -> tuple[int, int]:
    """Set `low`, and `room` to the difference of each master from its weight; return the least and the largest of these."""
    room.copy_(weight.view(torch.int16)).bitwise_left_shift_(16)
    torch.sub(bits, room, out=room)
    low.view(torch.int16).copy_(room)
    least, most = torch.aminmax(room)
    return int(least), int(most)
