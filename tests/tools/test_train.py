"""`zstore train`: steps, metrics, saves and resumes, as a user gets them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests import warm
from tests.tools.train_runs import config_file, options, rows
from tests.waiting import until
from zstore.checkpoint.reader import open_checkpoint
from zstore.errors import (
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigError,
    UsageError,
)
from zstore.tools.consolidate import consolidate_command
from zstore.tools.train import train_command

FIELDS = (
    "step", "loss", "lr", "grad_norm", "tokens_per_s", "step_s", "disk_read_bytes", "disk_write_bytes", "peak_memory_bytes",
)  # fmt: skip


def zstore(*words: object, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "zstore", *map(str, words)]
    return warm.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)


def test_a_resumed_run_repeats_the_uninterrupted_one_to_the_bit(tmp_path: Path, text: Path) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    offload = {"device": "nvme", "nvme_path": str(nvme)}
    disk = config_file(tmp_path, zero_optimization={"stage": 2, "offload_optimizer": offload})
    whole, again = tmp_path / "whole.jsonl", tmp_path / "again.jsonl"
    train_command(options(tmp_path, text, disk, save=tmp_path / "run", save_every=2, metrics=whole, seed=3))
    train_command(options(tmp_path, text, disk, resume=f"{tmp_path}/run@step-00000002", metrics=again, seq_len=None))
    first, second = rows(whole), rows(again)
    assert [row["step"] for row in first] == [1, 2, 3, 4]
    assert [row["step"] for row in second] == [3, 4]
    for name in ("loss", "lr", "grad_norm"):
        assert [row[name] for row in first[2:]] == [row[name] for row in second]
    assert all(tuple(row) == FIELDS for row in first)
    assert first[1]["disk_read_bytes"] > 0 < first[1]["disk_write_bytes"]
    assert first[0]["peak_memory_bytes"] > 10**8


def test_a_killed_run_that_saves_each_step_goes_on(tmp_path: Path, text: Path) -> None:
    (tmp_path / "nvme").mkdir()
    offload = {"device": "nvme", "nvme_path": str(tmp_path / "nvme")}
    zero = {"zero_optimization": {"stage": 2, "offload_optimizer": offload}}
    whole, again = tmp_path / "whole.jsonl", tmp_path / "again.jsonl"
    config = config_file(tmp_path, **zero, zstore={"keep": 1})
    words = ["--config", config, "--data", text, "--model", "gpt-tiny", "--steps", 10**6, "--seq-len", 16]
    words += ["--save", tmp_path / "run", "--save-every", 1, "--metrics", tmp_path / "killed.jsonl"]
    with warm.Popen([sys.executable, "-m", "zstore", "train", *map(str, words)]) as process:
        path = tmp_path / "killed.jsonl"

        def three_steps() -> bool:
            assert process.poll() is None
            return path.exists() and path.read_text().count("\n") >= 3

        until(three_steps)
        process.kill()
    finished = path.read_text().count("\n")
    resumed = {"save": tmp_path / "run", "resume": "auto", "metrics": again, "seq_len": None}
    train_command(options(tmp_path, text, config, **resumed, steps=finished + 2))
    train_command(options(tmp_path, text, config_file(tmp_path, **zero), metrics=whole, steps=finished + 2))
    # It goes on after the last step, or one before it whose save was under way.
    assert finished - 1 <= rows(again)[0]["step"] <= finished + 2
    for name in ("step", "loss", "lr", "grad_norm"):
        assert [row[name] for row in rows(whole)][-len(rows(again)) :] == [row[name] for row in rows(again)]


def test_two_processes_and_one_see_the_same_batches(tmp_path: Path, text: Path) -> None:
    config = config_file(tmp_path, zero_optimization={"stage": 3})
    arguments = ["--config", config, "--data", text, "--model", "gpt-tiny", "--seq-len", 16]
    done = zstore("train", *arguments, "--steps", 4, "--save", tmp_path / "run", "--save-every", 2, "--nproc", 2,
                  "--metrics", tmp_path / "two.jsonl")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the save stalled") == 2
    train_command(
        options(tmp_path, text, config, resume=f"{tmp_path / 'run'}@step-00000002", metrics=tmp_path / "one.jsonl")
    )
    two, one = rows(tmp_path / "two.jsonl"), rows(tmp_path / "one.jsonl")
    assert [row["loss"] for row in one] == pytest.approx([row["loss"] for row in two[2:]], abs=0.02)
    assert open_checkpoint(tmp_path / "run").record.world_size == 2


def test_a_failure_on_every_rank_names_each(tmp_path: Path, text: Path) -> None:
    offload = {"device": "nvme", "nvme_path": str(text / "none")}
    config = config_file(tmp_path, zero_optimization={"stage": 3, "offload_optimizer": offload})
    done = zstore("train", "--config", config, "--data", text, "--model", "gpt-tiny", "--steps", 1, "--nproc", 2)
    assert done.returncode == 1
    what = f"nvme_path: expected a folder, or one that can be created: Not a directory (path={text / 'none'})"
    *said, last = done.stderr.splitlines()
    assert sorted(said) == [f"zstore: rank {rank}: {what}" for rank in (0, 1)]
    assert last.endswith("failed with exit code 1 (the first to fail); see its output above")


def test_a_second_run_does_not_replace_the_checkpoints_of_the_first(tmp_path: Path, text: Path) -> None:
    config, metrics, run = config_file(tmp_path), tmp_path / "m.jsonl", tmp_path / "run"
    train_command(options(tmp_path, text, config, save=str(run), save_every=2))
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(CheckpointExistsError, match=r"step-00000004 from another run.*--resume auto.*prune"):
        train_command(options(tmp_path, text, config, save=str(run), metrics=metrics))
    assert not metrics.exists()  # nothing was trained
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    # A run may go back and write its own again.
    train_command(options(tmp_path, text, config, save=str(run), resume=f"{run}@step-00000002"))
    assert sorted(path.name for path in run.glob("step-*")) == ["step-00000002", "step-00000004"]


def test_a_transformers_config_trains(tmp_path: Path, text: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
    (folder / "config.json").write_text(json.dumps(config))
    metrics, run = tmp_path / "m.jsonl", tmp_path / "run"
    more = {"model": str(folder), "metrics": metrics, "steps": 8, "save": run}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    train_command(options(tmp_path, text, config_file(tmp_path, optimizer=optimizer, scheduler=None), **more))
    assert rows(metrics)[-1]["loss"] < rows(metrics)[0]["loss"] < 6
    assert consolidate_command(run, tmp_path / "weights", "fp32", 10**9) in (0, None)
    (tmp_path / "weights/config.json").write_text((folder / "config.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    with open_checkpoint(run) as reader:
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.detach(), torch.from_numpy(reader.read_array(f"model/{name}"))), name


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"resume": "auto"}, UsageError, "--save DIR"),
        ({"resume": "/nowhere"}, CheckpointNotFoundError, "/nowhere"),
        ({"config": Path("/nowhere.json")}, ConfigError, "/nowhere.json"),
        ({"model": "gpt-smal"}, ConfigError, "gpt-small"),
        ({"seq_len": 10**6}, ConfigError, "--seq-len"),
    ],
)
def test_wrong_options_are_told_before_anything_is_made(
    tmp_path: Path, text: Path, more: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train_command(options(tmp_path, text, **({"config": config_file(tmp_path), "save": None} | more)))
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_refuses_another_order_of_data(tmp_path: Path, text: Path) -> None:
    config = config_file(tmp_path)
    train_command(options(tmp_path, text, config, save=tmp_path / "run", steps=1, seed=1))
    for more in ({"seed": 2, "seq_len": None}, {"seq_len": 32}):
        with pytest.raises(CheckpointMismatchError, match="order of its data"):
            train_command(options(tmp_path, text, config, resume=str(tmp_path / "run"), **more))
