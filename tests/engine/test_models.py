"""Models whose modules do what blocks in a list do not: every one trains at stages 2 and 3 to the bits of the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import zstore
from tests.engine.block_models import VOCAB, WIDTH, Base, Mix, loss_of, settings, train
from tests.engine.models import Block
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks


@dataclass
class Result:
    hidden: torch.Tensor
    extra: dict[str, list[torch.Tensor]]


class Dataclassy(Block):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return Result(y, {"loss": [y.float().square().mean()]})


class Opaque:
    __slots__ = ("hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class Slotted(Block):
    """Returns its tensor where nothing finds it."""

    def forward(self, x: torch.Tensor) -> Any:
        return Opaque(super().forward(x))


class Outputs(Base):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        result = self.blocks[0](x)
        x = self.blocks[1](result.hidden).hidden
        return loss_of(self.head(self.norm(x)), ids) + 0.1 * result.extra["loss"][0]


class Looped(Base):
    """The same blocks twice, in turn."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return loss_of(self.head(self.norm(x)), ids)


class Checkpointed(Base):
    """Both kinds of activation checkpointing, over one block and over several."""

    def __init__(self, blocks: list[nn.Module], reentrant: bool) -> None:
        super().__init__(blocks)
        self.reentrant = reentrant

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = checkpoint(self.blocks[0], x, use_reentrant=self.reentrant)
        x = checkpoint(lambda y: self.blocks[2](self.blocks[1](y)), x, use_reentrant=self.reentrant)
        return loss_of(self.head(self.norm(x)), ids)


class Containers(nn.Module):
    """Lists in lists, dictionaries, lists of parameters, attention that is no block, a parametrized weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.scales = nn.ParameterList([torch.ones(WIDTH), torch.full((WIDTH,), 0.5)])
        self.named = nn.ParameterDict({"shift": torch.zeros(WIDTH)})
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.nested = nn.ModuleList([nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)]) for _ in range(2)])
        self.dicts = nn.ModuleList([nn.ModuleDict({"f": nn.Linear(WIDTH, WIDTH)})])
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scales[0] * self.scales[1] + self.named["shift"]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for linear, norm in self.nested:
            x = x + norm(linear(x))
        x = x + self.dicts[0]["f"](x) + self.normed(x)
        return loss_of(self.head(x), ids)


class Branches(Base):
    """What is used depends on the data, so it differs between ranks and steps."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.odd = nn.Parameter(torch.ones(WIDTH))
        self.even = nn.Parameter(torch.ones(WIDTH))
        self.rare = nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        first = int(ids[0, 0])
        x = x * (self.odd if first % 2 else self.even)
        if first % 7 == 0:
            x = x + self.rare
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(self.norm(x)), ids)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "outputs": lambda: Outputs([Dataclassy(WIDTH), Slotted(WIDTH)]),
    "looped": lambda: Looped([Block(WIDTH), Block(WIDTH)]),
    "checkpointed": lambda: Checkpointed([Block(WIDTH) for _ in range(3)], reentrant=False),
    "checkpointed, reentrant": lambda: Checkpointed([Block(WIDTH) for _ in range(3)], reentrant=True),
    "containers": Containers,
    "branches": lambda: Branches([Block(WIDTH)]),
}


def _train_all(rank: int, stage: int, offload: str, world_size: int) -> dict[str, list[str]]:
    zero = {"offload_param": {"device": offload}} if stage == 3 else {}
    mixes = {name: Mix(make) for name, make in MODELS.items()}
    return {name: found for name, mix in mixes.items() if (found := train(mix, rank, world_size, stage, **zero))}


@pytest.mark.parametrize(
    ("stage", "offload", "world_size"),
    [
        pytest.param(2, "none", 2, marks=pytest.mark.soak),
        (3, "none", 2),
        (3, "cpu", 1),
        pytest.param(3, "cpu", 2, marks=pytest.mark.soak),
    ],
)
def test_models_train_to_the_bit(stage: int, offload: str, world_size: int) -> None:
    assert run_ranks(_train_all, world_size, stage, offload, world_size) == [{}] * world_size


def _misuse(rank: int) -> str:
    with pytest.raises(UsageError) as caught:
        zstore.initialize(model=nn.Linear(8, 8 + rank), config=settings(Mix(nn.Module), 3))
    return str(caught.value)


def test_ranks_with_different_models_are_told_so() -> None:
    for told in run_ranks(_misuse, 2):
        assert "ranks [1] have a different model from rank 0" in told
