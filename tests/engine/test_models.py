"""Models whose modules do what blocks in a list do not: every one trains at stages 2 and 3 to the bits of the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import zstore
from tests.engine.bits import ADAM, differing_arrays
from tests.engine.block_models import VOCAB, WIDTH, Base, ids_of, loss_of
from tests.engine.models import Block
from tests.engine.runs import all_released
from tests.reference import Reference
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks

WORLD_SIZE, STEPS = 2, 2


class FunctionalTie(Base):
    """Reads the embedding's weight without calling the embedding, twice, and asks for a type on the way."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x.to(self.head.weight.dtype))
        logits = self.head(self.norm(x)) + F.linear(x, self.embed.weight)
        return loss_of(logits, ids) + self.embed.weight.square().mean()


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


class Adapter(nn.Module):
    """A frozen projection, the first to be called and the last to be needed in the backward, and a trained low-rank one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.base(x)
        return x + torch.tanh(base) + self.up(self.down(x))


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


class HandedOn(Block):
    """Returns what an earlier block made, beside its own: changed in place, or as it was."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if bias is None:
            bias = torch.tanh(self.up(x * 1.0)).sum(-1, keepdim=True)
        return x.add_(super().forward(x + bias)), bias


class Shared(Base):
    """The first block's bias goes through all of them, as in T5."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, bias = self.embed(ids) * 1.0, None
        for block in self.blocks:
            x, bias = block(x, bias)
        return loss_of(self.head(self.norm(x)), ids)


class Predictions(nn.Module):
    """Has a parameter of its own, and returns what the last of its modules returns, as BERT's head does."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.decoder = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.transform(x) + self.shift)


class Nested(Base):
    """The decoder's weight is the embedding's, whose gradient is complete at the very end."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.head = Predictions()
        self.head.decoder.weight = self.embed.weight


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
    "plain": lambda: Base([Block(WIDTH), Block(WIDTH)]),
    "functional tie": lambda: FunctionalTie([Block(WIDTH)]),
    "outputs": lambda: Outputs([Dataclassy(WIDTH), Slotted(WIDTH)]),
    "adapters": lambda: Base([Adapter(), Adapter()]),
    "looped": lambda: Looped([Block(WIDTH), Block(WIDTH)]),
    "checkpointed": lambda: Checkpointed([Block(WIDTH) for _ in range(3)], reentrant=False),
    "checkpointed, reentrant": lambda: Checkpointed([Block(WIDTH) for _ in range(3)], reentrant=True),
    "containers": Containers,
    "handed on": lambda: Shared([HandedOn(WIDTH) for _ in range(3)]),
    "nested": lambda: Nested([Block(WIDTH)]),
    "branches": lambda: Branches([Block(WIDTH)]),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def settings(stage: int, offload: str = "none") -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "offload_param": {"device": offload}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": zero,
        "steps_per_print": 0,
    }


def _train(rank: int, name: str, stage: int, offload: str, world_size: int) -> list[str]:
    engine, *_ = zstore.initialize(model=build(name), config=settings(stage, offload))
    reference = Reference(build(name), world_size, stage=stage, precision="bf16", clip=0.5, adam=ADAM)
    found: list[str] = []
    with engine:
        rows = {record.name: record.owned_range for record in engine.training_state.state.records}
        for step in range(STEPS):
            if "reentrant" not in name:  # which warns without gradients
                with torch.no_grad():
                    engine(ids_of(step, rank))
            if not all_released(engine):
                found.append(f"step {step}: still gathered after a forward without gradients")
            reference.step([[(ids_of(step, r),) for r in range(world_size)]])
            loss = engine(ids_of(step, rank))
            engine.backward(loss)
            if not all_released(engine):
                found.append(f"step {step}: still gathered after the backward")
            engine.step()
            found += [f"step {step}: {array}" for array in differing_arrays(engine, reference, rows)]
            if float(loss.detach()) != reference.losses[rank][0]:
                found.append(f"step {step}: loss {float(loss.detach())} != {reference.losses[rank][0]}")
    return found


def _train_all(rank: int, names: list[str], stage: int, offload: str, world_size: int) -> dict[str, list[str]]:
    return {name: found for name in names if (found := _train(rank, name, stage, offload, world_size))}


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
    found = run_ranks(_train_all, world_size, list(MODELS), stage, offload, world_size)
    assert found == [{}] * world_size


def _misuse(rank: int) -> list[str]:
    found = []
    try:
        zstore.initialize(model=nn.Linear(8, 8 + rank), config=settings(3))
    except UsageError as error:
        found.append(str(error))
    engine, *_ = zstore.initialize(model=build("plain"), config=settings(2))
    with engine:
        try:
            engine.module(ids_of(0, rank)).backward()
        except UsageError as error:
            found.append(str(error))
    return found


def test_misuse_is_answered_on_every_rank() -> None:
    for other_model, own_backward in run_ranks(_misuse, WORLD_SIZE):
        assert "ranks [1] have a different model from rank 0" in other_model
        assert "call the engine and not its module" in own_backward
