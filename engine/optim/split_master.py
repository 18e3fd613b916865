"""An fp32 master as its bf16 weight, its low 16 bits, and one bit where these do not determine it.

[Note: the split]
With a master's bits as an integer, `master = (weight << 16) + low + (tie << 16)`, `low` taken as signed. Rounding to the
nearest adds at most half of the weight's last digit, so the difference from the weight lies in [-0x8000, 0x8000]: what
was rounded up has a negative `low`. The two ends have the same 16 bits; they are ties, of which the even neighbour is
the weight, above or below, and the bit says which. It is one for about one element in 131072, so that all work on the
bits is done for those alone. Bit 0 of the first byte is the first element's; bits behind the last element are zero.

A NaN has no nearest weight: its weight is its high half, and the bit completes what the sign of `low` gets wrong. (A
signalling NaN with nothing in its high half, which no arithmetic makes, has an infinite weight.) The same holds for
whatever else a processor does not round so: the master comes back to the bit, always.
"""

from __future__ import annotations

import torch


def join_master(weight: torch.Tensor, low: torch.Tensor, ties: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the master of `weight` (bf16 [n]), `low` (uint16 [n]) and `ties` (uint8 [ceil(n / 8)]) to `out` (fp32 [n]).

    All are 1-D, on one device; returns `out`. See [Note: the split].
    """
    bits = out.view(torch.int32)
    bits.copy_(weight.view(torch.int16)).bitwise_left_shift_(16).add_(low.view(torch.int16))
    rare = ties.nonzero().flatten()
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
    if least < 0 or most > 1:
        wrong = (room < 0) | (room > 1)
        weight.view(torch.int16)[wrong] = (bits[wrong] >> 16).to(torch.int16)
        least, most = _split_bits(bits, weight, low, room)
    if most == 0:
        return
    marks = torch.nn.functional.pad(room.to(torch.uint8), (0, -room.numel() % 8)).view(-1, 8)
    rare = marks.view(torch.int64).nonzero()[:, 0]
    ties[rare] = (marks[rare] << _numbers(ties)).sum(1).to(torch.uint8)


def _numbers(ties: torch.Tensor) -> torch.Tensor:
    """Return 0 to 7 in the memory that `ties` is in."""
    return ties.new_ones(8, dtype=torch.int64).cumsum(0) - 1


def _split_bits(bits: torch.Tensor, weight: torch.Tensor, low: torch.Tensor, room: torch.Tensor) -> tuple[int, int]:
    """Set `low`, and `room` to the ties; return the least and the largest of these, which should be zeros and ones."""
    room.copy_(weight.view(torch.int16)).bitwise_left_shift_(16)
    torch.sub(bits, room, out=room)
    low.view(torch.int16).copy_(room)
    least, most = torch.aminmax(room.add_(1 << 15).bitwise_right_shift_(16))
    return int(least), int(most)
