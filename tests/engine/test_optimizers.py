"""Optimizers of the client's: each element-wise one does on disk what torch does."""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zstore
from tests.engine.bits import engine_digests, slot_digests
from tests.engine.fake_device import FakeDevice
from tests.engine.models import batch, make_net
from tests.engine.runs import make_config
from tests.reference import Reference
from zstore.engine import Engine
from zstore.engine.config.config import load_config
from zstore.engine.config.optimizers import OPTIMIZERS
from zstore.engine.config.resolve import ResolveContext
from zstore.engine.extras import register_parts
from zstore.engine.optim.kernel import TorchKernel
from zstore.engine.optim.optimizer import optimizer_from_config
from zstore.errors import ConfigError, UsageError
from zstore.optim import Lamb, Lion, MuonWithAdam, split_for_muon
from zstore.testing.ranks import run_ranks

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]

ELEMENT_WISE: dict[str, Make] = {
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


def model() -> nn.Module:
    """Its two weights are too large to stay in memory where state is on disk."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 301), nn.Tanh(), nn.Linear(301, 70))


def inputs(step: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(step))


def on_disk(folder: Path | str, stage: int = 1, **keys: Any) -> dict[str, Any]:
    plain = {"gradient_accumulation_steps": 1, "bf16": {"enabled": False}, "scheduler": None, "optimizer": None}
    return make_config(stage, "nvme", folder, **(plain | keys))


def started(make: Make, folder: Path) -> Engine:
    net = model()
    return zstore.initialize(model=net, optimizer=make(net.parameters()), config=on_disk(folder))[0]


def train(engine: Engine, step: int) -> None:
    engine.backward(engine(inputs(step)).square().mean())
    engine.step()


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_on_disk_each_does_what_torch_does_bit_for_bit(name: str, tmp_path: Path) -> None:
    make, run, saves = ELEMENT_WISE[name], tmp_path / "run", tmp_path / "saves"
    run.mkdir()
    plain = model()
    reference = make(plain.parameters())
    with started(make, run) as engine:
        for step in range(3):
            train(engine, step)
            reference.zero_grad()
            plain(inputs(step)).square().mean().backward()
            reference.step()
            assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), plain.parameters(), strict=True))
            if step == 0:
                engine.save_checkpoint(str(saves))
        state = engine.training_state.state
        large = [r.name for r in state.records if r.numel * 4 > 64 << 10]
        assert large == ["0.weight", "2.weight"]
        for record, parameter in zip(state.records, plain.parameters(), strict=True):
            for array in state.arrays_of(record)[1:]:
                slot = reference.state[parameter][array.split("/")[1]].reshape(-1)
                assert torch.equal(torch.from_numpy(state.store.read(array).wait()), slot), array
        assert list(run.rglob("*.shard")) != []
        whole = engine_digests(engine)
    with started(make, run) as engine:
        engine.load_checkpoint(str(saves))
        for step in (1, 2):
            train(engine, step)
        assert engine_digests(engine) == whole


@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_on_a_device_parameters_are_stepped_together_with_the_bits_of_torch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, together = ELEMENT_WISE[name], TorchKernel.tiles
    counts: list[int] = []

    def tiles(kernel: TorchKernel, scalars: Any, masters: Any, *others: Any) -> Any:
        counts.append(len(masters))
        return together(kernel, scalars, masters, *others)

    monkeypatch.setattr(TorchKernel, "tiles", tiles)
    plain, net = model(), model()
    reference = make(plain.parameters())
    config = on_disk(tmp_path, zstore={"step_overlap": "none"})
    config["zero_optimization"].pop("offload_optimizer")
    given: dict[str, Any] = {"model": net, "optimizer": make(net.parameters()), "config": config}
    with FakeDevice() as device, zstore.initialize(**given, _streams=device)[0] as engine:
        for step in range(3):
            counts.clear()
            train(engine, step)
            reference.zero_grad()
            plain(inputs(step)).square().mean().backward()
            reference.step()
            assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), plain.parameters(), strict=True))
    assert counts == [] if isinstance(reference, torch.optim.Adam) and "amsgrad" not in name else counts[-1] == 4


class Deep(nn.ModuleList):
    """Uses as many of its layers as it is told; a host kernel takes weights, but no biases."""

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        for layer in list(self)[:depth]:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_a_step_is_planned_anew_when_parameters_or_their_settings_differ(tier: str, tmp_path: Path) -> None:
    plain, calls = Deep(nn.Linear(130, 130) for _ in range(10)), list[str]()
    net = copy.deepcopy(plain)
    reference, made = (torch.optim.AdamW(each.parameters(), lr=0.01, fused=True) for each in (plain, net))
    config = on_disk(tmp_path, 2, gradient_clipping=0)
    config["zero_optimization"] = make_config(2, tier, tmp_path)["zero_optimization"]
    with zstore.initialize(model=net, optimizer=made, config=config)[0] as engine:
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
                with pytest.raises(UsageError, match="got other memory"):
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


# -- on several ranks -------------------------------------------------------------------------------------------------

# (precision, step mode, clip, accumulation, tier of the parameters)
SETTINGS = [
    ("bf16", "forward", 0.25, 2, "nvme"),
    ("fp32", "backward", 0.0, 1, "none"),
    ("bf16", "backward", 0.0, 1, "nvme"),
    ("fp32", "forward", 0.25, 2, "none"),
]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


SCALARS = ("step", "mu_product", "eta", "mu")


def scalars_that_differ(engine: Engine, reference: Reference) -> list[str]:
    """Return the scalars that are not torch's, also of parameters of which this rank has no rows."""
    found = {record.name: scalars for record, scalars in engine.training_state.state.scalars.items()}
    return [
        f"{scalar} of {name}: {found[name].get(scalar)}"
        for name, master in reference.masters.items()
        for scalar, value in reference.optimizer.state[master].items()
        if master.grad is not None and scalar in SCALARS and found[name].get(scalar) != float(value)
    ]


def stepped(rank: int, name: str, precision: str, mode: str, clip: float, accumulation: int, tier: str) -> list[str]:
    """Return what differs between engine and plain loop, on two ranks at stage 3, over three steps."""
    differences: list[str] = []
    make = ELEMENT_WISE[name]
    with tempfile.TemporaryDirectory() as folder:
        config = on_disk(folder, 3, bf16={"enabled": precision == "bf16"}, gradient_clipping=clip)
        config |= {"gradient_accumulation_steps": accumulation, "zstore": {"step_overlap": mode}}
        if tier != "none":
            config["zero_optimization"]["offload_param"] = {"device": tier, "nvme_path": folder}
        net = make_net()
        reference = Reference(
            make_net(), 2, stage=3, precision=precision, accumulation=accumulation, clip=clip, adam={"lr": 0.0}
        )
        reference.optimizer = make(reference.masters.values())
        with zstore.initialize(model=net, optimizer=make(trained(net)), config=config)[0] as engine:
            state = engine.training_state.state
            rows = {record.name: record.owned_range for record in state.records}
            # The scalar is the first rank's: the other takes its step without any rows.
            assert (rows["blocks.0.gain"] == (0, 1)) == (rank == 0)
            assert any(state.store.tier(array).name == "disk" for array in state.store.names())
            for number in range(3):
                batches = [[batch(number, micro, r) for r in range(2)] for micro in range(accumulation)]
                reference.step(batches)
                for micro in batches:
                    engine.backward(engine(*micro[rank]))
                    engine.step()
                if clip:
                    assert reference.norm > clip
                assert engine.get_global_grad_norm() == reference.norm
                differences += [f"step {number}: {scalar}" for scalar in scalars_that_differ(engine, reference)]
                if number == 1:
                    continue  # reading the state would wait for the update: let it run into the next forward
                expected, found = slot_digests(engine, reference), engine_digests(engine)
                differences += [f"step {number}: {key}" for key in expected if found.get(key) != expected[key]]
            slots = {array.split("/")[1] for record in state.records for array in state.arrays_of(record)[1:]}
            kept = {
                slot for state in reference.optimizer.state.values() for slot, v in state.items() if torch.is_tensor(v)
            }
            assert slots == kept - set(SCALARS)
    return differences


def _stepped(rank: int, everything: bool) -> list[tuple[str, Any, list[str]]]:
    names = list(ELEMENT_WISE) if everything else list(ELEMENT_WISE)[1::2]
    found = [
        (name, settings, stepped(rank, name, *settings))
        for number, name in enumerate(names)
        for settings in (SETTINGS if everything else SETTINGS[number % 4 :][:1])
    ]
    return [one for one in found if one[2]]


@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_on_two_ranks_each_does_what_torch_does_bit_for_bit(everything: bool) -> None:
    for failed in run_ranks(_stepped, 2, everything, timeout_s=240):
        assert failed == []


# -- by name -----------------------------------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "betas": (0.7, 0.8), "eps": 1e-5, "etas": (0.4, 1.3), "step_sizes": (1e-5, 10.0), "beta2_decay": -0.5, "d": 2.0,
    "momentum": 0.5, "nesterov": True, "dampening": 0.0, "t0": 10.0, "alpha": 0.9, "rho": 0.8,
}  # fmt: skip


def from_section(kind: str, params: dict[str, Any]) -> torch.optim.Optimizer:
    config = load_config({"optimizer": {"type": kind, "params": params}, "train_batch_size": 1})
    asked = config.resolve(ResolveContext(world_size=1)).optimizer
    assert asked is not None
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
    with pytest.raises(UsageError, match=r"expected groups .* split_for_muon\(model\) makes them"):
        MuonWithAdam([{"params": list(net.parameters())}])


def test_arguments_that_a_class_refuses_are_an_error_of_the_config() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.params: SGD does not take these arguments: Nesterov"):
        from_section("SGD", {"nesterov": True})
    with pytest.raises(UsageError, match=r"Lion\(betas=\(0\.9, 1\)\): expected two numbers"):
        Lion(model().parameters(), betas=(0.9, 1))
    with pytest.raises(UsageError, match=r"Lamb\(lr=-1\): expected a number of at least 0"):
        Lamb(model().parameters(), lr=-1)


def test_moments_are_used_as_they_are_without_bias_correction(tmp_path: Path) -> None:
    params = {"lr": 0.01, "bias_correction": False, "amsgrad": True, "maximize": True, "weight_decay": 0.1}
    net, plain = model(), model()
    section = {"type": "Adam", "params": params}
    engine = zstore.initialize(model=net, config=on_disk(tmp_path, optimizer=section))[0]
    kept = {p: [torch.zeros_like(p) for _ in range(3)] for p in plain.parameters()}
    with engine, torch.no_grad():
        for number in range(3):
            with torch.enable_grad():
                train(engine, number)
                plain(inputs(number)).square().mean().backward()
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
