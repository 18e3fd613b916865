"""Numbers of the journal beside plain PyTorch: the loss of all ranks, time without evaluations, values of a loop's own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.models import batch, make_net
from tests.engine.runs import make_config, start, step
from zstore.journal import read
from zstore.testing.ranks import run_ranks
from zstore.tools.sample.models import build_model


def of_kind(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read(folder) if record["kind"] == kind]


def _train(_rank: int, stage: int, folder: Path, overlap: str) -> list[float]:
    config = make_config(
        stage, "cpu", bf16={"enabled": False}, zstore={"journal": str(folder), "step_overlap": overlap}
    )
    losses = []
    with start(config) as engine:
        for _ in range(3):
            here = []
            for micro in range(2):
                loss = engine(*batch(engine.global_steps, micro, engine.global_rank))
                here.append(loss.item())
                engine.backward(loss)
                engine.step()
            losses.append(sum(here) / 2)
    return losses


@pytest.mark.parametrize(("stage", "overlap"), [(1, "none"), (3, "forward"), (3, "backward")])
def test_the_loss_is_the_mean_over_all_ranks(tmp_path: Path, stage: int, overlap: str) -> None:
    ranks = run_ranks(_train, 2, stage, tmp_path, overlap)
    first = make_net()
    with torch.no_grad():  # the model before any step, on the samples of both ranks
        alone = [first(*batch(0, micro, rank)).item() for rank in range(2) for micro in range(2)]
    found = [record["loss"] for record in of_kind(tmp_path, "step")]
    assert found[0] == pytest.approx(sum(alone) / 4, rel=1e-5)
    assert found == [pytest.approx((one + other) / 2, rel=1e-6) for one, other in zip(*ranks, strict=True)]
    assert found[0] != pytest.approx(ranks[0][0], rel=1e-5)


def _train_spilled(rank: int, folder: Path) -> list[float]:
    """Train with gradients that wait on disk, of which the ranks tell each other before the norm."""
    own = {"journal": str(folder), "host_budget_bytes": 3 * 2**20}
    losses = []
    torch.manual_seed(0)
    with start(make_config(2, "nvme", folder / "nvme", zstore=own), build_model("gpt-tiny", 16)) as engine:
        assert engine.training_state.state.spilled
        for number in range(2):
            here = []
            for micro in range(2):
                ids = batch(number, micro, rank)[0] % 256
                loss = engine(ids, labels=ids)
                here.append(loss.item())
                engine.backward(loss)
                engine.step()
            losses.append(sum(here) / 2)
    return losses


def test_it_is_where_ranks_talk_more_than_once_in_a_step(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    ranks = run_ranks(_train_spilled, 2, tmp_path)
    expected = [pytest.approx((one + other) / 2, rel=1e-6) for one, other in zip(*ranks, strict=True)]
    assert [record["loss"] for record in of_kind(tmp_path, "step")] == expected


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let seconds pass on the clock that durations are taken by."""
    clock, passed = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + passed[0])

    def wait(seconds: float) -> None:
        passed[0] += seconds

    return wait


def _save(_rank: int, folder: Path) -> tuple[int, int]:
    with start(make_config(1, "nvme", folder / "nvme", zstore={"journal": str(folder)})) as engine:
        step(engine)
        engine.save_checkpoint(str(folder / "ckpt"))
        torch.distributed.barrier()
        files = [path.stat() for path in (folder / "ckpt").rglob("c.*")]
        torch.distributed.barrier()  # the names on the drive go with the engine
    return sum(f.st_size for f in files if f.st_nlink > 1), sum(f.st_size for f in files if f.st_nlink == 1)


def test_bytes_of_a_save_are_those_of_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    first, second = run_ranks(_save, 2, tmp_path)
    (committed,) = [record for record in of_kind(tmp_path, "save") if record["state"] == "committed"]
    assert (committed["linked_bytes"], committed["written_bytes"]) == first == second
    assert min(first) > 0


def test_an_evaluation_is_no_time_of_a_step(tmp_path: Path, pass_time: Callable[[float], None]) -> None:
    with start(make_config(zstore={"journal": str(tmp_path)})) as engine:
        step(engine)
        handle = engine.module.register_forward_hook(lambda *_: pass_time(1000.0))
        engine.eval_batch(iter([batch(0, 0, 0)] * 2), 2)
        handle.remove()
        engine.train()
        step(engine)
    _, after = of_kind(tmp_path, "step")
    assert after["step_s"] < 1000
    assert after["step_s"] >= 0.9 * (after["forward_s"] + after["backward_s"] + after["optimizer_s"]) > 0


def test_a_model_that_trains_in_eval_mode_has_its_times(tmp_path: Path, pass_time: Callable[[float], None]) -> None:
    """As some do for the statistics of BatchNorm: with gradients it is no evaluation."""
    with start(make_config(zstore={"journal": str(tmp_path)})) as engine:
        engine.eval()
        engine.module.register_forward_hook(lambda *_: pass_time(1000.0))
        step(engine)
        step(engine)
    (_, after), micro_steps = of_kind(tmp_path, "step"), 2
    assert 1000 * micro_steps <= after["forward_s"] <= after["step_s"]


def test_values_of_a_loops_own_are_in_the_journal(tmp_path: Path) -> None:
    with start(make_config(zstore={"journal": str(tmp_path)})) as engine:
        step(engine)
        engine.log({"accuracy": 0.5, "share": torch.tensor([0.25]), "text": "no number", "many": torch.ones(2)})
        step(engine)
        engine.log({"eval_loss": math.nan, "worst": -math.inf})
        engine.log({"text": "nothing"})
    one, two = of_kind(tmp_path, "metrics")
    assert (one["step"], one["values"]) == (1, {"accuracy": 0.5, "share": 0.25})
    assert (two["step"], two["values"]) == (2, {"eval_loss": None, "worst": None})
    assert two["not_finite"] == {"eval_loss": "nan", "worst": "-inf"}


def test_the_error_that_ended_a_run_is_in_its_end(tmp_path: Path) -> None:
    def train() -> None:
        with start(make_config(zstore={"journal": str(tmp_path)})) as engine:
            step(engine)
            raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        train()
    (end,) = of_kind(tmp_path, "end")
    assert (end["reason"], end["problem"]) == ("failed", "ValueError: bad batch")
