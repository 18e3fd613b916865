"""The model and the data of the checkpoints in tests/data/deepspeed: seen by DeepSpeed as they were made, and by the tests."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 6
VOCAB = 13
TRAIN_BATCH_SIZE = 6
STEPS_BEFORE = 3
"""Steps before the save."""
STEPS_AFTER = 4
"""Steps that DeepSpeed went on for after it."""

ADAM = {"lr": 2e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 5}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH + 1)
        self.down = nn.Linear(WIDTH + 1, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.tensor([1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Parameter(torch.randn(2, 3, WIDTH) * 0.1)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, WIDTH))
        self.register_buffer("numbers", torch.arange(5))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.shift.to(x.dtype) + self.mix.sum(dim=(0, 1))
        x = x + self.frozen(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def make_tiny() -> Tiny:
    torch.manual_seed(5)
    return Tiny()


def groups_of(model: nn.Module, kind: str) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind == "one":
        return [{"params": trained}]
    shapes = {p: tuple(getattr(p, "ds_shape", p.shape)) for p in trained}
    return [
        {"params": [p for p in trained if len(shapes[p]) > 1], "weight_decay": 0.2},
        {"params": [p for p in trained if len(shapes[p]) == 1], "weight_decay": 0.0},
    ]


def global_batch(step: int) -> torch.Tensor:
    """Return the tokens of a step, over all ranks and micro-batches: [TRAIN_BATCH_SIZE, 8]."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCAB, (TRAIN_BATCH_SIZE, 8), generator=generator)


def micro_batches(step: int, rank: int, world_size: int, accumulation: int = 1) -> list[torch.Tensor]:
    parts = global_batch(step).chunk(world_size * accumulation)
    return [parts[micro * world_size + rank] for micro in range(accumulation)]
