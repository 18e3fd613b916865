"""Parameter groups of the engine's optimizer, beside those of torch's optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zstore
from zstore.engine import Engine
from zstore.engine.adapters.deepspeed.engine import initialize as initialize_as_deepspeed

Given = Callable[[nn.Module], Any]
GIVEN: dict[str, Given] = {
    "one empty": lambda m: [{"params": m.parameters(), "weight_decay": 0.0}, {"params": [], "weight_decay": 0.5}],
    "two of four empty": lambda m: [
        {"params": []},
        {"params": [m[0].weight, m[1].weight], "weight_decay": 0.3},
        {"params": [], "lr": 0.5},
        {"params": m[0].bias},
    ],
    "a frozen group": lambda m: [{"params": [m[1].bias], "lr": 0.5}, {"params": [m[0].weight, m[1].weight]}],
    "frozen ones": lambda m: m.parameters(),
    "with names": lambda m: m.named_parameters(),
    "groups with names": lambda m: [
        {"params": list(m.named_parameters())[2:]},
        {"params": list(m.named_parameters())[:2]},
    ],
}
WAYS = ("config", "object", "callable")


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    net[1].bias.requires_grad_(False)
    return net


def _start(way: str, given: Given, kind: Any = torch.optim.AdamW, lr_scheduler: Any = None, **settings: Any) -> Engine:
    model, arguments = _net(), {"lr": 0.01} | settings
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2},
    }
    if way == "config":
        config["optimizer"] = {"type": kind.__name__, "params": arguments}
    if way == "callable":
        return initialize_as_deepspeed(
            model=model,
            optimizer=lambda params: kind(params, **arguments),
            model_parameters=given(model),
            lr_scheduler=lr_scheduler,
            config=config,
        )[0]
    return zstore.initialize(
        model=model,
        optimizer=kind(given(model), **arguments) if way == "object" else None,
        model_parameters=given(model) if way == "config" else None,
        lr_scheduler=lr_scheduler,
        config=config,
    )[0]


def _seen(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[dict[str, Any]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    shown = ("lr", "initial_lr", "betas", "eps", "weight_decay", "param_names")
    return [
        {"params": [names[parameter] for parameter in group["params"]]}
        | {name: group[name] for name in shown if name in group}
        for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("way", WAYS)
def test_groups_are_those_that_torch_makes(way: str, given: str) -> None:
    model = _net()
    theirs = torch.optim.AdamW(GIVEN[given](model), lr=0.01, weight_decay=0.1)
    with _start(way, GIVEN[given], weight_decay=0.1) as engine:
        assert _seen(engine.optimizer, engine.module) == _seen(theirs, model)


def test_without_a_list_the_model_is_one_group() -> None:
    model = _net()
    theirs = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    with _start("config", lambda _: None, weight_decay=0.1) as engine:
        assert _seen(engine.optimizer, engine.module) == _seen(theirs, model)


RATES = [lambda step: 0.5**step, lambda step: 1.0 / (1 + step), lambda step: 1.0, lambda step: 2.0]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("way", WAYS)
def test_a_schedule_with_a_function_for_each_group_trains_and_resumes(way: str, kind: Any, tmp_path: Path) -> None:
    given = GIVEN["two of four empty"]
    plain = _net()
    theirs = kind(given(plain), lr=0.01, weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(theirs, RATES)

    def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, RATES)

    for first in (0, 2):
        with _start(way, given, kind, scheduled, weight_decay=0.1) as engine:
            if first:
                engine.optimizer.param_groups[1]["weight_decay"] = 0.9  # which the load takes back
                engine.load_checkpoint(str(tmp_path))
            for step in (first, first + 1):
                x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
                engine.backward(engine(x).square().mean())
                engine.step()
                plain(x).square().mean().backward()
                theirs.step()
                schedule.step()
                theirs.zero_grad()
            assert engine.get_lr() == schedule.get_last_lr()
            assert [len(group["params"]) for group in engine.optimizer.param_groups] == [0, 2, 0, 1]
            for name, value in plain.named_parameters():
                assert torch.equal(engine.get_full_parameter(name), value)  # type: ignore[arg-type]
            engine.save_checkpoint(str(tmp_path))


def test_names_of_parameters_are_torchs_after_a_resume(tmp_path: Path) -> None:
    given = GIVEN["groups with names"]
    for way in WAYS:
        with _start(way, given) as engine:
            engine.save_checkpoint(str(tmp_path / way))
            engine.load_checkpoint(str(tmp_path / way))
            model = _net()
            theirs = torch.optim.AdamW(given(model), lr=0.01)
            found = [group.get("param_names") for group in engine.optimizer.param_groups]
            assert found == [group.get("param_names") for group in theirs.param_groups]


OTHERS = ["Adam", "Adagrad", "RMSprop", "Lion", "Lamb", "Adafactor", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Muon"]


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_keep_empty_groups(name: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.0,
        "optimizer": {"type": name, "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 0},
    }
    model = _net()
    engine = zstore.initialize(model=model, model_parameters=GIVEN["two of four empty"](model), config=config)[0]
    with engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(3, 4)).square().mean())
            engine.step()
        assert [len(group["params"]) for group in engine.optimizer.param_groups] == [0, 2, 0, 1]
