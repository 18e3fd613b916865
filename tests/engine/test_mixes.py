"""Mixes of parameters and buffers: frozen, trained, in groups, of several types; all to the bits of the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zstore
from tests.engine.bits import digest, engine_digests
from tests.engine.block_models import VOCAB, WIDTH, Base, Mix, ids_of, loss_of, settings, train, trainable
from tests.engine.models import Block
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks

WORLD_SIZE = 2


class LoRA(nn.Module):
    """A frozen linear layer and a trained product of two narrow ones."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.base(x) + self.up(self.down(x))
        return added


def with_adapters(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """Freeze the model and give the linear layers of these names adapters."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name in names:
            if isinstance(base := getattr(module, name, None), nn.Linear):
                setattr(module, name, LoRA(base))
    return model


def adapted(model: nn.Module) -> nn.Module:
    """A base loaded in bf16, adapters made in fp32."""
    return with_adapters(model.bfloat16(), ("up", "down")).train()


class Quantized(nn.Module):
    """A frozen int8 weight, with a scale that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-99, 99, (WIDTH, WIDTH)).to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH, 1), 1e-3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.linear(x, self.weight.to(x.dtype) * self.scale)


class Norm(nn.BatchNorm1d):
    """Takes 16-bit inputs, beside statistics and parameters in fp32: what torch computes under autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, var, weight, bias = self.running_mean, self.running_var, self.weight.float(), self.bias.float()
        return F.batch_norm(x, mean, var, weight, bias, self.training, self.momentum or 0.0, self.eps)


class Counting(nn.Module):
    """Buffers of every kind; the forward writes to them in training and reads them always."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.arange(WIDTH) % 3 > 0)
        self.register_buffer("average", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("spread", torch.tensor([0.5]).expand(WIDTH))
        self.register_buffer("turn", torch.full((WIDTH,), 0.6 + 0.8j), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(self.norm(x.transpose(1, 2)).transpose(1, 2)) * self.mask
        if self.training:
            self.calls += 1
            self.average.lerp_(y.detach().mean((0, 1)).float(), 0.1)
        drift = self.spread * self.average.clone() * self.turn.real * self.calls
        return x + y + 0.01 * drift.to(x.dtype)


class SharedBuffer(Base):
    """Two modules hold one buffer; one writes it and the other reads it."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.blocks[1].average = self.blocks[0].average


class Recurrent(nn.Module):
    """An LSTM, whose forward takes its weights from a list, and a transformer layer by itself, which reads its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return loss_of(self.head(self.layer(self.lstm(self.embed(ids))[0])), ids)


class Encoder(nn.Module):
    """Reads the weight of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(_blocks())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.embedding(ids, self.embed.weight)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embed.weight)


class InParts(nn.Module):
    """Has no forward of its own: the loop calls its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        return loss_of(self.encoder(ids), ids)


class Routed(nn.Module):
    """One of its experts, by what comes in: ranks use different ones, and none uses all."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = int(x.detach().float().sum().abs() * 1000) % len(self.experts)
        routed: torch.Tensor = x + self.experts[number](x)
        return routed


def _blocks(count: int = 2) -> list[nn.Module]:
    return [Block(WIDTH) for _ in range(count)]


def _decay_and_none(named: dict[str, nn.Parameter]) -> list[Any]:
    """As scripts write it: biases and norms without decay, the head at a rate of its own, and what is left out."""
    flat = {name: p for name, p in named.items() if p.ndim < 2 and "head" not in name}
    head = {name: p for name, p in named.items() if "head" in name}
    rest = [p for name, p in named.items() if name not in flat and name not in head]
    return [
        {"params": rest, "weight_decay": 0.2},
        {"params": list(flat.values()), "weight_decay": 0.0},
        {"params": list(head.values()), "lr": 3e-3, "betas": (0.8, 0.99)},
    ]


MIXES = {
    "adapters": Mix(lambda: adapted(Base(_blocks(3)))),
    "adapters, accumulated without sync": Mix(lambda: adapted(Base(_blocks(3))), accumulation=2),
    "groups": Mix(lambda: Base(_blocks()), groups=_decay_and_none),
    "int8": Mix(lambda: Base([Quantized(), Quantized()])),
    "buffers": Mix(lambda: Base([Counting(), Counting()])),
    "shared buffer": Mix(lambda: SharedBuffer([Counting(), Counting()])),
    "recurrent": Mix(Recurrent, precision="fp32"),
    "experts": Mix(lambda: Base([Routed(), Routed()])),
    "a part is called": Mix(InParts, call=lambda model, ids: model.loss(ids)),
}


Found = dict[str, list[str]]


def _on_two_ranks(rank: int) -> Found:
    # At stage 2 what differs is the way of gradients alone.
    found = {name: train(MIXES[name], rank, WORLD_SIZE, 3) for name in MIXES}
    found |= {f"{name}, stage 2": train(MIXES[name], rank, WORLD_SIZE, 2) for name in MIXES if "adapters" in name}
    return found | {f"strictly, stage {stage}": strictly(rank, WORLD_SIZE, stage) for stage in (1, 2)}


@pytest.fixture(scope="module")
def on_two_ranks() -> list[Found]:
    """What each rank found; one start of the ranks serves all tests."""
    return run_ranks(_on_two_ranks, WORLD_SIZE)


@pytest.mark.parametrize("name", [*MIXES, *(f"{name}, stage 2" for name in MIXES if "adapters" in name)])
def test_mixes_train_sharded_to_the_bit(name: str, on_two_ranks: list[Found]) -> None:
    assert [found[name] for found in on_two_ranks] == [[], []]


@pytest.mark.parametrize("name", MIXES)
def test_mixes_train_from_disk_to_the_bit(name: str, nvme: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(nvme)}
    assert train(MIXES[name], 0, 1, 3, offload_optimizer=disk, offload_param=disk) == []


def test_state_is_kept_of_adapters_alone(nvme: Path) -> None:
    model = MIXES["adapters"].build()
    trained = trainable(model)
    frozen = {name: digest(p.detach().reshape(-1)) for name, p in model.named_parameters() if not p.requires_grad}
    mix = MIXES["adapters"]
    engine, *_ = zstore.initialize(
        model=model,
        model_parameters=model.parameters(),  # all of them: those that are frozen are left out
        config=settings(mix, 3, offload_optimizer={"device": "nvme", "nvme_path": str(nvme)}),
    )
    with engine:
        assert engine.statistics().held.optimizer_state == 12 * sum(p.numel() for p in trained.values())
        engine.backward(engine(ids_of(0, 0)))
        engine.step()
        assert all(p.grad is None for p in model.parameters())
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
        assert {
            name: digest(p.detach().reshape(-1)) for name, p in model.named_parameters() if name in frozen
        } == frozen
        assert set(engine_digests(engine)) >= {f"optimizer/exp_avg/{name}" for name in trained}
        assert not any(name.partition("/")[2].endswith("base.weight") for name in engine_digests(engine))


class Partly(nn.Module):
    """Uses one layer for each sample, the one that its number names; and never uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])
        self.never = nn.Linear(4, 4)

    def forward(self, number: int) -> torch.Tensor:
        return self.layers[number](torch.ones(1, 4)).square().mean()


def strictly(rank: int, world_size: int, stage: int) -> list[str]:
    """Return the errors of two runs of a step of two micro-batches, in the first of which the last rank alone uses
    layer 1: of the whole model, and without the layer that is never used."""
    found = []
    for frozen in (False, True):
        torch.manual_seed(0)
        model = Partly()
        model.never.requires_grad_(not frozen)
        mix = Mix(Partly, precision="fp32", accumulation=2)
        engine, *_ = zstore.initialize(model=model, config=settings(mix, stage, ignore_unused_parameters=False))
        with engine:
            before = engine_digests(engine)
            for micro in range(2):
                engine.backward(engine(1 if micro == 0 and rank == world_size - 1 else 0))
                try:
                    engine.step()
                except UsageError as error:
                    found.append(f"frozen {frozen}: {error}")
                    assert engine_digests(engine) == before
            assert engine.was_step_applied() == frozen
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_unused_parameters_are_an_error_on_every_rank_where_the_config_says_so(
    stage: int, on_two_ranks: list[Found]
) -> None:
    for found in [strictly(0, 1, 0)] if stage == 0 else [one[f"strictly, stage {stage}"] for one in on_two_ranks]:
        assert len(found) == 1
        assert found[0].startswith(
            "frozen False: step 1: on no rank was there a gradient for 'never.weight', 'never.bias'; no parameter and no "
            "optimizer state was changed"
        )
        assert "set zero_optimization.ignore_unused_parameters to true" in found[0]
