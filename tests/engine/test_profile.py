"""Operations, utilisation and profiles against formulas written down here and torch's own counter."""

import csv
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import zstore
from tests.engine.bits import engine_digests
from tests.engine.runs import ADAM, make_config, start, step
from zstore.engine import Engine
from zstore.engine.report.statistics import FlopCounter, peak_flops
from zstore.errors import ConfigError
from zstore.journal import read
from zstore.testing.ranks import run_ranks

ROWS, WIDE, NARROW = 6, 32, 8
FORWARD = 2 * 2 * ROWS * WIDE * NARROW  # two products, two operations for each multiply-accumulate

EVALUATION_S = 0.3


class Two(nn.Module):
    """Two layers, of which the first needs no gradient of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(NARROW, WIDE), nn.Linear(WIDE, NARROW)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs.square().mean()


def inputs() -> torch.Tensor:
    return torch.ones(ROWS, NARROW)


def config(**keys: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "optimizer": ADAM,
        "steps_per_print": 0,
    } | keys


def take_step(engine: Engine, *, own: bool = False) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(inputs())
        loss.backward() if own else engine.backward(loss)
        engine.step()


def test_a_linear_layer_and_attention_count_as_by_hand() -> None:
    with FlopCounter() as counter:
        loss = Two()(inputs())
    assert counter.total == FORWARD
    with FlopCounterMode(display=False) as torchs:
        loss = Two()(inputs())
    assert torchs.get_total_flops() == FORWARD
    loss.backward()
    batch, heads, length, width = 2, 3, 16, 4
    query, key, value = (torch.randn(batch, heads, length, width, requires_grad=True) for _ in range(3))
    with FlopCounter() as counter:
        F.scaled_dot_product_attention(query, key, value)
    assert counter.total == 2 * 2 * batch * heads * length * length * width  # scores and values


def test_utilisation_is_in_monitors_journal_and_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zstore.engine.report.statistics.peak_flops", lambda name, precision: 1e9)
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    began_s = 0.0
    with start(config(csv_monitor=monitor, zstore={"journal": str(tmp_path)}), Two()) as engine:
        with torch.no_grad():
            engine(inputs())  # no training
        for own in (True, False, False):
            began_s, before_s = time.perf_counter(), began_s
            engine.eval()
            with torch.no_grad():
                engine(inputs())
                time.sleep(EVALUATION_S)
            engine.train()
            take_step(engine, own=own)
        two_steps_s = time.perf_counter() - before_s
        known = engine.statistics()
    assert known.step_flops == 2 * 3 * FORWARD
    steps = [record for record in read(tmp_path) if record["kind"] == "step"]
    assert steps[0]["mfu"] is None
    assert steps[1]["mfu"] > 0
    # A step lasts from the end of the one before to its own, without the evaluation: longer than its model, shorter than both.
    step_s = known.step_flops / 1e9 / steps[2]["mfu"]
    assert steps[2]["forward_s"] + steps[2]["backward_s"] < step_s < two_steps_s - 2 * EVALUATION_S
    with (tmp_path / "job" / "Train_Samples_mfu.csv").open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    assert [float(value) for _, value in rows] == [one["mfu"] for one in steps[1:]]
    assert known.mfu == steps[-1]["mfu"]


def test_operations_follow_the_trained_share() -> None:
    model = Two()
    model.layers[0].requires_grad_(False)
    with start(config(steps_per_print=100), model) as engine:
        take_step(engine)
        known = engine.statistics()
        trained, whole = WIDE * NARROW + NARROW, 2 * WIDE * NARROW + WIDE + NARROW
        assert known.step_flops == 2 * (2 * FORWARD + FORWARD * trained // whole)
        assert known.mfu is None  # of a CPU


def test_counting_changes_no_bit() -> None:
    found = []
    for journal in (False, "auto"):
        with start(make_config(3, "cpu", zstore={"journal": journal})) as engine:
            for _ in range(2):
                step(engine)
            found.append(engine_digests(engine))
    assert found[0] == found[1]


def test_peaks_of_known_devices() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe", "fp16") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 19.5e12
    assert peak_flops("GeForce 256", "bf16") is None
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") == 156e12
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_log_level_and_throughput(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("zstore")
    caplog.set_level(logger.level, logger.name)  # sets it again at the end
    timers = {"throughput": {"enabled": True}}
    with start(config(log_level="info", timers=timers, steps_per_print=2), Two()) as engine:
        for _ in range(2):
            take_step(engine)
    assert "samples/s, mean of 2 steps" in caplog.text
    caplog.clear()
    with start(config(log_level="error", timers=timers, steps_per_print=1), Two()) as engine:
        take_step(engine)
    assert logger.level == logging.ERROR
    assert not caplog.text
    with pytest.raises(ConfigError, match="log_level"):
        start(config(log_level="loud"), Two())


def _labels(rank: int) -> set[str]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    with zstore.initialize(model=Two(), config=config(zero_optimization=zero))[0] as engine:
        take_step(engine)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
            take_step(engine)
    return {event.name for event in trace.events() if event.name.startswith("zstore::")}


def test_the_phases_have_labels_in_a_trace() -> None:
    units = {f"zstore::{phase} (layers.{n})" for phase in ("unshard", "reshard") for n in (0, 1)}
    for found in run_ranks(_labels, 2):
        assert found >= units | {"zstore::reduce"}
