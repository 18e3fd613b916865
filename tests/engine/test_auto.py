"""A config that says "auto" wherever it may trains at every stage and tier; and what `zstore train` answers to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zstore
from tests.engine.models import make_net
from tests.engine.runs import state_of, step
from tests.tools.train_runs import rows
from zstore.engine import Engine
from zstore.engine.config.config import read_config
from zstore.tools.train.command import train_command
from zstore.tools.train.config import TrainOptions

EVERYTHING = Path(__file__).parents[1] / "configs" / "zero3_nvme_everything.json"
PLACES = [(0, "none"), (1, "cpu"), (2, "none"), (2, "nvme"), (3, "cpu"), (3, "nvme")]


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder for the monitors of the config, of which none calls home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    (tmp_path / "nvme").mkdir()
    return tmp_path


def everything(folder: Path, stage: int, tier: str, **keys: Any) -> dict[str, Any]:
    """The config, with another stage and tier, and a drive that is there."""
    config = read_config(EVERYTHING)
    zero = config["zero_optimization"]
    zero["stage"] = stage
    for name in ("offload_optimizer", "offload_param"):
        zero[name] |= {"device": tier, "nvme_path": str(folder / "nvme")}
    return config | keys


def start(config: Any, **keys: Any) -> Engine:
    return zstore.initialize(model=make_net(), config=config, **keys)[0]


@pytest.mark.parametrize(("stage", "tier"), PLACES)
def test_all_auto_trains_through_initialize(stage: int, tier: str, alone: Path) -> None:
    answers = {"optimizer": {"params": {"lr": 1e-2, "eps": 1e-6}}, "train_micro_batch_size_per_gpu": 2}
    more = {"scheduler.params.warmup_num_steps": 3, "bf16.enabled": True}
    with start(everything(alone, stage, tier), auto=answers | more) as engine:
        for _ in range(2):
            step(engine)
        assert (engine.global_steps, engine.train_batch_size()) == (2, 2)
        assert [engine.optimizer.param_groups[0][name] for name in ("lr", "betas", "eps", "weight_decay")] == [
            pytest.approx(1e-2 * 0.63, rel=0.01),
            (0.9, 0.999),
            1e-6,
            0.0,
        ]
        answered = state_of(engine)
    # The same values, written.
    plain = everything(alone, stage, tier, train_batch_size=2, train_micro_batch_size_per_gpu=2)
    plain |= {"gradient_accumulation_steps": 1, "bf16": {"enabled": True}, "fp16": {"enabled": False}}
    plain["optimizer"] = {
        "type": "AdamW",
        "params": {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.0},
    }
    plain["scheduler"]["params"] = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 3}
    with start(plain) as engine:
        for _ in range(2):
            step(engine)
        assert state_of(engine) == answered


def test_the_command_answers_what_its_options_say(alone: Path) -> None:
    config = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": "auto", "total_num_steps": "auto"},
        },
    }
    path, metrics, text = alone / "ds.json", alone / "m.jsonl", alone / "text.txt"
    path.write_text(json.dumps(config))
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    train_command(
        TrainOptions(config=path, model="gpt-tiny", steps=30, seq_len=4, data=text, metrics=metrics, micro_batch=3)
    )
    # A warm-up of three steps, a tenth; the fall ends with the run.
    rates = [row["lr"] for row in rows(metrics)]
    assert rates[0] == 0.0
    assert max(rates) == rates[3] == pytest.approx(1e-4)
    assert rates[-1] == pytest.approx(1e-4 / 27)
    assert rows(metrics)[0]["tokens_per_s"] * rows(metrics)[0]["step_s"] == pytest.approx(3 * 2 * 4)
