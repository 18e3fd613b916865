"""Tensors as signs: one bit an element, and one scale for each row.

The scale is the mean of the row's absolute values. Of all scales it loses least, and the loss is always shorter than
the row, so that errors that are fed back do not grow (https://arxiv.org/abs/1901.09847, lemma 8). DeepSpeed's scale, the
norm over the root of the number of elements, loses up to twice the square of a row with few large elements, as that of an
embedding. Zero counts as positive.
"""

from __future__ import annotations

import torch

from zstore.format import round_up
from zstore.ranks.world import on_device

SIGNS_PER_BYTE = 8
SCALE_BYTES = 4


def chunk_numel(numel: int, world_size: int) -> int:
    """Return how many elements of a tensor each rank averages, padding included: whole bytes of signs."""
    return round_up(-(-numel // world_size), SIGNS_PER_BYTE)


def valid_counts(numel: int, world_size: int) -> list[int]:
    """Return how many elements of each rank's chunk of a tensor are no padding."""
    chunk = chunk_numel(numel, world_size)
    return [min(max(numel - rank * chunk, 0), chunk) for rank in range(world_size)]


def encode(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Return `rows` [k, n] (fp32, n a multiple of 8) as bytes [k, n / 8 + 4]: signs, the lowest bit first, then the scale.

    `counts` elements of each row count for its scale; behind them there are zeros.
    """
    bits = (rows >= 0).view(rows.shape[0], -1, SIGNS_PER_BYTE).to(torch.uint8)
    shifts = torch.arange(SIGNS_PER_BYTE, dtype=torch.uint8, device=rows.device)
    signs = (bits << shifts).sum(dim=2, dtype=torch.uint8)
    numbers = on_device([max(count, 1) for count in counts], torch.float32, rows.device)
    scales = rows.abs().sum(dim=1) / numbers
    return torch.cat([signs, scales.view(-1, 1).view(torch.uint8)], dim=1)


def decode(encoded: torch.Tensor) -> torch.Tensor:
    """Return the values [k, n], fp32, of bytes [k, n / 8 + 4]: plus or minus the row's scale."""
    scales = encoded[:, -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    shifts = torch.arange(SIGNS_PER_BYTE, dtype=torch.uint8, device=encoded.device)
    bits = (encoded[:, :-SCALE_BYTES].unsqueeze(2) >> shifts) & 1
    return torch.where(bits.view(encoded.shape[0], -1).bool(), scales, -scales)
