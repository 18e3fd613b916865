"""Numbers of the journal beside plain PyTorch: the loss of all ranks, time without evaluations, values of a loop's own."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.models import batch, make_net
from tests.engine.runs import make_config, start, step
from zstore.journal import read
from zstore.testing.ranks import run_ranks


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


def test_an_evaluation_is_no_time_of_a_step(tmp_path: Path) -> None:
    marks: list[float] = []
    with start(make_config(zstore={"journal": str(tmp_path)})) as engine:
        step(engine)
        handles = [
            register(lambda *_: marks.append(time.perf_counter()))
            for register in (engine.module.register_forward_pre_hook, engine.module.register_forward_hook)
        ]
        engine.eval_batch(iter([batch(0, 0, 0)] * 40), 40)
        for handle in handles:
            handle.remove()
        engine.train()
        step(engine)
    before, after = of_kind(tmp_path, "step")
    assert after["step_s"] <= after["at"] - before["at"] - (marks[-1] - marks[0]) + 0.001
    assert after["step_s"] >= 0.9 * (after["forward_s"] + after["backward_s"] + after["optimizer_s"]) > 0


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
