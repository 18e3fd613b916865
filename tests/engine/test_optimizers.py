"""Optimizers: each has the bits of torch's class in a plain loop, on disk, on a device, on several ranks; and their names."""

import copy
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.bits import Case, Model, Rule, compare, compare_all
from tests.engine.fake_device import FakeDevice
from tests.engine.models import make_net
from tests.engine.runs import make_config, start
from zstore.engine.config.config import load_config
from zstore.engine.config.optimizers import OPTIMIZERS
from zstore.engine.config.resolve import ResolveContext
from zstore.engine.extras import register_parts
from zstore.engine.optim.kernel import TorchKernel
from zstore.engine.optim.optimizer import optimizer_from_config
from zstore.errors import ConfigError, UsageError
from zstore.optim import Lamb, Lion, MuonWithAdam, split_for_muon
from zstore.testing.ranks import run_ranks

ELEMENT_WISE: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD with Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adam with amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW with amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Lion": lambda p: Lion(p, lr=0.01, weight_decay=0.1),
}


RULES = {
    name: Rule(lambda named, make=make: make(named.values()))  # type: ignore[misc]
    for name, make in ELEMENT_WISE.items()
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 301), nn.Tanh(), nn.Linear(301, 70))


def inputs(step: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(step))


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_on_disk_each_does_what_torch_does_bit_for_bit(name: str) -> None:
    assert compare(Case(1, "nvme", "fp32", 1, 0.0, resume=1), 0, 1, rule=RULES[name]) == []


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_on_a_device_parameters_are_stepped_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together = TorchKernel.tiles
    counts: list[int] = []

    def tiles(kernel: TorchKernel, scalars: Any, masters: Any, *others: Any) -> Any:
        counts.append(len(masters))
        return together(kernel, scalars, masters, *others)

    monkeypatch.setattr(TorchKernel, "tiles", tiles)
    small = Model(model, lambda step, *_: inputs(step), loss_of)
    with FakeDevice() as device:
        case = Case(1, "none", "fp32", 1, 0.0)
        assert compare(case, 0, 1, rule=RULES[name], model=small, _streams=device) == []
    assert counts == [] if name in ("Adam", "AdamW") else counts[-1] == 4


class Deep(nn.ModuleList):
    """Uses as many of its layers as it is told; a host kernel takes weights, but no biases."""

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        for layer in list(self)[:depth]:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_a_step_is_planned_anew_when_parameters_or_their_settings_differ(tier: str) -> None:
    plain, calls = Deep(nn.Linear(130, 130) for _ in range(10)), list[str]()
    net = copy.deepcopy(plain)
    reference, made = (torch.optim.AdamW(each.parameters(), lr=0.01, fused=True) for each in (plain, net))
    plainly = {"gradient_accumulation_steps": 1, "bf16": {"enabled": False}, "scheduler": None, "optimizer": None}
    with start(make_config(2, tier, zstore={"step_overlap": "none"}, **plainly), net, optimizer=made) as engine:
        for step, depth in enumerate((10, 10, 7, 7, 10, 10, 10, 10)):  # the last layers' step counts are behind
            torch.set_num_threads(1 + (step == 3))
            if step == 5:
                engine.set_optimizer_state("1.weight", "step", 9.0)
                reference.state[plain[1].weight]["step"].fill_(9.0)
            for each in (engine, plain):
                loss = each(torch.randn(3, 130, generator=torch.Generator().manual_seed(step)), depth)
                engine.backward(loss) if each is engine else loss.backward()
            for each in (net, plain) if step == 4 else ():
                each[2].weight.grad.mul_(0.5)
            for p in net.parameters() if step == 6 else ():
                p.data.share_memory_()  # as a queue of another process does, in place
                with pytest.raises(UsageError, match="was given different storage"):
                    engine.require_parameters()
            calls.clear()
            sys.setprofile(lambda _, event, __: calls.append(event))
            engine.step()
            sys.setprofile(None)
            reference.step()
            reference.zero_grad()
            assert all(torch.equal(a, b) for a, b in zip(net.parameters(), plain.parameters(), strict=True)), step
        assert calls.count("call") < 800
        state = engine.training_state.state
        kept = [state.planned(key, object) for key in (("ahead",), (*range(9999),), ("ahead",))]
        assert kept[0] is kept[2]  # which may read already
        assert max(len(state.plans) for experts in range(999) if not state.planned(20 * (experts,), list)) < 40
        engine.offload_states()
        assert not state.plans  # they would keep the memory


# Precision, micro-batches, clip, tier of the parameters, step mode.
SETTINGS = [
    ("bf16", 2, 0.25, "nvme", "forward"),
    ("fp32", 1, 0.0, "none", "backward"),
    ("bf16", 1, 0.0, "nvme", "backward"),
    ("fp32", 2, 0.25, "none", "forward"),
]


def _stepped(rank: int, everything: bool) -> list[tuple[str, list[str]]]:
    names = list(ELEMENT_WISE) if everything else list(ELEMENT_WISE)[1::2]
    cases = [
        Case(3, "nvme", *settings[:3], parameters=settings[3], overlap=settings[4], optimizer=name)
        for number, name in enumerate(names)
        for settings in (SETTINGS if everything else SETTINGS[number % 4 :][:1])
    ]
    return compare_all(rank, 2, cases, 3, rules=RULES)


@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_on_two_ranks_each_does_what_torch_does_bit_for_bit(everything: bool) -> None:
    for failed in run_ranks(_stepped, 2, everything, timeout_s=240):
        assert failed == []


VALUES: dict[str, Any] = {
    "betas": (0.7, 0.8), "eps": 1e-5, "etas": (0.4, 1.3), "step_sizes": (1e-5, 10.0), "beta2_decay": -0.5, "d": 2.0,
    "momentum": 0.5, "nesterov": True, "dampening": 0.0, "t0": 10.0, "alpha": 0.9, "rho": 0.8,
}  # fmt: skip


def from_section(kind: str, params: dict[str, Any]) -> torch.optim.Optimizer:
    config = load_config({"optimizer": {"type": kind, "params": params}, "train_batch_size": 1})
    asked = config.resolve(ResolveContext(world_size=1)).settings.optimizer
    register_parts()  # as initialize() does before
    return optimizer_from_config(asked, None, model())


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("Adam", "Muon") and "One" not in name])
def test_a_name_makes_the_class_with_its_defaults_and_every_key_reaches_it(name: str) -> None:
    ours: dict[str, type[torch.optim.Optimizer]] = {"Lion": Lion, "Lamb": Lamb}
    kind = ours.get(name) or getattr(torch.optim, name)
    usual, made = kind(model().parameters()).defaults, from_section(name, {})
    assert type(made) is kind
    other = {"AdamW": {"weight_decay": 0.0}, "Lion": {"lr": 1e-3, "betas": (0.9, 0.999)}}.get(name, {})  # DeepSpeed's
    assert {key: value for key, value in made.param_groups[0].items() if key != "params"} == usual | other
    keys = set(OPTIMIZERS[name]().arguments()) - {"adam_w_mode", "torch_adam"}
    values = {
        key: VALUES.get(
            key, not usual[key] if isinstance(usual[key], bool) else 3 if isinstance(usual[key], int) else 0.25
        )
        for key in keys
        if key != "bias_correction" or name not in ("Adam", "AdamW")
    }
    if name == "Adafactor":
        values["eps"] = (1e-7, 0.5)
    group = from_section(name, values).param_groups[0]
    assert {key: group[key] for key in values} == values
    assert all(usual[key] != value for key, value in values.items() if key != "dampening")


def test_muon_and_adam_have_groups_with_rates_of_their_own() -> None:
    params = {"lr": 0.5, "adam_lr": 0.25, "ns_steps": 3, "betas": [0.5, 0.6], "momentum": 0.9, "weight_decay": 0.1}
    muon, adam = from_section("muon", params).param_groups
    assert [tuple(p.shape) for p in muon["params"]] == [(301, 64), (70, 301)]
    assert (muon["use_muon"], muon["lr"], muon["ns_steps"], muon["momentum"]) == (True, 0.5, 3, 0.9)
    assert (adam["use_muon"], adam["lr"], adam["betas"], adam["eps"]) == (False, 0.25, (0.5, 0.6), 1e-10)
    assert muon["weight_decay"] == adam["weight_decay"] == 0.1
    muon, adam = from_section("Muon", {}).param_groups
    assert (muon["lr"], muon["momentum"], adam["lr"], adam["betas"]) == (0.02, 0.95, 3e-4, (0.9, 0.95))
    net = make_net()
    split = split_for_muon(net)
    names = {parameter: name for name, parameter in net.named_parameters()}
    assert {names[p] for p in split[0]} == {
        "unused.weight",
        *(f"blocks.{i}.{which}.weight" for i in (0, 1) for which in ("up", "down")),
    }
    net.unused.weight.use_muon = False  # type: ignore[assignment]
    assert len(split_for_muon(net)[0]) == len(split[0]) - 1
    net.mix.use_muon = True  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="'mix' has use_muon = True, but Muon is for matrices"):
        split_for_muon(net)
    with pytest.raises(UsageError, match=r"expected groups .* split_for_muon\(model\) splits"):
        MuonWithAdam([{"params": list(net.parameters())}])


def test_arguments_that_a_class_refuses_are_an_error_of_the_config() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.params: SGD does not accept these arguments: Nesterov"):
        from_section("SGD", {"nesterov": True})
    with pytest.raises(UsageError, match=r"Lion\(betas=\(0\.9, 1\)\): expected two numbers"):
        Lion(model().parameters(), betas=(0.9, 1))
    with pytest.raises(UsageError, match=r"Lamb\(lr=-1\): expected a number of at least 0"):
        Lamb(model().parameters(), lr=-1)


def test_moments_are_used_as_they_are_without_bias_correction(tmp_path: Path) -> None:
    params = {"lr": 0.01, "bias_correction": False, "amsgrad": True, "maximize": True, "weight_decay": 0.1}
    net = model()
    plain = copy.deepcopy(net)
    keys: dict[str, Any] = {"gradient_accumulation_steps": 1, "bf16": {"enabled": False}, "scheduler": None}
    engine = start(make_config(1, "nvme", tmp_path, optimizer={"type": "Adam", "params": params}, **keys), net)
    kept = {p: [torch.zeros_like(p) for _ in range(3)] for p in plain.parameters()}
    with engine, torch.no_grad():
        for number in range(3):
            with torch.enable_grad():
                engine.backward(loss_of(engine, inputs(number)))
                engine.step()
                loss_of(plain, inputs(number)).backward()
            for p, (moment, squares, largest) in kept.items():
                moment.lerp_(-p.grad, 0.1)
                squares.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                torch.maximum(largest, squares, out=largest)
                p.mul_(1 - 0.01 * 0.1).sub_(0.01 * moment / (largest.sqrt() + 1e-8))
                p.grad = None
            # Each step from the same parameters: a gradient close to 0 makes much of the last bit of a former step.
            for name, p in plain.named_parameters():
                found = engine.get_full_parameter(name)
                torch.testing.assert_close(found, p.detach(), rtol=1e-5, atol=1e-6)
                p.copy_(found)
