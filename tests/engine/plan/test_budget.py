"""A host budget and a ratio: what the plan says is what the engine holds and moves, and the bits stay the same."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import zstore
from tests.engine.bits import digest
from tests.engine.models import batch
from tests.engine.plan.budgets import make_config
from zstore.engine import Engine
from zstore.engine.plan import run as placing
from zstore.errors import BudgetError
from zstore.io.hostmemory import GroupMemory, HostMemory
from zstore.io.tensors import as_torch
from zstore.sizes import format_bytes
from zstore.testing.ranks import run_ranks
from zstore.tools.sample.models import build_model

MIB = 1024 * 1024
STEPS = 3


def run(config: dict[str, Any], steps: int = STEPS) -> tuple[Engine, dict[str, str], list[float]]:
    """Train the small GPT; return the closed engine, hashes of its state, and the losses."""
    torch.manual_seed(0)
    engine, *_ = zstore.initialize(model=build_model("gpt-tiny", 16), config=config)
    losses = []
    with engine:
        for step in range(steps):
            for micro in range(engine.gradient_accumulation_steps()):
                ids = batch(step, micro, engine.global_rank)[0] % 256
                loss = engine(ids, labels=ids)
                losses.append(float(loss.detach()))
                engine.backward(loss)
                engine.step()
        training = engine.training_state
        training.update.wait()
        store = training.state.store
        names = [name for record in training.state.records for name in training.state.arrays_of(record)]
        found = {name: digest(as_torch(store.read(name).wait())) for name in names}
        counted = store.statistics()
        plan = training.plan
        assert counted.disk_bytes == plan.held_total.disk
        assert counted.pool_bytes <= plan.held["buffers"].host
        assert counted.host_bytes == sum(
            held.host for kind, held in plan.held.items() if kind not in ("gradients", "buffers")
        )
    return engine, found, losses


def _spilled(engine: Engine) -> int:
    return len(engine.training_state.state.spilled)


@pytest.mark.parametrize(
    ("accumulation", "overlap"),
    [
        pytest.param(1, "backward", marks=pytest.mark.soak),
        (3, "forward"),
        *(
            pytest.param(*rest, marks=pytest.mark.soak)
            for rest in ((1, "none"), (3, "none"), (1, "forward"), (3, "backward"))
        ),
    ],
)
def test_budgets_give_the_same_bits(tmp_path: Path, overlap: str, accumulation: int) -> None:
    def config(budget: int | None, **keys: Any) -> dict[str, Any]:
        clip = 0.0 if overlap == "backward" else 0.5
        budgeted = {} if budget is None else {"host_budget_bytes": budget}
        return make_config(
            str(tmp_path),
            gradient_clipping=clip,
            gradient_accumulation_steps=accumulation,
            zstore={"step_overlap": overlap} | budgeted,
            **keys,
        )

    _, expected, losses = run(config(None))
    traffic = []
    spilled = []
    for budget in (3 * MIB, 6 * MIB, 8 * MIB, 96 * MIB):
        engine, found, found_losses = run(config(budget))
        assert found == expected
        assert found_losses == losses
        plan = engine.training_state.plan
        traffic.append(plan.read_bytes + plan.written_bytes)
        spilled.append(_spilled(engine))
        assert plan.budget_used_bytes <= budget
    assert traffic == sorted(traffic, reverse=True)
    assert traffic[0] > 0
    assert traffic[-1] == 0
    if overlap == "backward" and accumulation == 1:
        assert spilled[0] == 0  # each gradient is used as it comes
    else:
        assert spilled[0] > 0
    assert spilled[-1] == 0


def _two_ranks(rank: int, folder: str) -> list[str]:
    different: list[str] = []
    stage2: dict[str, Any] = {"zero": {"stage": 2, "offload_param": {"device": "none"}}}
    for budget, keys in ((9_600_000, {}), (4_000_000, stage2)):
        _, expected, losses = run(make_config(folder, **keys))
        engine, found, found_losses = run(make_config(folder, zstore={"host_budget_bytes": budget}, **keys))
        assert _spilled(engine) > 0
        different += [name for name in expected if found[name] != expected[name]]
        different += [] if losses == found_losses else ["losses"]
    return different


def test_two_ranks_share_the_budget(tmp_path: Path) -> None:
    assert run_ranks(_two_ranks, 2, str(tmp_path)) == [[], []]


def test_what_is_spilled_is_counted(tmp_path: Path) -> None:
    config = make_config(str(tmp_path), zstore={"host_budget_bytes": 3 * MIB, "step_overlap": "none"})
    torch.manual_seed(0)
    engine, *_ = zstore.initialize(model=build_model("gpt-tiny", 16), config=config)
    with engine:
        moved = []
        for step in range(3):
            engine.training_state.state.store.flush().wait()  # a write of the step before is not counted here
            before = engine.statistics().store
            ids = batch(step, 0, 0)[0] % 256
            engine.backward(engine(ids, labels=ids))
            engine.step()
            engine.training_state.state.store.flush().wait()
            after = engine.statistics().store
            moved.append(
                (after.disk_read_bytes - before.disk_read_bytes, after.disk_write_bytes - before.disk_write_bytes)
            )
        plan = engine.training_state.plan
        assert _spilled(engine) > 0
        assert plan.read_bytes / 2 < moved[-1][0] <= plan.read_bytes
        assert moved[-1][1] == plan.written_bytes


def test_ratio_keeps_a_share_on_the_device(tmp_path: Path) -> None:
    def config(ratio: float) -> dict[str, Any]:
        offload = {"device": "nvme", "ratio": ratio, "nvme_path": str(tmp_path)}
        return make_config(str(tmp_path), zero={"offload_optimizer": offload, "offload_param": {"device": "none"}})

    _, expected, losses = run(config(1.0))
    engine, found, found_losses = run(config(0.3))
    assert (found, found_losses) == (expected, losses)
    held = engine.training_state.plan.held["exp_avg"]
    largest = max(record.numel for record in engine.training_state.trained) * 4
    assert held.device == pytest.approx(0.7 * held.total, abs=largest)
    assert 0 < held.device < held.total


def machine(available: int, limit: int | None = None, total: int = 1 << 40) -> HostMemory:
    """A machine with so many bytes available; `limit`: of the one control group, of which nothing is used."""
    groups = () if limit is None else (GroupMemory(key="1:2", limit_bytes=limit, used_bytes=0),)
    return HostMemory(machine="this", total_bytes=total, machine_available_bytes=available, groups=groups)


@pytest.mark.parametrize(("available", "limit"), [(10 * MIB, None), (1 << 38, 10 * MIB)])
def test_auto_is_a_share_of_what_machine_and_control_group_leave(
    available: int, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "read_host_memory", lambda: machine(available, limit))
    engine, found, losses = run(make_config(str(tmp_path), zstore={"host_budget_bytes": "auto"}), steps=2)
    plan = engine.training_state.plan
    assert plan.settings.budget_bytes == 6 * MIB
    assert 0 < plan.budget_used_bytes <= 6 * MIB
    assert plan.held_total.disk > 0
    _, expected, expected_losses = run(make_config(str(tmp_path), zstore={"host_budget_bytes": 6 * MIB}), steps=2)
    assert (found, losses) == (expected, expected_losses)


def _refused(rank: int, total: int, group_of_each: bool) -> str:
    key = f"1:{rank}" if group_of_each else "1:2"
    group = GroupMemory(key=key, limit_bytes=total, used_bytes=total)
    memory = HostMemory(machine="this", total_bytes=2 * total, machine_available_bytes=0, groups=(group,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placing, "read_host_memory", lambda: memory)
        try:
            torch.manual_seed(0)
            config = make_config(
                "", zero={"stage": 0, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}
            )
            zstore.initialize(model=build_model("gpt-tiny", 16), config=config)[0].close()
        except BudgetError as error:
            return str(error)
    return ""


def test_what_the_hosts_memory_cannot_hold_is_refused_on_every_rank() -> None:
    """What is in use already is the model, so that only sizes count; a rank counts where it shares a group's limit."""
    needed = sum(p.numel() for p in build_model("gpt-tiny", 16).parameters()) * (2 + 2 + 12)
    assert _refused(0, needed, True) == ""
    refusal = _refused(0, needed - 1, True)
    assert f"keeps {format_bytes(needed)} of this rank" in refusal
    assert 'offload_param on "nvme"' in refusal
    assert run_ranks(_refused, 2, needed, True) == ["", ""]
    for text in run_ranks(_refused, 2, needed, False):
        assert f"{format_bytes(2 * needed)} with the ranks beside it" in text
    assert run_ranks(_refused, 2, 2 * needed, False) == ["", ""]


@pytest.mark.parametrize("optimizer", ["cpu", "nvme"])
def test_the_budget_that_an_error_names_is_enough(optimizer: str, tmp_path: Path) -> None:
    """Buffers grow with the budget."""
    config = make_config(str(tmp_path), zero={"offload_optimizer": {"device": optimizer, "nvme_path": str(tmp_path)}})
    with pytest.raises(BudgetError) as raised:
        zstore.initialize(model=build_model("gpt-tiny", 16), config=config | {"zstore": {"host_budget_bytes": 300_000}})
    found = re.search(r"to at least (\d+) for each rank", str(raised.value))
    assert found is not None
    config |= {"zstore": {"host_budget_bytes": int(found[1])}}
    zstore.initialize(model=build_model("gpt-tiny", 16), config=config)[0].close()


def test_the_plan_is_printed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="zstore"):
        run(make_config(str(tmp_path)), steps=1)
    printed = [record.message for record in caplog.records if "where the state is kept" in record.message]
    assert len(printed) == 1
    assert "disk" in printed[0]
    assert "not counted" in printed[0]
