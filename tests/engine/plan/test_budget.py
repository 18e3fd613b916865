"""A host budget and a ratio: what the plan says is what the engine holds and moves, with the same bits; and room on drives."""

import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zstore
from tests.engine.bits import Case, Model, Run, compare
from tests.engine.models import batch
from tests.engine.plan.budgets import make_config
from zstore.engine import Engine
from zstore.engine.plan import run as placing
from zstore.errors import BudgetError, DiskFullError, format_bytes
from zstore.io.machine import GroupMemory, HostMemory
from zstore.testing.ranks import run_ranks
from zstore.tools.sample import build_model

MIB = 1024 * 1024
GPT = Model(partial(build_model, "gpt-tiny", 16), lambda *at: batch(*at)[0] % 256, lambda m, ids: m(ids, labels=ids))
ON_DISK = Case(3, "nvme", "bf16", 1, 0.5, threshold=1000, parameters="nvme")


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
def test_budgets_give_the_same_bits(overlap: str, accumulation: int) -> None:
    traffic, spilled = [], []

    def look(run: Run) -> None:
        plan = run.engine.training_state.plan
        traffic.append(plan.read_bytes + plan.written_bytes)
        spilled.append(_spilled(run.engine))
        assert plan.budget_used_bytes <= run.case.own["host_budget_bytes"]

    for budget in (3 * MIB, 6 * MIB, 8 * MIB, 96 * MIB):
        clip = 0.0 if overlap == "backward" else 0.5
        own = {"host_budget_bytes": budget}
        case = replace(ON_DISK, accumulation=accumulation, clip=clip, overlap=overlap, own=own)
        assert compare(case, 0, 1, model=GPT, end=look) == []
    assert traffic == sorted(traffic, reverse=True)
    assert traffic[0] > 0
    assert traffic[-1] == 0
    if overlap == "backward" and accumulation == 1:
        assert spilled[0] == 0  # each gradient is used as it comes
    else:
        assert spilled[0] > 0
    assert spilled[-1] == 0


def _two_ranks(rank: int) -> list[str]:
    cases = replace(ON_DISK, budget=9_600_000), Case(2, "nvme", "bf16", 1, 0.5, budget=4_000_000)
    return [one for case in cases for one in compare(case, rank, 2, model=GPT)]


def test_two_ranks_share_the_budget() -> None:
    assert run_ranks(_two_ranks, 2) == [[], []]


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


def test_ratio_keeps_a_share_on_the_device() -> None:
    def look(run: Run) -> None:
        held = run.engine.training_state.plan.held["exp_avg"]
        largest = max(record.numel for record in run.engine.training_state.trained) * 4
        assert held.device == pytest.approx(0.7 * held.total, abs=largest)
        assert 0 < held.device < held.total

    case = Case(3, "nvme", "bf16", 1, 0.5, threshold=1000, keys={"offload_optimizer": {"ratio": 0.3}})
    assert compare(case, 0, 1, model=GPT, end=look) == []


def machine(available: int, limit: int | None = None, total: int = 1 << 40) -> HostMemory:
    """A machine with so many bytes available; `limit`: of the one control group, of which nothing is used."""
    groups = () if limit is None else (GroupMemory(key="1:2", limit_bytes=limit, used_bytes=0),)
    return HostMemory(machine="this", total_bytes=total, machine_available_bytes=available, groups=groups)


@pytest.mark.parametrize(("available", "limit"), [(10 * MIB, None), (1 << 38, 10 * MIB)])
def test_auto_is_a_share_of_free_memory(available: int, limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(run: Run) -> None:
        plan = run.engine.training_state.plan
        assert plan.settings.budget_bytes == 6 * MIB
        assert 0 < plan.budget_used_bytes <= 6 * MIB
        assert plan.held_total.disk > 0

    monkeypatch.setattr(placing, "read_host_memory", lambda: machine(available, limit))
    assert compare(replace(ON_DISK, own={"host_budget_bytes": "auto"}), 0, 1, 2, model=GPT, end=look) == []


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
        assert f"{format_bytes(2 * needed)} in all" in text
    assert run_ranks(_refused, 2, 2 * needed, False) == ["", ""]


@pytest.mark.parametrize("optimizer", ["cpu", "nvme"])
def test_the_budget_that_an_error_names_is_enough(optimizer: str, tmp_path: Path) -> None:
    """Buffers grow with the budget."""
    config = make_config(str(tmp_path), zero={"offload_optimizer": {"device": optimizer, "nvme_path": str(tmp_path)}})
    with pytest.raises(BudgetError) as raised:
        zstore.initialize(model=build_model("gpt-tiny", 16), config=config | {"zstore": {"host_budget_bytes": 300_000}})
    found = re.search(r"to at least (\d+) bytes per rank", str(raised.value))
    config |= {"zstore": {"host_budget_bytes": int(found[1])}}
    zstore.initialize(model=build_model("gpt-tiny", 16), config=config)[0].close()


def test_the_plan_is_printed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="zstore"):
        zstore.initialize(model=build_model("gpt-tiny", 16), config=make_config(str(tmp_path)))[0].close()
    printed = [record.message for record in caplog.records if "placement of the state" in record.message]
    assert len(printed) == 1
    assert "disk" in printed[0]
    assert "not counted" in printed[0]


Drives = Callable[[dict[Path, int]], None]


@pytest.fixture
def two_drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Drives]:
    """Two folders that look like two drives to whoever asks; and what sets the bytes free on each."""
    folders = (tmp_path / "one", tmp_path / "two")
    free: dict[Path, int] = {}

    def folder_of(path: Path) -> Path:
        return next(folder for folder in folders if path.is_relative_to(folder))

    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr(placing, "_device_id", lambda path: folders.index(folder_of(path)))
    monkeypatch.setattr(
        "zstore.engine.plan.run.shutil.disk_usage",
        lambda path: SimpleNamespace(free=free.get(folder_of(path), 1 << 40)),
    )
    return (*folders, free.update)


def started(config: dict[str, Any]) -> Engine:
    torch.manual_seed(0)
    return zstore.initialize(model=build_model("gpt-tiny", 16), config=config)[0]


def file_bytes(*folders: Path) -> Counter[Path]:
    return Counter({folder: sum(file.stat().st_size for file in folder.rglob("*.shard")) for folder in folders})


@pytest.mark.parametrize("parameters", ["spread", "apart"])
def test_each_drive_has_to_have_room_for_its_share(parameters: str, two_drives: tuple[Path, Path, Drives]) -> None:
    one, two, set_free = two_drives
    spread = {"device": "nvme", "nvme_path": [str(one), str(two)]}
    apart = {"device": "nvme", "nvme_path": str(two)}
    optimizer, own = (spread, spread) if parameters == "spread" else ({**apart, "nvme_path": str(one)}, apart)
    config = make_config(
        "", zero={"offload_optimizer": optimizer, "offload_param": own}, zstore={"host_budget_bytes": 6 << 20}
    )
    with started(config) as engine:
        needed = file_bytes(one, two)
        assert sum(nbytes for _, nbytes in engine.training_state.plan.files) == needed.total()
    assert min(needed.values()) > 0
    set_free(dict(needed))
    started(config).close()
    for small in (one, two):
        set_free({**needed, small: needed[small] - 1})
        with pytest.raises(DiskFullError, match=f"in {small}, where"):
            started(config)
        set_free({one: 1 << 40, two: 1 << 40, small: needed[small] - 1})
        with pytest.raises(DiskFullError, match="equal share"):
            started(config)
