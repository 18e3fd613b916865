"""Weights that a forward reaches otherwise than through their module, and leaf modules: beside the plain loop."""

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zstore
from tests.engine.bits import Case, Model, Run, compare, compare_all
from zstore.engine import Engine
from zstore.engine.adapters.deepspeed import utils
from zstore.errors import UsageError
from zstore.testing.ranks import run_ranks


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
        self.shift.record = "an attribute of the user"  # type: ignore[attr-defined]
        self.way = WAYS[way]
        self.kept = [list(self.parameters())]
        self.groups = [{"params": self.kept[0]}]
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
PLACES = {
    "memory, little room": Case(
        3, "cpu", "fp32", 1, 0.0, threshold=0, parameters="cpu", keys={"stage3_max_live_parameters": 5000}
    ),
    "disk": Case(3, "nvme", "fp32", 1, 0.0, threshold=0, parameters="nvme"),
    "disk, no room": Case(
        3, "none", "fp32", 1, 0.0, threshold=0, parameters="nvme", keys={"stage3_max_live_parameters": 0}
    ),
    "no tier": Case(3, "none", "fp32", 1, 0.0, threshold=0),
}


def ids_of(step: int, micro: int, rank: int) -> tuple[torch.Tensor]:
    return (torch.randint(50, (2, 7), generator=torch.Generator().manual_seed(10 * step + rank)),)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    if isinstance(model, Engine):
        model.module.groups = model.optimizer.param_groups
    loss: torch.Tensor = model(*batch)
    return loss


MODELS = {way: Model(partial(Net, way), ids_of, loss_of) for way in WAYS}


def none_is_in_use(run: Run) -> None:
    assert not any(unit.is_in_use for unit in run.engine.training_state.hooks.units.all)


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_has_its_values_however_a_forward_reaches_it(way: str) -> None:
    for place in ("memory, little room", "disk", "disk, no room"):
        assert compare(PLACES[place], 0, 1, model=MODELS[way], end=none_is_in_use) == [], place


def on_rank(rank: int) -> dict[str, list[str]]:
    found = {}
    for number, way in enumerate(WAYS):
        case = PLACES["no tier" if number % 2 else "disk, no room"]
        if way == "reentrant":  # gradients in two parts, each of which is reduced in the first backward
            with Run(case, rank, 2, model=MODELS[way]) as run:
                run.step()
                for name, parameter in run.parameters.items():
                    torch.testing.assert_close(run.engine.get_full_parameter(name), parameter.detach())
        else:
            found[way] = compare(case, rank, 2, model=MODELS[way], end=none_is_in_use)
    return {way: differing for way, differing in found.items() if differing}


def test_at_two_ranks() -> None:
    assert run_ranks(on_rank, 2) == [{}, {}]


def test_weights_take_turns_if_there_is_no_room_for_all() -> None:
    peaks = []
    for keys in ({"stage3_max_live_parameters": 0}, None):
        case = Case(3, "none", "fp32", 1, 0.0, threshold=0, parameters="cpu", keys=keys)
        with Run(case, 0, 1, model=MODELS["parameters"]) as run:
            run.step()
            sizes = [unit.numel for unit in run.engine.training_state.hooks.units.all]
            peaks.append(run.engine.statistics().units.live_peak_numel)
    assert peaks[0] <= 2 * max(sizes)
    assert peaks[1] == sum(p.numel() for p in run.parameters.values())


@pytest.fixture
def resting() -> Iterator[Engine]:
    with Run(PLACES["disk"], 0, 1, model=MODELS["list"]) as run:
        run.step()
        yield run.engine


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
    with pytest.raises(UsageError, match=r"parameter 'blocks\.1\.up\.weight' outside a forward: .*zstore\.gather"):
        OUTSIDE[way](weight)
    with zstore.gather(weight):
        OUTSIDE[way](weight.detach().clone() if way != "bool" else weight.detach().sum())


def test_whatever_needs_no_values_is_that_of_the_weight(resting: Engine) -> None:
    for (name, ours), theirs in zip(resting.module.named_parameters(), Net("list").parameters(), strict=True):
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


def test_a_closed_engines_weights_say_so() -> None:
    with Run(PLACES["memory, little room"], 0, 1, model=MODELS["list"]) as run:
        model = run.engine.module
        run.engine.offload_states()
        with pytest.raises(UsageError, match=r"'shift'.*"):
            model.shift.sum()
        run.engine.reload_states()
        run.step()
    with pytest.raises(UsageError, match=r"parameter 'embed\.weight', which has no values: its engine was closed"):
        model(*ids_of(0, 0, 0))


class Expert(nn.Linear):
    """One of a mixture's."""


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.third = Expert(8, 8), Expert(8, 8), Expert(8, 8)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return (self.one, self.other, self.third)[expert](x).tanh() + x


class Special(Mixture):
    """A subclass."""


class Mixtures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.first, self.second, self.end = nn.Linear(4, 8), Special(), Mixture(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.end(self.second(self.first(self.start(x), expert), 1 - expert))


ROUTED = Model(
    Mixtures,
    lambda step, micro, rank: (torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank)), rank),
    loss=lambda model, batch: model(*batch).square().mean(),
)


def _marked() -> Mixtures:
    model = Mixtures()
    utils.set_z3_leaf_modules(model, [Mixture])
    return model


LEAVES = {"keys": ROUTED, "marked": replace(ROUTED, make=_marked)}


def _leaf(live_numel: int, **leaf_module: Any) -> dict[str, Any]:
    return {"stage3_max_live_parameters": live_numel, "leaf_module": leaf_module}


def _on_ranks(rank: int) -> list[tuple[str, list[str]]]:
    case = partial(Case, 3, "none", "fp32", 1, 0.0, threshold=0)
    several = _leaf(1_000_000_000, classes="Mixture", names=["first"])
    one = _leaf(1, classes=[f"{__name__}.Special"], name_suffixes=["cond"])
    cases = [case(model="keys", keys=several), case(model="keys", keys=one), case(model="marked")]
    return compare_all(rank, 2, cases, 3, models=LEAVES)


def test_ranks_call_different_experts_of_a_leaf_to_the_bits_of_the_plain_loop() -> None:
    assert run_ranks(_on_ranks, 2) == [[], []]


def test_marks_are_set_by_class_name_and_ending_and_taken_away(caplog: pytest.LogCaptureFixture) -> None:
    model = Mixtures()
    assert utils.set_z3_leaf_modules(model, ["Special"]) == [model.first]
    assert utils.set_z3_leaf_modules(model, [Mixture]) == [model.first, model.second]
    assert utils.get_z3_leaf_modules(model) == [model.first, model.second]
    assert utils.unset_z3_leaf_modules(model, [f"{__name__}.Mixture"]) == [model.second]
    assert utils.set_z3_leaf_modules_by_name(model, ["second", "third"], raise_if_not_found=False) == (
        [model.second],
        ["third"],
    )
    assert utils.set_z3_leaf_modules_by_suffix(model, ["first", "cond"], flag=False) == (
        [model.first, model.second],
        [],
    )
    assert not utils.get_z3_leaf_modules(model)
    utils.set_z3_leaf_module(model.first, True)
    assert utils.z3_leaf_module(model.first)
    assert utils.set_z3_leaf_modules(model, ["Absent"], raise_if_not_found=False) == []
    for call in (
        lambda: utils.set_z3_leaf_modules(model, ["Absent"]),
        lambda: utils.set_z3_leaf_modules_by_name(model, ["absent"]),
    ):
        with pytest.raises(UsageError, match=r"no module.*[aA]bsent"):
            call()
    zero = {"stage": 3, "leaf_module": {"classes": ["Absent"], "names": ["second"]}}
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    with zstore.initialize(model=model, config=config)[0]:
        assert utils.z3_leaf_module(model.second)
    assert "zero_optimization.leaf_module: the model has no module Absent" in caplog.text
