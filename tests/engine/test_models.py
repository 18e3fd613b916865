"""Models of all kinds and mixes of parameters and buffers, to the bits of the plain loop; and closeness to FSDP2."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import zstore
from tests.engine.bits import Case, Model, compare_all, engine_digests
from tests.engine.models import VOCAB, WIDTH, Base, Block, Net, batch, ids_of, loss_of, make_net
from tests.engine.runs import make_config, start
from zstore.engine import Engine
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks


def _blocks(count: int = 2) -> list[nn.Module]:
    return [Block(WIDTH) for _ in range(count)]


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
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return loss_of(self.head(self.norm(x)), ids)


class Checkpointed(Base):
    def __init__(self, blocks: list[nn.Module], reentrant: bool) -> None:
        super().__init__(blocks)
        self.reentrant = reentrant

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = checkpoint(self.blocks[0], x, use_reentrant=self.reentrant)
        x = checkpoint(lambda y: self.blocks[2](self.blocks[1](y)), x, use_reentrant=self.reentrant)
        return loss_of(self.head(self.norm(x)), ids)


class Containers(nn.Module):
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


class ByData(Base):
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


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.base(x) + self.up(self.down(x))
        return added


def with_adapters(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
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
    """The first of its experts, as many as the input says: ranks use different ones, and some all."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = int(x.detach().float().sum().abs() * 1000) % len(self.experts)
        return x + sum(expert(x) for expert in self.experts[: number + 1])


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


def _model(make: Callable[[], nn.Module], **rest: Any) -> Model:
    return Model(make, lambda step, micro, rank: (ids_of(step, 3 * micro + rank),), **rest)


MODELS = {
    "outputs": _model(lambda: Outputs([Dataclassy(WIDTH), Slotted(WIDTH)])),
    "looped": _model(lambda: Looped(_blocks())),
    "checkpointed": _model(lambda: Checkpointed(_blocks(3), reentrant=False)),
    "checkpointed, reentrant": _model(lambda: Checkpointed(_blocks(3), reentrant=True)),
    "containers": _model(Containers),
    "by data": _model(lambda: ByData(_blocks(1))),
    "adapters": _model(lambda: adapted(Base(_blocks(3)))),
    "groups": _model(lambda: Base(_blocks()), groups=_decay_and_none),
    "int8": _model(lambda: Base([Quantized(), Quantized()])),
    "buffers": _model(lambda: Base([Counting(), Counting()])),
    "shared buffer": _model(lambda: SharedBuffer([Counting(), Counting()])),
    "recurrent": _model(Recurrent),
    "experts": _model(lambda: Base([Routed(), Routed()])),
    "a part is called": _model(InParts, loss=lambda model, batch: model.loss(*batch)),
}


def _cases(world_size: int) -> list[Case]:
    """Every model at stage 3, alone with all on disk; adapters accumulated and, as what differs at stage 2 is the way of
    gradients alone, there too."""
    tier = "none" if world_size > 1 else "nvme"
    case = partial(Case, clip=0.5, threshold=0)
    found = [case(3, tier, "fp32" if n == "recurrent" else "bf16", 1, parameters=tier, model=n) for n in MODELS]
    return found + [case(stage, tier, "bf16", 2, model="adapters", resume=1) for stage in (2, 3)]


def _on_ranks(rank: int, world_size: int, cases: list[Case]) -> Any:
    return compare_all(rank, world_size, cases, models=MODELS)


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (1, _cases(1)),
        (2, _cases(2)),
        pytest.param(2, [Case(2, "none", "bf16", 1, 0.5, model=name) for name in MODELS], marks=pytest.mark.soak),
        pytest.param(
            2,
            [Case(3, "none", "bf16", 1, 0.5, threshold=0, parameters="cpu", model=name) for name in MODELS],
            marks=pytest.mark.soak,
        ),
    ],
    ids=["from disk", "sharded", "stage 2", "from memory"],
)
def test_models_train_to_the_bit(world_size: int, cases: list[Case]) -> None:
    assert run_ranks(_on_ranks, world_size, world_size, cases) == [[]] * world_size


def _start(make: Callable[[], nn.Module], stage: int, tier: str = "none", nvme: str = "", **keys: Any) -> Engine:
    torch.manual_seed(0)
    model, zero = make(), keys.pop("zero", {})
    config = make_config(stage, tier, nvme, **keys)
    config["zero_optimization"] |= zero
    return zstore.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def test_state_is_kept_of_adapters_alone(nvme: Path) -> None:
    with _start(MODELS["adapters"].make, 3, "nvme", str(nvme), gradient_accumulation_steps=1) as engine:
        model = engine.module  # of all of whose parameters the optimizer was told: those that are frozen are left out
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        before = engine_digests(engine)
        assert engine.statistics().held.optimizer_state == 12 * sum(p.numel() for p in trained.values())
        engine.backward(engine(ids_of(0, 0)))
        engine.step()
        assert all(p.grad is None for p in model.parameters())
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
        found = engine_digests(engine)
        assert all(found[name] == before[name] for name, _ in model.named_parameters() if name not in trained)
        assert found != before
        assert set(found) >= {f"optimizer/exp_avg/{name}" for name in trained}
        assert not any(name.partition("/")[2].endswith("base.weight") for name in found)


class Partly(nn.Module):
    """Uses one layer for each sample, the one that its number names; and never uses one."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])
        self.never = nn.Linear(4, 4).requires_grad_(not frozen)

    def forward(self, number: int) -> torch.Tensor:
        return self.layers[number](torch.ones(1, 4)).square().mean()


def strictly(rank: int, world_size: int, stage: int) -> list[str]:
    """Return the errors of two runs of a step of two micro-batches, in the first of which the last rank alone uses
    layer 1: of the whole model, and without the layer that is never used."""
    found = []
    for frozen in (False, True):
        with _start(
            lambda frozen=frozen: Partly(frozen),
            stage,
            zero={"ignore_unused_parameters": False},
            bf16={"enabled": False},
        ) as engine:
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


def _strictly(rank: int) -> list[list[str]]:
    return [strictly(rank, 2, stage) for stage in (1, 2)]


def test_unused_parameters_are_an_error_on_every_rank_where_the_config_says_so() -> None:
    for found in (strictly(0, 1, 0), *(found for ranks in run_ranks(_strictly, 2) for found in ranks)):
        assert len(found) == 1
        assert found[0].startswith(
            "frozen False: step 1: no rank has a gradient for 'never.weight', 'never.bias'; no parameter and no "
            "optimizer state was changed"
        )
        assert "set zero_optimization.ignore_unused_parameters to true" in found[0]


def _misuse(rank: int) -> str:
    with pytest.raises(UsageError) as caught:
        _start(lambda: nn.Linear(8, 8 + rank), 3)
    return str(caught.value)


def test_ranks_with_different_models_are_told_so() -> None:
    for told in run_ranks(_misuse, 2):
        assert "ranks [1] have a different model from rank 0" in told


STEPS = 6


def _net_for_fsdp2() -> Net:
    """FSDP2 takes no scalar parameters."""
    model = make_net(0)
    for block in model.blocks:
        block.gain = torch.nn.Parameter(block.gain.detach().reshape(1))
    return model


def _against_fsdp2(rank: int, precision: str) -> tuple[list[float], list[float]]:
    """Losses of FSDP2 and of stage 3 over the same batches, fp32 masters in both."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.utils import get_total_norm

    settings = {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    model = _net_for_fsdp2()
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **settings)
    theirs = []
    for step in range(STEPS):
        loss = model(*batch(step % 2, 0, rank))
        theirs.append(float(loss.detach()))
        loss.backward()
        norm = get_total_norm([p.grad for p in trained if p.grad is not None]).full_tensor()
        for p in trained:
            if p.grad is not None:
                p.grad.mul_(torch.clamp(0.5 / (norm + 1e-6), max=1.0))
        optimizer.step()
        optimizer.zero_grad()

    optimizer_section = {"type": "AdamW", "params": settings}
    keys = {"gradient_accumulation_steps": 1, "gradient_clipping": 0.5, "scheduler": None}
    config = make_config(3, optimizer=optimizer_section, bf16={"enabled": precision == "bf16"}, **keys)
    with start(config, _net_for_fsdp2()) as engine:
        ours = []
        for step in range(STEPS):
            loss = engine(*batch(step % 2, 0, rank))
            ours.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
    return theirs, ours


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.soak), "bf16"])
def test_stage_3_follows_fsdp2(precision: str) -> None:
    for theirs, ours in run_ranks(_against_fsdp2, 2, precision):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6 if precision == "fp32" else 5e-3)
        assert theirs[-1] < theirs[0] - 0.1
