"""Mixes of parameters and buffers: frozen, trained, in groups, of several types; all to the bits of the plain loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zstore
from tests.engine.bits import ADAM, differing_arrays, digest, engine_digests, reference_losses
from tests.engine.bits import Case as BitsCase
from tests.engine.block_models import Base, ids_of, loss_of
from tests.engine.models import Block
from tests.engine.runs import all_released
from tests.engine.transformers_models import build as build_transformers
from tests.engine.transformers_models import checkpoint_layers
from tests.reference import Reference
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks

WIDTH, VOCAB, WORLD_SIZE, STEPS = 24, 50, 2, 2


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


class Llama(nn.Module):
    """transformers' Llama with adapters on attention, checkpointed, as fine-tuning scripts have it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = with_adapters(build_transformers("Llama"), ("q_proj", "v_proj"))
        checkpoint_layers(self.inner, reentrant=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(input_ids=ids, labels=ids).loss
        return loss


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


class Told(Base):
    """Blocks return dictionaries, nested."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        state: dict[str, Any] = {"x": [self.embed(ids)]}
        for block in self.blocks:
            state = block(state)
        return loss_of(self.head(self.norm(state["x"][0])), ids)


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


class Telling(Block):
    def forward(self, state: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return {"x": [super().forward(state["x"][0])], "before": state}


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


def _all(named: dict[str, nn.Parameter]) -> list[Any]:
    return list(named.values())


@dataclass(frozen=True)
class Mix:
    make: Callable[[], nn.Module]
    groups: Callable[[dict[str, nn.Parameter]], list[Any]] = _all
    precision: str = "bf16"
    accumulation: int = 1
    call: Callable[[Any, torch.Tensor], torch.Tensor] = lambda model, ids: model(ids)


MIXES = {
    "adapters": Mix(lambda: adapted(Base(_blocks(3)))),
    "adapters, accumulated without sync": Mix(lambda: adapted(Base(_blocks(3))), accumulation=2),
    "adapters on Llama": Mix(Llama),
    "groups": Mix(lambda: Base(_blocks()), groups=_decay_and_none),
    "groups in fp32": Mix(lambda: Base(_blocks()), groups=_decay_and_none, precision="fp32"),
    "int8": Mix(lambda: Base([Quantized(), Quantized()])),
    "buffers": Mix(lambda: Base([Counting(), Counting()])),
    "buffers in fp32": Mix(lambda: Base([Counting(), Counting()]), precision="fp32"),
    "shared buffer": Mix(lambda: SharedBuffer([Counting(), Counting()])),
    "recurrent": Mix(Recurrent, precision="fp32"),
    "experts": Mix(lambda: Base([Routed(), Routed()])),
    "a part is called": Mix(InParts, call=lambda model, ids: model.loss(ids)),
    "dictionaries": Mix(lambda: Told([Telling(WIDTH), Telling(WIDTH)])),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MIXES[name].make()


def settings(mix: Mix, stage: int, **zero: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": mix.accumulation,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": stage}
        | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
        | zero,
        "steps_per_print": 0,
    }
    return config | ({mix.precision: {"enabled": True}} if mix.precision != "fp32" else {})


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def train(name: str, rank: int, world_size: int, stage: int, **zero: Any) -> list[str]:
    """Return what differs from the plain loop: bits of state, parameters and buffers; losses in training and in eval."""
    mix = MIXES[name]
    model = build(name)
    engine, *_ = zstore.initialize(
        model=model, model_parameters=mix.groups(trainable(model)), config=settings(mix, stage, **zero)
    )
    reference = Reference(
        build(name),
        world_size,
        stage=stage,
        precision=mix.precision,
        accumulation=mix.accumulation,
        clip=0.5,
        adam=ADAM,
        loss=lambda model, batch: mix.call(model, *batch),
        groups=mix.groups,
    )
    case = BitsCase(stage, "none", mix.precision, mix.accumulation, 0.5)
    found: list[str] = []
    with engine:
        rows = {record.name: record.owned_range for record in engine.training_state.state.records}
        for step in range(STEPS):
            numbers = [[10 * step + 3 * micro + r for r in range(world_size)] for micro in range(mix.accumulation)]
            batches = [[(ids_of(number, 0),) for number in row] for row in numbers]
            reference.model.train()
            reference.step(batches)
            losses = []
            for number, micro in enumerate(batches):
                last = number == mix.accumulation - 1
                with contextlib.nullcontext() if last else engine.no_sync():
                    loss = mix.call(engine, *micro[rank])
                    losses.append(float(loss.detach()))
                    engine.backward(loss)
                if stage == 3 and not all_released(engine):
                    found.append(f"step {step}: still gathered after the backward")
                engine.step()
            found += [f"step {step}: {array}" for array in differing_arrays(engine, reference, rows)]
            if losses != reference_losses(reference, rank, case, world_size):
                found.append(f"step {step}: losses {losses}")
            buffers = dict(reference.at_rank(rank).named_buffers(remove_duplicate=False))
            for buffer, value in engine.module.named_buffers(remove_duplicate=False):
                if value.dtype != buffers[buffer].dtype or digest(value.reshape(-1)) != digest(
                    buffers[buffer].reshape(-1)
                ):
                    found.append(f"step {step}: buffer {buffer}")
            found += evaluated(mix, engine, reference, rank, step)
    return found


def evaluated(mix: Mix, engine: Any, reference: Reference, rank: int, step: int) -> list[str]:
    """Compare losses in eval, without gradients and in inference mode."""
    found = []
    model = reference.at_rank(rank)
    engine.eval()
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            mine, expected = (float(mix.call(one, ids_of(90, rank))) for one in (engine, model))
        if mine != expected:
            found.append(f"step {step}: {mode.__name__} gives {mine} != {expected}")
        if not all_released(engine):
            found.append(f"step {step}: still gathered after {mode.__name__}")
    engine.train()
    return found


Found = dict[str, list[str]]


def _on_two_ranks(rank: int) -> Found:
    # At stage 2 what differs is the way of gradients alone.
    found = {name: train(name, rank, WORLD_SIZE, 3) for name in MIXES}
    found |= {f"{name}, stage 2": train(name, rank, WORLD_SIZE, 2) for name in MIXES if "adapters" in name}
    found |= {f"strictly, stage {stage}": strictly(rank, WORLD_SIZE, stage) for stage in (1, 2)}
    # Last: ranks that part end the process group's use.
    return found | {"read outside": read_outside(), "parted": parted(rank)}


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
    assert train(name, 0, 1, 3, offload_optimizer=disk) == []
    assert train(name, 0, 1, 3, offload_optimizer=disk, offload_param=disk) == []


def test_state_is_kept_of_adapters_alone(nvme: Path) -> None:
    model = build("adapters")
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


def read_outside() -> list[str]:
    """Return the error of a sharded weight that is read outside of every forward."""
    engine, *_ = zstore.initialize(model=build("groups"), config=settings(MIXES["groups"], 3))
    with engine:
        engine(ids_of(0, 0))
        try:
            engine.module.get_parameter("embed.weight").square()
        except UsageError as error:
            return [str(error)]
    return []


def test_a_sharded_weight_that_is_read_outside_of_every_forward_is_named(on_two_ranks: list[Found]) -> None:
    for found in on_two_ranks:
        assert len(found["read outside"]) == 1
        assert "square of parameter 'embed.weight' outside of a forward" in found["read outside"][0]


def parted(rank: int) -> list[str]:
    """Return the error of a forward in which each rank calls another layer, both of one shape."""
    engine, *_ = zstore.initialize(model=Partly(), config=settings(Mix(Partly, precision="fp32"), 3))
    with engine:
        try:
            engine(rank)
        except UsageError as error:
            return [str(error)]
    return []


def test_ranks_that_call_other_modules_are_told_so_and_get_no_mixture(on_two_ranks: list[Found]) -> None:
    for rank, found in enumerate(on_two_ranks):
        assert len(found["parted"]) == 1
        assert f"rank {rank} needs unit 'layers.{rank}'" in found["parted"][0]
        assert "every rank must run the same modules in the same order" in found["parted"][0]
