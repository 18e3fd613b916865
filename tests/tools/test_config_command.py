"""`zstore config`: what it says of each key, of problems, and of what is left open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools.commands import run
from zstore.engine.config.config import load_config
from zstore.tools.config import config_command

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.json"))


def told(capsys: pytest.CaptureFixture[str], path: Path, code: int, **options: Any) -> dict[str, Any]:
    assert config_command(path, json=True, **options) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["sound"] == (code == 0)
    return found


def write(tmp_path: Path, config: dict[str, Any]) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_key_of_a_common_config_is_explained(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, path, 0, hidden_size=64)
    statuses = {fact["key"]: fact["status"] for fact in found["keys"]}
    assert all(fact["text"] for fact in found["keys"])
    for notice in load_config(path).notices:
        if ":" in notice.message and notice.key in statuses:
            assert statuses[notice.key] == notice.message.partition(":")[0]
    assert {key for key, value in found["resolved"].items() if value == "auto"} == set()


def test_what_a_key_becomes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path,
        {
            "train_batch_size": 8, "bfloat16": {"enabled": True}, "gradient_clipping": None,
            "zero_optimization": {"stage": 1, "cpu_offload": True, "sub_group_size": 5, "round_robin_gradients": False},
            "prescale_gradients": True, "amp": {"enabled": False}, "fp16": {"enabled": False, "loss_scale": 4},
            "autotuning": {"enabled": True}, "zstore": {"storage_options": {"key": "secret"}},
        },
    )  # fmt: skip
    found = told(capsys, path, 0, world_size=4)
    facts = {fact["key"]: fact for fact in found["keys"]}
    assert {key: fact["status"] for key, fact in facts.items()} == {
        "train_batch_size": "acts", "bfloat16.enabled": "acts",
        "zero_optimization.stage": "acts", "zero_optimization.offload_optimizer.device": "acts",
        "zero_optimization.sub_group_size": "no effect", "zero_optimization.round_robin_gradients": "no effect",
        "prescale_gradients": "not built", "amp": "no effect", "fp16.enabled": "acts", "fp16.loss_scale": "no effect",
        "autotuning": "no effect", "zstore.storage_options": "acts",
    }  # fmt: skip
    assert facts["fp16.loss_scale"]["text"] == "enabled turns the section off"
    assert "secret" not in json.dumps(found)
    assert found["resolved"]["train_micro_batch_size_per_gpu"] == 2
    assert found["resolved"]["precision"] == "bf16"


def test_all_problems_come_at_once_with_the_key_that_is_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(
        tmp_path, {"train_batch": 8, "optimizer": {"type": "Adam", "params": {"lrr": 1}}, "pipeline": {"x": 1}}
    )
    found = told(capsys, path, 1)
    assert {fact["key"]: fact["status"] for fact in found["keys"]} == {
        "train_batch": "error", "optimizer.type": "acts", "optimizer.params.lrr": "error", "pipeline": "refused",
    }  # fmt: skip
    assert len(found["problems"]) == 3
    assert any("did you mean optimizer.params.lr?" in problem for problem in found["problems"])
    path = write(tmp_path, {"train_batch_size": 6})
    assert "6 is not a multiple" in told(capsys, path, 1, world_size=4)["problems"][0]


def test_what_only_a_script_knows_is_left_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_max_lr": "auto"}}
    path = write(tmp_path, {"train_micro_batch_size_per_gpu": "auto", "scheduler": schedule})
    found = told(capsys, path, 0)
    assert found["open"] == [
        "gradient_accumulation_steps", "scheduler.params.total_num_steps", "train_batch_size",
        "train_micro_batch_size_per_gpu",
    ]  # fmt: skip
    assert set(found["open"]) & set(found["resolved"]) == set()


def test_the_command(tmp_path: Path) -> None:
    path = write(tmp_path, {"train_batch_size": 8, "seeds": 1})
    done = run("config", str(path))
    assert done.returncode == 1
    assert "2 keys: 1 error, 1 acts" in done.stdout
    assert "problem: seeds: unknown key; did you mean seed?" in done.stderr
