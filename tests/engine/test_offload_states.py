"""`offload_states` and `reload_states`: the memory is given back, every bit comes back, and nothing runs in between."""

from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zstore
from tests.engine.bits import Case, Run
from tests.engine.fake_device import FakeDevice
from tests.engine.models import batch, make_net
from tests.engine.runs import make_config, start, state_of, step
from zstore.engine import Engine
from zstore.engine.access.offloading import STATES
from zstore.errors import BudgetError, UsageError
from zstore.io import resident_bytes
from zstore.testing.ranks import run_ranks

BIG = {"vocab": 3001, "width": 48}


class Named(Enum):
    OPTIM = "optim_states"
    CPU = "cpu"


def tiers(engine: Engine) -> dict[str, str]:
    store = engine.training_state.state.store
    return {name: store.tier(name).name for name in store.names()}


def parameter_bytes(engine: Engine) -> int:
    records = engine.training_state.state.records
    storages = {t.untyped_storage() for r in records for t in (r.full, r.shard) if t is not None}
    return sum(storage.nbytes() for storage in {s.data_ptr(): s for s in storages}.values())


SETUPS = [
    (Case(0, "none", "fp32", 1, 0.0, seed=1), "cpu"),
    (Case(1, "cpu", "bf16", 1, 0.0, seed=1), "cpu"),
    (Case(2, "nvme", "bf16", 1, 0.0, seed=1), "nvme"),
    (Case(3, "none", "bf16", 1, 0.0, seed=1), "cpu"),
    (Case(3, "nvme", "bf16", 2, 0.0, seed=1, parameters="cpu"), "nvme"),
    (Case(3, "cpu", "bf16", 1, 0.0, seed=1, parameters="cpu", overlap="forward"), "cpu"),
]


def check(rank: int, world_size: int, setups: list[tuple[Case, str]]) -> None:
    for case, device in setups:
        with Run(case, rank, world_size) as run:
            engine = run.engine
            before, held = tiers(engine), parameter_bytes(engine)
            assert run.step() == []
            engine.offload_states(device=device)
            away = tiers(engine)
            lower = {"cpu": ("host", "disk"), "nvme": ("disk",)}[device]
            large = [name for name in away if engine.training_state.state.store.local(name).nbytes >= 64 * 1024]
            adopted = [name for name in large if name.startswith("model/") and f"offloaded/{name[6:]}" in away]
            assert {away[name] for name in large if name not in adopted} <= set(lower)
            assert large
            records = engine.training_state.state.records
            padding = sum(r.state_grid.shard_numel * r.dtype.itemsize for r in records if not r.owned_numel)
            assert parameter_bytes(engine) <= 8 * len(records) + padding  # of each the one NaN
            assert engine.statistics().held.gradients == 0
            refuse_everything(run)
            engine.reload_states()
            assert (tiers(engine), parameter_bytes(engine)) == (before, held)
            engine.reload_states()
            assert run.step() + run.differences() == []


def refuse_everything(run: Run) -> None:
    engine = run.engine
    for call in (
        lambda: engine(*run.batches()[0][0]),
        engine.step,
        lambda: engine.save_checkpoint("nowhere"),
        lambda: engine.load_checkpoint("nowhere"),
        lambda: engine.get_full_parameter("norm.weight"),
        lambda: zstore.gather(engine.module).__enter__(),
        lambda: engine.save_16bit_model("nowhere"),
    ):
        with pytest.raises(UsageError, match=r"offloaded by offload_states\(\): call engine.reload_states\(\) first"):
            call()


@pytest.mark.parametrize(("world_size", "setups"), [(1, SETUPS), (2, SETUPS[2:5])], ids=["1", "2"])
def test_states_come_back_with_the_same_bits(world_size: int, setups: list[tuple[Case, str]]) -> None:
    run_ranks(check, world_size, world_size, setups)


@pytest.mark.parametrize("setup", [(0, "none"), (3, "cpu", "cpu")])
def test_states_moved_in_inference_mode_can_be_trained(setup: tuple[Any, ...], nvme: Path) -> None:
    with start(make_config(*setup[:2], nvme, *setup[2:]), make_net()) as engine:
        step(engine)
        with torch.inference_mode():
            engine.offload_states()
            engine.reload_states()
        with zstore.gather(engine.module, modifier_rank=0), torch.no_grad():
            next(engine.module.parameters()).mul_(0.5)
        step(engine)


def test_a_device_is_emptied(nvme: Path) -> None:
    for setup, keys in (((1, "none"), {}), ((3, "cpu", "cpu"), {}), ((0, "none"), {"bf16": {"enabled": False}})):
        config = make_config(*setup[:2], nvme, *setup[2:], **keys)
        with FakeDevice() as device, start(config, make_net(), _streams=device) as engine:
            step(engine)
            expected = state_of(engine)
            engine.offload_states()
            found = engine.statistics().store
            assert parameter_bytes(engine) < 200  # of each the one NaN
            assert {tier for n, tier in tiers(engine).items() if n.startswith(("optimizer/", "offloaded/"))} == {"host"}
            assert found.host_bytes > 0
            engine.reload_states()
            assert state_of(engine) == expected
            step(engine)
            assert device.num_under_way == 0


def test_the_process_gives_its_memory_back(nvme: Path) -> None:
    config = make_config(2, "cpu", nvme, gradient_accumulation_steps=1)
    offload = {"device": "nvme", "nvme_path": str(nvme), "max_in_cpu": 10**9}
    config["zero_optimization"] |= {"stage": 3, "offload_param": offload}
    with start(config, nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(6)])) as engine:
        engine.backward(engine(torch.ones(1, 1024, dtype=torch.bfloat16)).float().mean())
        engine.step()
        for _ in range(2):  # the first takes the store's buffers into use
            engine.reload_states()
            before = resident_bytes()
            engine.offload_states(device="nvme")
        given_back = before - resident_bytes()
        held = 6 * 1024 * 1024 * 14
        assert given_back > 0.8 * held, (given_back, held)
        engine.reload_states()


def test_a_part_may_go_and_the_model_still_answers(nvme: Path) -> None:
    with start(make_config(1, "none", nvme), make_net()) as engine:
        step(engine)
        ids = batch(0, 0, 0)
        with torch.no_grad():
            expected = engine(*ids)
            engine.offload_states(include=[Named.OPTIM, "hp_params", "lp_grads"], device=Named.CPU)
            assert {tier for name, tier in tiers(engine).items() if name.startswith("optimizer/")} == {"host"}
            assert engine(*ids) == expected
        for call in (lambda: engine.backward(engine(*ids)), lambda: engine(*ids).backward()):
            with pytest.raises(UsageError, match=r"hp_params, lp_grads, optim_states are offloaded"):
                call()
        engine.offload_states(["lp_params"])
        with pytest.raises(UsageError, match="lp_params are offloaded"):
            engine(*ids)
        engine.reload_states()
        assert engine(*ids) == expected
        step(engine)


def test_bad_calls_are_named_and_move_nothing(nvme: Path) -> None:
    with start(make_config(1, "none", nvme), make_net()) as engine:
        before = tiers(engine)
        for arguments, message in (
            ({"include": ["weights"]}, f"expected names from {', '.join(STATES)}, got 'weights'"),
            ({"device": "disk"}, 'expected "cpu" or "nvme"'),
            ({"device": "nvme"}, "the config names no drive"),
        ):
            with pytest.raises(UsageError, match=message):
                engine.offload_states(**arguments)
        engine.backward(engine(*batch(0, 0, 0)))
        engine.step()
        with pytest.raises(UsageError, match="in the middle of a step"):
            engine.offload_states()
        assert tiers(engine) == before
    with start(make_config(3, "none", nvme, zstore={"host_budget_bytes": 2_300_000}), make_net(**BIG)) as engine:
        step(engine)
        before, expected = tiers(engine), state_of(engine)
        with pytest.raises(BudgetError):
            engine.offload_states()
        assert tiers(engine) == before
        assert state_of(engine) == expected
        step(engine)
