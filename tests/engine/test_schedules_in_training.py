"""Schedules in the engine: those that a config names and torch's own train as in a plain loop, and resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import zstore
from tests.engine.runs import make_config
from tests.engine.schedule_cases import KNOWN, made
from zstore.engine import Engine
from zstore.engine.optim.lr_schedules import NamedSchedule
from zstore.errors import UsageError


def engine_with(scheduler: Any = None, **kwargs: Any) -> Engine:
    torch.manual_seed(0)
    keys = {"gradient_accumulation_steps": 1, "bf16": {"enabled": False}, "scheduler": scheduler}
    return zstore.initialize(model=nn.Linear(4, 3), config=make_config(**keys), **kwargs)[0]


def train(engine: Engine, steps: int) -> list[tuple[Any, ...]]:
    """What each step used and left: rates, betas, weights."""
    found = []
    for _ in range(steps):
        group = engine.optimizer.param_groups[0]
        used = (group["lr"], tuple(group["betas"]))
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(engine.global_steps))
        engine.backward(engine(x).square().mean())
        engine.step()
        found.append((*used, *(value for p in engine.parameters() for value in p.flatten().tolist())))
    return found


def plain_loop(steps: int, schedule: Callable[[torch.optim.Optimizer], Any]) -> list[tuple[Any, ...]]:
    """The same in plain torch; `schedule` is one of torch's, or one of ours that is advanced."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    scheduler, found = schedule(optimizer), []
    for step in range(steps):
        group = optimizer.param_groups[0]
        used = (group["lr"], tuple(group["betas"]))
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        (scheduler.advance if isinstance(scheduler, NamedSchedule) else scheduler.step)()
        found.append((*used, *(value for p in model.parameters() for value in p.flatten().tolist())))
    return found


@pytest.mark.parametrize(
    ("name", "params", "expected"), KNOWN[3::2], ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_engine_trains_with_them_and_resumes(
    name: str, params: dict[str, Any], expected: list[float], tmp_path: Path
) -> None:
    section = {"type": name, "params": params}
    with engine_with(section) as engine:
        whole = train(engine, 3)
        engine.save_checkpoint(str(tmp_path))
        whole += train(engine, 4)
    assert whole == plain_loop(7, lambda optimizer: made(name, params, optimizer))
    with engine_with(section) as engine:
        engine.load_checkpoint(str(tmp_path))
        assert train(engine, 4) == whole[3:]


TORCHS: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5, eta_min=1e-4),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], milestones=[2]
    ),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4]),
}


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_schedulers_keep_working_and_resume(name: str, tmp_path: Path) -> None:
    with engine_with(lr_scheduler=TORCHS[name]) as engine:
        whole = train(engine, 3)
        engine.save_checkpoint(str(tmp_path))
        whole += train(engine, 4)
    assert whole == plain_loop(7, TORCHS[name])
    with engine_with(lr_scheduler=TORCHS[name]) as engine:
        engine.load_checkpoint(str(tmp_path))
        assert train(engine, 4) == whole[3:]


def test_a_scheduler_that_needs_a_metric_is_stepped_in_the_loop() -> None:
    make = lr_scheduler.ReduceLROnPlateau
    with pytest.raises(UsageError, match=r"ReduceLROnPlateau needs a metric .* leave it out of initialize"):
        engine_with(lr_scheduler=make)
    with engine_with() as engine:
        scheduler = make(engine.optimizer, factor=0.5, patience=0)
        used = []
        for _ in range(3):
            used += [step[0] for step in train(engine, 1)]
            scheduler.step(1.0)
    assert used == [1e-2, 1e-2, 5e-3]
