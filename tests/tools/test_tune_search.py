"""The search of `zstore tune`, with trials that are recorded already or that end at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from zstore.tools.run.job import Job
from zstore.tools.tune.command import tune_command
from zstore.tools.tune.options import TuneOptions
from zstore.tools.tune.search import Search
from zstore.tools.tune.task import make_task
from zstore.tools.tune.trial import Measured

BASE: dict[str, Any] = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
GRID = {"tuner_type": "gridsearch", "num_tuning_micro_batch_sizes": 4, "fast": True}


def options(tmp_path: Path, **keys: Any) -> TuneOptions:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(BASE | {"autotuning": GRID | keys}))
    return TuneOptions(config=path, script=["train.py", str(path)], repeats=0)


def quick(job: Job, config: Mapping[str, Any], folder: Path, steps: range, timeout_s: float) -> Measured:
    """Larger micro-batches are slower, and the config as it is the slowest."""
    seconds = config["train_micro_batch_size_per_gpu"] * (1.0 if config["zero_optimization"]["stage"] != 1 else 20.0)
    return Measured(status="ok", step_s=(seconds,), samples=8)


def search(tmp_path: Path, **keys: Any) -> Search:
    found = Search(make_task(options(tmp_path, **keys)), tmp_path / "exps", lambda line: None, run_one=quick)
    found.run()
    return found


def test_it_stops_after_so_many_trials_without_a_better_one(tmp_path: Path) -> None:
    every = [one.candidate.name for one in search(tmp_path).trials]
    assert every[:3] == ["start", "z0-mbs1", "z0-mbs2"]
    assert len(every) == 7  # z0-mbs1 is better than the start, and then 5 in a row are not
    early = search(tmp_path, tuner_early_stopping=2)
    assert [one.candidate.name for one in early.trials] == every[:4]
    assert early.num_run == 0  # they were recorded


def test_to_overwrite_is_to_remove_the_trials_and_begin_anew(tmp_path: Path) -> None:
    assert search(tmp_path).num_run == 7
    (tmp_path / "exps" / "mine").mkdir()
    (of_one_before,) = (tmp_path / "exps").glob("start-*")
    (of_one_before / "mark").touch()
    assert search(tmp_path).num_run == 0
    assert search(tmp_path, overwrite=True).num_run == 7
    assert not (of_one_before / "mark").exists()
    assert (tmp_path / "exps" / "mine").is_dir()  # not a trial's


def test_folders_of_results_and_of_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    search(tmp_path)
    # Their records stand in "exps": the command runs none of them again.
    assert tune_command(options(tmp_path, exps_dir="exps", results_dir="found/here")) == 0
    best = json.loads(Path("found/here/ds_config_optimal.json").read_text())
    assert best["zero_optimization"]["stage"] == 0
    assert not Path("autotuning_exps").exists()
    assert not Path("autotuning_results").exists()
