"""Schedules: DeepSpeed's values, what a config may say of them, and training with them and torch's as in a plain loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import zstore
from tests.engine.runs import make_config
from tests.engine.schedule_cases import KNOWN, adam, made
from zstore.engine import Engine
from zstore.engine.config.config import load_config
from zstore.engine.config.resolve import ResolveContext
from zstore.engine.training.lr_schedules import LRSchedule, NamedSchedule, named_schedule
from zstore.errors import ConfigError, UsageError


def setting_at_each_step(schedule: NamedSchedule, steps: int, name: str = "lr") -> list[list[Any]]:
    found = []
    for _ in range(steps):
        found.append([group[name] for group in schedule.optimizer.param_groups])
        schedule.advance()
    return found


def rates(name: str, params: dict[str, Any], steps: int) -> list[float]:
    return [lrs[0] for lrs in setting_at_each_step(made(name, params), steps)]


@pytest.mark.parametrize(("name", "params", "expected"), KNOWN, ids=lambda one: one if isinstance(one, str) else "")
def test_rates_are_deepspeeds(name: str, params: dict[str, Any], expected: list[float]) -> None:
    assert rates(name, params, len(expected)) == pytest.approx(expected, rel=1e-9)


def test_a_warm_up_of_0_steps_is_one_of_1() -> None:
    """As in DeepSpeed before it refused 0; the Trainer of transformers answers "auto" with 0."""
    ((name, params, expected),) = (case for case in KNOWN if case[1] == {"warmup_num_steps": 1})
    test_rates_are_deepspeeds(name, params | {"warmup_num_steps": 0}, expected)


def test_momentum_goes_the_other_way() -> None:
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.9, "cycle_first_step_size": 4, "cycle_second_step_size": 2}
    decay = {"decay_step_size": 2, "decay_mom_rate": 0.01}
    betas = setting_at_each_step(made("OneCycle", params | decay), 11, "betas")
    # DeepSpeed 0.19.8: the first step has the least, the second beta is 0.99.
    expected = [0.8, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.9045, 0.909, 0.9135, 0.918]
    assert [beta for ((beta, _),) in betas] == pytest.approx(expected)
    assert {second for ((_, second),) in betas} == {0.99}
    still = setting_at_each_step(made("OneCycle", params | {"cycle_momentum": False}), 5, "betas")
    assert still == [[(0.9, 0.999)]] * 5


def test_momentum_of_an_optimizer_without_betas(caplog: pytest.LogCaptureFixture) -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.9, "cycle_first_step_size": 2}
    moving = made("OneCycle", params, torch.optim.SGD(parameters, lr=1, momentum=0.5))
    found = [momentum for (momentum,) in setting_at_each_step(moving, 5, "momentum")]
    assert found == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9])
    assert not caplog.records
    plain = made("OneCycle", params, torch.optim.SGD(parameters, lr=1))
    assert setting_at_each_step(plain, 3, "momentum") == [[0]] * 3
    assert ["neither betas nor momentum" in record.message for record in caplog.records] == [True]
    with pytest.raises(ConfigError, match=r"cycle_min_mom: expected more than 0"):
        made("OneCycle", params | {"cycle_min_mom": 0}, torch.optim.SGD(parameters, lr=1, momentum=0.5))


LISTS: list[tuple[str, dict[str, Any], str, list[list[Any]]]] = [
    ("WarmupLR", {"warmup_min_lr": [0, 1], "warmup_max_lr": [2, 3], "warmup_num_steps": 1}, "lr", [[0, 1], [2, 3]]),
    ("WarmupLR", {"warmup_num_steps": 1}, "lr", [[0, 0], [0.5, 1.0]]),
    (
        "WarmupCosineLR",
        {"total_num_steps": 2, "warmup_num_steps": 2, "cos_min_ratio": 0.5},
        "lr",
        [[0, 0], [0.25, 0.5]],
    ),
    ("LRRangeTest", {"lr_range_test_min_lr": [1, 2], "lr_range_test_step_size": 3}, "lr", [[1, 2], [2, 4]]),
    ("OneCycle", {"cycle_min_lr": [1, 2], "cycle_max_lr": [5, 9], "cycle_first_step_size": 3}, "lr", [[1, 2], [5, 9]]),
    (
        "OneCycle",
        {"cycle_min_lr": 1, "cycle_max_lr": 2, "cycle_min_mom": [0.1, 0.2], "cycle_first_step_size": 3},
        "betas",
        [[(0.1, 0.99), (0.2, 0.99)], [(0.1, 0.99), (0.2, 0.99)]],
    ),
]


@pytest.mark.parametrize(("name", "params", "setting", "expected"), LISTS)
def test_lists_have_a_value_a_group(name: str, params: dict[str, Any], setting: str, expected: list[list[Any]]) -> None:
    found = setting_at_each_step(made(name, params, adam(2)), 4, setting)
    for step, values in zip((0, 3), expected, strict=True):
        assert np.array(found[step]) == pytest.approx(np.array(values))


def test_a_list_for_another_number_of_groups() -> None:
    with pytest.raises(ConfigError, match=r"warmup_max_lr: .* a list of 2, one for each parameter group .* got 3"):
        made("WarmupLR", {"warmup_max_lr": [1, 2, 3]}, adam(2))


def test_a_warm_up_longer_than_the_training_is_told(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("WarmupDecayLR", "WarmupCosineLR"):
        made(name, {"total_num_steps": 5, "warmup_num_steps": 6})
    assert [r.message.startswith("scheduler.params: total_num_steps 5 is less") for r in caplog.records] == [True] * 2


@pytest.mark.parametrize(("name", "params", "expected"), KNOWN, ids=lambda one: one if isinstance(one, str) else "")
def test_a_resumed_schedule_goes_on(name: str, params: dict[str, Any], expected: list[float]) -> None:
    for at in (0, 1, 3, len(expected)):
        one = made(name, params)
        before = setting_at_each_step(one, at)
        other = made(name, params)
        other.load_state_dict(one.state_dict())
        for setting in ("lr", "betas"):
            assert other.optimizer.param_groups[0][setting] == one.optimizer.param_groups[0][setting]
        after = setting_at_each_step(other, 6)
        assert before + after == setting_at_each_step(made(name, params), at + 6)


def test_a_loops_own_step_of_an_engines_schedule_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    schedule = made("WarmupLR", {"warmup_num_steps": 4})
    LRSchedule(schedule)
    schedule.advance()
    before = schedule.state_dict(), schedule.get_last_lr()
    schedule.step()
    schedule.step(7)
    assert (schedule.state_dict(), schedule.get_last_lr()) == before
    assert [record.message for record in caplog.records if "remove scheduler.step()" in record.message] != []
    assert len(caplog.records) == 1


def test_auto_as_hugging_face_users_write_it() -> None:
    keys = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.25}},
        "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(keys, "auto")},
    }
    known = ResolveContext(
        world_size=1, auto_values={"scheduler.params.warmup_num_steps": 3, "scheduler.params.total_num_steps": 9}
    )
    section = load_config(config).resolve(known).settings.scheduler
    assert [getattr(section.params, key) for key in keys] == [0, 0.25, 3, 9]
    auto_values = {"scheduler.params.warmup_num_steps": 1, "scheduler.params.total_num_steps": 9}
    own = load_config(config).resolve(ResolveContext(world_size=1, client_optimizer=True, auto_values=auto_values))
    schedule = named_schedule(own.settings.scheduler, adam(2))
    assert setting_at_each_step(schedule, 4)[3] == [0.5, 1.0]


def test_a_schedule_goes_on_from_the_position_that_is_asked_for() -> None:
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": 1.0, "warmup_num_steps": 10, "warmup_type": "linear"}

    def schedule(**more: Any) -> NamedSchedule:
        section = {"type": "WarmupLR", "params": params | more}
        config = load_config({"train_batch_size": 1, "scheduler": section})
        assert not config.notices
        resolved = config.resolve(ResolveContext(world_size=1, client_optimizer=True)).settings.scheduler
        return named_schedule(resolved, adam(1))

    whole = setting_at_each_step(schedule(), 9)
    assert setting_at_each_step(schedule(last_batch_iteration=3), 4) == whole[4:8]


def engine_with(scheduler: Any = None, **kwargs: Any) -> Engine:
    torch.manual_seed(0)
    keys = {"gradient_accumulation_steps": 1, "bf16": {"enabled": False}, "scheduler": scheduler}
    return zstore.initialize(model=nn.Linear(4, 3), config=make_config(**keys), **kwargs)[0]


def train(engine: Engine, steps: int) -> list[tuple[Any, ...]]:
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


NAMED = [{"type": name, "params": params} for name, params, _ in KNOWN[3::2]]


@pytest.mark.parametrize("kind", [*NAMED, *TORCHS], ids=lambda kind: kind if isinstance(kind, str) else kind["type"])
def test_the_engine_trains_with_those_of_a_config_and_torchs_and_resumes(kind: Any, tmp_path: Path) -> None:
    def started() -> Engine:
        return engine_with(lr_scheduler=TORCHS[kind]) if isinstance(kind, str) else engine_with(kind)

    with started() as engine:
        whole = train(engine, 3)
        engine.save_checkpoint(str(tmp_path))
        whole += train(engine, 4)
    plain = TORCHS[kind] if isinstance(kind, str) else lambda o: made(kind["type"], kind["params"], o)
    assert whole == plain_loop(7, plain)
    with started() as engine:
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
