"""Weights that a forward reaches otherwise than through their module, beside the plain loop that does the same."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zstore
from tests.engine.runs import placed
from zstore.engine import Engine
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks

STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 96), nn.Linear(96, 24, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied embedding and head, blocks, a weight of its own; `way` gives the loss one more term."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 24), nn.Linear(24, 50, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.shift = nn.Parameter(torch.randn(24) * 0.1)
        self.way = WAYS[way]
        self.kept = [list(self.parameters())]
        self.groups: list[dict[str, Any]] = []
        ups = [block.up.weight for block in self.blocks]
        self.closure = lambda: ups

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.shift
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
        return loss + self.way(self, x)


def magnitudes(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    return 0.1 * sum((p.abs().sum() for p in parameters), torch.zeros(()))


def held(net: nn.Module) -> Iterator[torch.Tensor]:
    return (p for module in net.modules() for p in module._parameters.values() if p is not None)


def checkpointed(net: Net, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    """A term within a checkpointed function: over all weights, through the own ones of two blocks, and by a module."""

    def term(y: torch.Tensor) -> torch.Tensor:
        y = F.linear(F.linear(y, net.blocks[0].up.weight), net.kept[0][-1] * 0.5)
        return net.blocks[1](y).square().mean() + magnitudes(net.parameters())

    return checkpoint(term, x, use_reentrant=reentrant) if torch.is_grad_enabled() else term(x)


def dotted(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Operations that give views, of several weights, of lists of them."""
    views = [p.view(-1) for p in net.parameters()]
    norms = torch.stack(torch._foreach_norm(list(net.parameters())))
    joined = torch.cat([net.blocks[0].up.weight, net.blocks[1].up.weight]).t()
    return norms.sum() * 0.01 + torch.cat(views).square().sum() * 0.01 + (x @ joined).abs().mean()


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).t() @ x.flatten(0, 1)


def functional(net: Net, x: torch.Tensor) -> torch.Tensor:
    weights = {name: p * 0.5 for name, p in net.blocks[0].named_parameters()}
    return torch.func.functional_call(net.blocks[1], weights, (x,)).square().mean()


def foreach(net: Net) -> torch.Tensor:
    """Its backward needs all weights at once."""
    return torch.stack([values.sum() for values in torch._foreach_abs(list(net.parameters()))]).sum() * 0.1


def transformed(net: Net, x: torch.Tensor) -> torch.Tensor:
    """What torch lets no subclass of tensors see, over copies; and an array, which keeps the values."""
    weight = net.kept[0][3].clone()
    array = net.closure()[1].detach().numpy()
    slopes = torch.func.grad(lambda w: (w.tanh() * 0.1).sum())(weight)
    return torch.vmap(lambda row: row.norm())(weight).sum() * 0.1 + (slopes * weight).sum() + float(array.sum())


WAYS: dict[str, Callable[[Net, torch.Tensor], torch.Tensor]] = {
    "parameters": lambda net, x: magnitudes(net.parameters()),
    "_parameters": lambda net, x: magnitudes(held(net)),
    "list": lambda net, x: magnitudes(net.kept[0]),
    "closure": lambda net, x: magnitudes(net.closure()),
    "param_groups": lambda net, x: magnitudes(p for group in net.groups for p in group["params"]),
    "zero": lambda net, x: sum((p.sum() * 0.0 for p in net.parameters()), torch.zeros(())),
    "relu": lambda net, x: sum((p.relu().sum() + p.clamp(-0.1, 0.1).sum() for p in net.parameters()), torch.zeros(())),
    "tied": lambda net, x: F.linear(x, net.embed.weight).square().mean() + net.embed._parameters["weight"].std(),
    "data": lambda net, x: sum((p * p.detach().sign() + p.data).sum() for p in net.kept[0]) * 0.1,
    "dotted": dotted,
    "several": lambda net, x: (net.blocks[0].up.weight * net.blocks[1].up.weight).sum() + foreach(net),
    "function": lambda net, x: Scale.apply(x, net.closure()[0]).square().mean() + Scale.apply(x, net.kept[0][1]).mean(),
    "functional": functional,
    "transformed": transformed,
    "reentrant": lambda net, x: checkpointed(net, x, reentrant=True),
    "checkpointed": lambda net, x: checkpointed(net, x, reentrant=False),
}
ZEROS: dict[str, dict[str, Any]] = {
    "cpu, little room": {
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
        "stage3_max_live_parameters": 5000,
    },
    "nvme": {"offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}},
    "nvme, no room": {"offload_param": {"device": "nvme"}, "stage3_max_live_parameters": 0},
}


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(50, (2, 7), generator=torch.Generator().manual_seed(10 * step + rank))


def make(way: str) -> Net:
    torch.manual_seed(0)
    return Net(way)


Found = tuple[list[float], dict[str, torch.Tensor]]


def plain(way: str, world_size: int = 1) -> Found:
    net, losses = make(way), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    net.groups = optimizer.param_groups
    for step in range(STEPS):
        gradients = []
        for rank in range(world_size):
            loss = net(batch(step, rank))
            losses += [loss.item()] if rank == 0 else []
            (loss / world_size).backward()
            gradients.append([p.grad for p in net.parameters()])
            optimizer.zero_grad()
        for p, *each in zip(net.parameters(), *gradients, strict=True):
            p.grad = sum(each[1:], each[0])
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(net(batch(STEPS, 0)).item())
    return losses, {name: p.detach() for name, p in net.named_parameters()}


def start(model: nn.Module, zero: dict[str, Any], folder: str) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **placed(zero, folder)},
    }
    return zstore.initialize(model=model, config=config)[0]


def trained(engine: Engine, rank: int = 0) -> Found:
    losses = []
    engine.module.groups = engine.optimizer.param_groups
    for step in range(STEPS):
        loss = engine(batch(step, rank))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    with torch.no_grad():
        losses.append(engine(batch(STEPS, 0)).item())
    assert not any(unit.is_in_use for unit in engine.training_state.hooks.units.all)
    return losses, {name: engine.get_full_parameter(name) for name, _ in engine.module.named_parameters()}


def differences(found: Found, wanted: Found) -> list[str]:
    differing = [
        f"{name}: {(one - wanted[1][name]).abs().max()}"
        for name, one in found[1].items()
        if not torch.equal(one, wanted[1][name])
    ]
    return differing + ([] if found[0] == wanted[0] else [f"losses {found[0]}, not {wanted[0]}"])


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_has_its_values_however_a_forward_reaches_it(way: str, tmp_path: Path) -> None:
    wanted = plain(way)
    for zero in ZEROS.values():
        with start(make(way), zero, str(tmp_path)) as engine:
            assert differences(trained(engine), wanted) == []


def ways_of_rank(rank: int, folder: str) -> dict[str, Any]:
    found = {}
    for number, way in enumerate(WAYS):
        zero = {} if number % 2 else ZEROS["nvme, no room"]
        with start(make(way), zero, folder) as engine:
            losses, state = trained(engine, rank)
        found[way] = losses, {name: value.numpy() for name, value in state.items()}
    return found


def test_at_two_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(ways_of_rank, 2, str(tmp_path))
    wanted = {way: plain(way, 2) for way in WAYS}
    for name, (losses, state) in first.items():
        found = losses[:STEPS], {key: torch.from_numpy(value) for key, value in state.items()}
        losses_, weights = wanted[name]
        if name == "reentrant":  # gradients in two parts, each of which is reduced in the first backward
            torch.testing.assert_close(found[1], weights)
        else:
            assert differences(found, (losses_[:STEPS], weights)) == [], name
        assert all((value == second[name][1][key]).all() for key, value in state.items()), name


def test_weights_take_turns_if_there_is_no_room_for_all(tmp_path: Path) -> None:
    peaks = []
    for more in ({"stage3_max_live_parameters": 0}, {}):
        with start(make("parameters"), {"offload_param": {"device": "cpu"}, **more}, str(tmp_path)) as engine:
            trained(engine)
            sizes = [unit.numel for unit in engine.training_state.hooks.units.all]
            peaks.append(engine.statistics().units.live_peak_numel)
    assert peaks[0] <= 2 * max(sizes)
    assert peaks[1] == sum(p.numel() for p in make("parameters").parameters())


@pytest.fixture
def resting(tmp_path: Path) -> Iterator[Engine]:
    with start(make("list"), ZEROS["nvme"], str(tmp_path)) as engine:
        trained(engine)
        yield engine


OUTSIDE: dict[str, Callable[[nn.Parameter], object]] = {
    "sum": lambda p: p.sum(),
    "list": lambda p: torch._foreach_norm([p]),
    "cat": lambda p: torch.cat([torch.zeros(1), p.view(-1)]),
    "linear": lambda p: F.linear(torch.zeros(1, 24), p),
    "operator": lambda p: torch.ops.aten.mul.Scalar(p, 2.0),
    "item": lambda p: p[0, 0].item(),
    "numpy": lambda p: p.detach().numpy(),
    "bool": bool,
    "in place": lambda p: p.data.zero_(),
    "init": nn.init.zeros_,
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "iteration": list,
    "comparison": lambda p: p == 0,
}


@pytest.mark.parametrize("way", OUTSIDE)
def test_outside_of_a_forward_the_first_operation_names_the_weight(way: str, resting: Engine) -> None:
    weight = resting.module.blocks[1].up.weight
    with pytest.raises(UsageError, match=r"parameter 'blocks\.1\.up\.weight' outside of a forward: .*zstore\.gather"):
        OUTSIDE[way](weight)
    with zstore.gather(weight):
        OUTSIDE[way](weight.detach().clone() if way != "bool" else weight.detach().sum())


def test_whatever_needs_no_values_is_that_of_the_weight(resting: Engine) -> None:
    for (name, ours), theirs in zip(resting.module.named_parameters(), make("list").parameters(), strict=True):
        assert isinstance(ours, nn.Parameter)
        for fact in ("shape", "dtype", "device", "layout"):
            assert getattr(ours, fact) == getattr(theirs, fact)
        for call in ("size", "numel", "dim", "element_size"):
            assert getattr(ours, call)() == getattr(theirs, call)()
        assert (ours.is_leaf, ours.requires_grad, ours.grad, ours.grad_fn) == (True, True, None, None)
        assert ours.is_floating_point()
        assert hash(ours) == id(ours)
        assert {ours: 1}[ours] == 1
        assert [ours].index(ours) == 0
        for same in (torch.zeros_like, torch.empty_like, lambda p: p.new_zeros(p.shape), torch.rand_like):
            assert (same(ours).shape, same(ours).stride()) == (theirs.shape, theirs.stride())
        for text in (repr(ours), str(ours), f"{ours}"):
            assert f"'{name}'" in text
            assert "nan" not in text
        ours.requires_grad_(False).requires_grad_(True)
    repr(nn.ParameterList(resting.module.parameters()))
    assert resting.module.head.weight is resting.module.embed.weight


def test_copies_and_pickles_have_the_values(resting: Engine) -> None:
    wanted = {name: resting.get_full_parameter(name) for name, _ in resting.module.named_parameters()}
    weights = dict(resting.module.named_parameters())
    file = io.BytesIO()
    torch.save(weights, file)
    file.seek(0)
    for copied in (copy.deepcopy(weights), pickle.loads(pickle.dumps(weights)), torch.load(file)):
        assert all(type(p) is nn.Parameter and torch.equal(p, wanted[name]) for name, p in copied.items())
    one = copy.deepcopy(resting.module.embed)
    assert type(one.weight) is nn.Parameter
    assert torch.equal(one.weight, wanted["embed.weight"])
    one.load_state_dict(one.state_dict())  # nothing watches a copy
    copied = copy.deepcopy([resting.module.embed, resting.module.head])
    assert copied[0].weight is copied[1].weight


def test_a_closed_engines_weights_say_so(tmp_path: Path) -> None:
    with start(make("list"), ZEROS["cpu, little room"], str(tmp_path)) as engine:
        model, offloaded = engine.module, engine
        offloaded.offload_states()
        with pytest.raises(UsageError, match=r"'shift'.*"):
            model.shift.sum()
        offloaded.reload_states()
        engine.backward(engine(batch(0, 0)))
        engine.step()
    with pytest.raises(UsageError, match=r"parameter 'embed\.weight', which has no values: its engine was closed"):
        model(batch(0, 0))
