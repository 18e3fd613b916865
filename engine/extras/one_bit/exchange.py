"""The mean over ranks of tensors sent as signs, with error feedback (https://arxiv.org/abs/2102.02888, section 4).

[Note: two phases]
A tensor is cut into as many chunks as there are ranks, and rank r averages chunk r.
1. Each rank adds the loss of its last messages (the worker error), sends each chunk as signs and a scale to the rank that
   averages it, and keeps the new loss.
2. That rank adds the messages up in the order of the ranks, divides, adds the loss of its own last message (the server
   error), and sends the mean as signs and a scale to all, keeping the loss.
All ranks decode the same bytes, so that they have the same bits. A rank sends numel / 8 bytes and the scales in each
phase, less its own chunk. Alone, a rank compresses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zstore.ranks.world import World

from .signs import chunk_numel, decode, encode, valid_counts


@dataclass
class Errors:
    """The loss of the messages about one tensor so far, on this rank, fp32."""

    worker: torch.Tensor
    """1-D [numel]; empty for a rank alone."""
    server: torch.Tensor
    """1-D, of the chunk that this rank averages, padding included; empty for a rank alone."""

    @staticmethod
    def none_yet(numel: int, world_size: int, device: torch.device) -> Errors:
        """Return zeros for a tensor of `numel` elements."""
        sizes = (numel, chunk_numel(numel, world_size)) if world_size > 1 else (0, 0)
        return Errors(*(torch.zeros(size, device=device) for size in sizes))


def compressed_mean(world: World, values: torch.Tensor, errors: Errors) -> torch.Tensor:
    """Return the mean of `values` [numel], fp32, over the ranks as it is after both phases: the same bits on every rank (all
    ranks). See [Note: two phases]."""
    ranks, numel = world.world_size, values.numel()
    if ranks == 1:
        return values.clone()
    counts = valid_counts(numel, ranks)
    padded = torch.zeros(ranks, chunk_numel(numel, ranks), device=values.device)
    flat = padded.view(-1)
    torch.add(values, errors.worker, out=flat[:numel])
    sent = encode(padded, counts)
    torch.sub(flat[:numel], decode(sent).view(-1)[:numel], out=errors.worker)
    received = torch.empty_like(sent)
    world.all_to_all(received, sent, kind="all_to_all").wait()
    mean = torch.zeros_like(errors.server)
    for one in decode(received):  # in this order on every device
        mean += one
    count = counts[world.rank]
    mean = mean.div_(ranks).add_(errors.server)
    mean[count:] = 0
    mine = encode(mean.view(1, -1), [count])
    torch.sub(mean, decode(mine).view(-1), out=errors.server)
    errors.server[count:] = 0
    everyone = torch.empty_like(sent)
    world.all_gather(everyone.view(-1), mine.view(-1))
    return decode(everyone).view(-1)[:numel]
