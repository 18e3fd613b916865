"""A model whose activations are worth moving, with blocks that are checkpointed in one of several ways, and its data."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.engine.models import Block
from zstore import checkpointing

WIDTH, TOKENS, SAMPLES, BLOCKS = 64, 96, 12, 4
INPUT_BYTES = 2 * SAMPLES * TOKENS * WIDTH
"""Of a block's input in bf16: 147 kB, in an array of several chunks of which the last is not full."""


class Dropping(Block):
    """A block with dropout, and a branch over parts of one tensor."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + nn.functional.dropout(q.sigmoid() * k.transpose(1, 2).softmax(1).transpose(1, 2) * v, 0.1)
        return super().forward(x)


class Deep(nn.Module):
    """Blocks that are checkpointed in one of several ways, and a head."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Dropping() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, WIDTH))
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = x + self.shift.to(x.dtype)
        for block in self.blocks:
            if self.kind == "zstore":
                x = checkpointing.checkpoint(block, x)
            elif self.kind != "plain":
                x = torch_checkpoint(block, x, use_reentrant=self.kind == "reentrant")
            else:
                x = block(x)
        return self.head(x).float().square().mean()


def deep(kind: str = "plain") -> Deep:
    torch.manual_seed(0)
    return Deep(kind)


def data(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(SAMPLES, TOKENS, WIDTH, generator=generator).bfloat16()
