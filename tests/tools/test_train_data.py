"""What `zstore train` reads, evaluates on and resumes from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import zstore
from tests.tools.train_runs import config_file, options, rows
from zstore.checkpoint.reader import open_checkpoint
from zstore.errors import CheckpointMismatchError, ConfigError, UsageError
from zstore.journal.reader import read
from zstore.testing.ranks import run_ranks
from zstore.tools.sample.corpus import open_data, validation_samples
from zstore.tools.sample.models import build_model
from zstore.tools.train.command import train_command

torch.set_num_threads(1)


def test_a_run_evaluates_without_changing_a_bit(text: Path, tmp_path: Path) -> None:
    config = config_file(tmp_path, zstore={"keep": {"last": 1, "best": "eval_loss:min"}}, csv_monitor={
        "enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "run"})  # fmt: skip
    plain = config_file(tmp_path / "..", csv_monitor={"enabled": False})
    other_text = tmp_path / "other.txt"
    other_text.write_text("what the run does not read " * 40)
    given = {"steps": 6, "seq_len": 24, "micro_batch": 2, "validation": other_text, "eval_samples": 5}
    run = tmp_path / "run"
    train_command(
        options(tmp_path, text, config, save=run, save_every=2, eval_every=2, metrics=tmp_path / "m", **given)
    )
    without = {"steps": 6, "seq_len": 24, "micro_batch": 2, "metrics": tmp_path / "n"}
    train_command(options(tmp_path, text, plain, **without))
    evaluated, other = rows(tmp_path / "m"), rows(tmp_path / "n")
    assert [row["loss"] for row in evaluated] == [row["loss"] for row in other]
    assert [row["step"] for row in evaluated if "eval_loss" in row] == [2, 4, 6]
    assert evaluated[-1]["perplexity"] == pytest.approx(math.exp(evaluated[-1]["eval_loss"]))
    with open_checkpoint(run) as reader:
        assert reader.record.state["metrics"]["eval_loss"] == evaluated[-1]["eval_loss"]
    told = [record["loss"] for record in read(run) if record["kind"] == "eval"]
    assert told == [row["eval_loss"] for row in evaluated if "eval_loss" in row]
    assert (tmp_path / "csv" / "run" / "Train_Samples_eval_loss.csv").read_text().count("\n") == 4

    model = build_model("gpt-tiny", 24).bfloat16()
    model.load_state_dict(zstore.load_state_dict(run), strict=False)
    samples = validation_samples(open_data(other_text, "gpt-tiny").train, 5, 24)
    with torch.no_grad():
        expected = sum(float(model(ids[None], labels=ids[None])) for ids in samples) / 5
    assert evaluated[-1]["eval_loss"] == pytest.approx(expected, abs=1e-2)


def _resumed(rank: int, words: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    train_command(options(words["path"], words["data"], words["config"], **words["given"]))


def test_two_ranks_go_on_with_the_samples_of_one(text: Path, tmp_path: Path) -> None:
    config = config_file(tmp_path, zero_optimization={"stage": 3})
    given = {"steps": 4, "seq_len": 24, "micro_batch": 1, "validation_split": 0.1, "eval_samples": 3}
    run = tmp_path / "run"
    train_command(options(tmp_path, text, config, save=run, save_every=2, metrics=tmp_path / "m", **given))
    again = given | {
        "resume": f"{run}:step-00000002",
        "metrics": tmp_path / "n",
        "seq_len": None,
        "validation_split": None,
    }
    words = {"path": tmp_path, "data": text, "config": config, "given": again | {"save": tmp_path / "two"}}
    run_ranks(_resumed, 2, words)
    one, two = rows(tmp_path / "m"), rows(tmp_path / "n")
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one[2:]], abs=0.01)
    assert two[-1]["eval_loss"] == pytest.approx(one[-1]["eval_loss"], abs=0.01)
    states = []
    for folder in (run, tmp_path / "two"):
        with open_checkpoint(folder) as reader:
            states.append(reader.record.state["client_state"]["zstore_train"])
    assert states[0] == states[1]
    with pytest.raises(CheckpointMismatchError, match=r"--validation-split 0.2: the checkpoint was trained with 0.1"):
        train_command(options(tmp_path, text, config, **again | {"validation_split": 0.2}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"validation_split": 1.5}, "between 0 and 1"),
        ({"validation_split": 0.1, "validation": Path("x")}, "give one of them"),
        ({"eval_every": 2}, "--eval-every needs"),
    ],
)
def test_what_cannot_be_evaluated_is_told(given: dict[str, Any], message: str, text: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        train_command(options(tmp_path, text, config_file(tmp_path), **given))


def test_a_part_of_plain_text_is_held_out(text: Path) -> None:
    data = open_data(text, "gpt-tiny", validation_split=0.25)
    held = validation_samples(data.validation, 9, 16)  # type: ignore[arg-type]
    end = text.read_bytes()[-(text.stat().st_size // 4) :]
    assert all(bytes(ids.tolist()) in end for ids in held)
    assert data.train.num_bytes == text.stat().st_size - len(end)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_rows_are_not_read_as_text(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"text": "one"}\n')
    with pytest.raises(ConfigError, match=f"{name}: expected plain text, got a file of rows"):
        open_data(tmp_path / name, "gpt-tiny")
