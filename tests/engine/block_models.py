"""A model of blocks in which tests change what is between or at its ends, and its data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, VOCAB = 24, 50


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


class Base(nn.Module):
    """Embedding, blocks, head; tests change what is between or at the ends."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(self.norm(x)), ids)


def ids_of(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
