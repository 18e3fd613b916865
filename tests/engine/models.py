"""Small models with the things that trip sharding engines, and their data."""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, hidden: int = 0) -> None:
        super().__init__()
        hidden = hidden or 3 * width
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.0))  # 0-d

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A byte model: tied head, a frozen parameter, an unused one, a 3-D one, a buffer, a parameter on the root."""

    def __init__(self, vocab: int = 1203, width: int = 56, layers: int = 2, hidden: int = 0, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.start = nn.Parameter(torch.randn(width) * 0.1)
        self.mix = nn.Parameter(torch.randn(2, 3, width) * 0.1)
        self.unused = nn.Linear(width, 33)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.blocks = nn.ModuleList([Block(width, hidden) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, width))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.start + self.shift.to(self.start.dtype) + self.mix.sum(dim=(0, 1))
        x = x + self.frozen(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def make_net(seed: int = 0, **shape: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**shape)


def draw_shape(seed: int) -> dict[str, Any]:
    """Return arguments of `Net`, odd sizes among them; its embedding rests on disk, where that is asked for, at up to
    four ranks."""
    rng = random.Random(seed)
    width = rng.randrange(17, 97)
    return {
        "vocab": rng.randrange(72_000, 110_000) // width,
        "width": width,
        "layers": rng.randrange(1, 4),
        "hidden": rng.randrange(width, 4 * width),
        "tied": rng.random() < 0.5,
    }


def batch(step: int, micro: int, rank: int, samples: int = 2, tokens: int = 12, vocab: int = 1203) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1 + step * 1000 + micro * 100 + rank)
    return (torch.randint(0, vocab, (samples, tokens), generator=generator),)


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
