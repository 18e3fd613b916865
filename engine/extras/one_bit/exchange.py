"""The mean over ranks of tensors sent as signs, with error feedback (https://arxiv.org/abs/2102.02888, section 4).

[Note: two phases]
A tensor is cut into as many chunks as there are ranks, and rank r averages chunk r.
1. Each rank adds the loss of its last messages (the worker error), sends each chunk as signs and a scale to the rank that
   averages it, and keeps the new loss.
2. That rank adds the messages up in the order of the ranks, divides, adds the loss of its own last message (the server
   error), and sends the mean as signs and a scale to all, keeping the loss.
All ranks decode the same bytes, so that they have the same bits. A rank sends numel / 8 bytes and the scales in each
phase, less its own chunk.

[Note: signs]
A row is one bit an element, zero counting as positive, and one scale: the mean of its absolute values. Of all scales it
loses least, and the loss is always shorter than the row, so that errors that are fed back do not grow
(https://arxiv.org/abs/1901.09847, lemma 8). DeepSpeed's scale, the norm over the root of the number of elements, loses up to
twice the square of a row with few large elements, as that of an embedding.
"""

from __future__ import annotations

import torch

from zstore.format import round_up
from zstore.ranks.world import World, on_device

_PER_BYTE = 8
_SCALE_BYTES = 4


def chunk_numel(numel: int, world_size: int) -> int:
    """Return how many elements of a tensor each rank averages, padding included: whole bytes of signs."""
    return round_up(-(-numel // world_size), _PER_BYTE)


def encode(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Return `rows` [k, n] (fp32, n a multiple of 8) as bytes [k, n / 8 + 4]: signs, the lowest bit first, then the scale.

    `counts` elements of each row count for its scale; behind them there are zeros.
    """
    bits = (rows >= 0).view(rows.shape[0], -1, _PER_BYTE).to(torch.uint8)
    shifts = torch.arange(_PER_BYTE, dtype=torch.uint8, device=rows.device)
    signs = (bits << shifts).sum(dim=2, dtype=torch.uint8)
    numbers = on_device([max(count, 1) for count in counts], torch.float32, rows.device)
    scales = rows.abs().sum(dim=1) / numbers
    return torch.cat([signs, scales.view(-1, 1).view(torch.uint8)], dim=1)


def decode(encoded: torch.Tensor) -> torch.Tensor:
    """Return the values [k, n], fp32, of bytes [k, n / 8 + 4]: plus or minus the row's scale."""
    scales = encoded[:, -_SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    shifts = torch.arange(_PER_BYTE, dtype=torch.uint8, device=encoded.device)
    bits = (encoded[:, :-_SCALE_BYTES].unsqueeze(2) >> shifts) & 1
    return torch.where(bits.view(encoded.shape[0], -1).bool(), scales, -scales)


def compressed_mean(world: World, values: torch.Tensor, worker: torch.Tensor, server: torch.Tensor) -> torch.Tensor:
    """Return the mean of `values` [numel], fp32, over the ranks as it is after both phases: the same bits on every rank (all
    ranks). The errors, fp32, are changed: `worker` [numel] and `server` [chunk_numel]. See [Note: two phases]."""
    ranks, numel = world.world_size, values.numel()
    chunk = chunk_numel(numel, ranks)
    counts = [min(max(numel - rank * chunk, 0), chunk) for rank in range(ranks)]
    padded = torch.zeros(ranks, chunk, device=values.device)
    flat = padded.view(-1)
    torch.add(values, worker, out=flat[:numel])
    sent = encode(padded, counts)
    torch.sub(flat[:numel], decode(sent).view(-1)[:numel], out=worker)
    received = torch.empty_like(sent)
    world.all_to_all(received, sent, kind="all_to_all").wait()
    mean = torch.zeros_like(server)
    for one in decode(received):  # in this order on every device
        mean += one
    count = counts[world.rank]
    mean = mean.div_(ranks).add_(server)
    mean[count:] = 0
    mine = encode(mean.view(1, -1), [count])
    torch.sub(mean, decode(mine).view(-1), out=server)
    server[count:] = 0
    everyone = torch.empty_like(sent)
    world.all_gather(everyone.view(-1), mine.view(-1))
    return decode(everyone).view(-1)[:numel]
