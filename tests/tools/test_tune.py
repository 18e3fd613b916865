"""`zstore tune`: what it tries, in which order, how trials end, and what is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools.commands import run
from zstore.engine.config.config import load_config
from zstore.engine.config.resolve import ResolveContext
from zstore.errors import ConfigError, UsageError
from zstore.tools.run.job import RunJob
from zstore.tools.tune import (
    Measured,
    Search,
    TuneOptions,
    failed,
    mapped,
    measured,
    replaced_config,
    trial_config,
)

SCRIPT = Path(__file__).parent.parent / "scripts" / "tuned.py"
BASE: dict[str, Any] = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
INFO = {"num_params": 6 * 10**6, "hidden_size": 64, "num_layers": 2}


def options(
    tmp_path: Path, base: dict[str, Any] = BASE, more: dict[str, Any] | None = None, **section: Any
) -> TuneOptions:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(base | {"autotuning": {"model_info": INFO, "exps_dir": str(tmp_path / "exps")} | section})
    )
    return TuneOptions(config=path, script=["train.py", str(path)], **(more or {}))


def quick(job: RunJob, folder: Path, steps: range, timeout_s: float) -> Measured:
    """Larger micro-batches are slower, those over 4 have no memory, and the config as it is is the slowest."""
    config = json.loads((folder / "ds_config.json").read_text())
    size, stage = config["train_micro_batch_size_per_gpu"], config["zero_optimization"]["stage"]
    if size > 4:
        return Measured(status="out of memory", problem="no room")
    return Measured(step_s=(size * (1.0 if stage != 1 else 20.0),), samples=8)


def search(asked: TuneOptions) -> Search:
    return Search(asked, lambda line: None, run_one=quick)


# -- what is tried ------------------------------------------------------------------------------------------------------


def test_trials_are_sound_configs_of_the_same_batch_in_the_order_of_the_plan(tmp_path: Path) -> None:
    found = search(options(tmp_path, num_tuning_micro_batch_sizes=4, tuner_early_stopping=9))
    best = found.run()
    # Of one sample a step the plan knows no seconds here: least sharding first, then the largest micro-batch.
    names = [one.name for one in found.trials]
    assert names == ["start", *(f"z{stage}-mbs{size}" for stage in (0, 3) for size in (8, 4, 2, 1))]
    for one in found.trials:
        batch = load_config(one.config).resolve(ResolveContext(world_size=1)).batch
        assert (batch.train_batch_size, batch.micro_batch_size) == (8, one.choice.micro_batch)
        assert "autotuning" not in one.config
    assert best is not None
    assert best.name == "z0-mbs1"
    assert [row[0] for row in found.rows()][:2] == ["z0-mbs1", "z3-mbs1"]


def test_it_stops_after_so_many_trials_or_without_a_better_one(tmp_path: Path) -> None:
    few = search(options(tmp_path, num_tuning_micro_batch_sizes=4, tuner_num_trials=3))
    few.run()
    assert len(few.trials) == 3
    early = search(options(tmp_path, num_tuning_micro_batch_sizes=1, tuner_early_stopping=1))
    assert early.run() == early.trials[0]  # neither stage has the memory for 8 samples
    assert [one.name for one in early.trials] == ["start", "z0-mbs8"]


def test_micro_batches_keep_the_limits_and_grow_the_batch_if_it_is_open(tmp_path: Path) -> None:
    limits = {"min_train_micro_batch_size_per_gpu": 2, "max_train_micro_batch_size_per_gpu": 4}
    assert search(options(tmp_path, **limits))._micro_batches() == [1, 2, 4]  # and the config's own
    open_ = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2}
    found = search(options(tmp_path, open_, max_train_batch_size=16))
    assert [(size, found._samples(size)) for size in found._micro_batches()] == [(1, 2), (2, 4), (4, 8), (8, 16)]


def test_the_plan_leaves_out_what_does_not_fit(tmp_path: Path) -> None:
    asked = options(
        tmp_path, more={"memory": 300 * 10**6, "seq_len": 4096}, model_info=INFO | {"num_params": 6 * 10**6}
    )
    found = search(asked)
    found.run()
    assert found.left_out
    assert not {(one.choice.stage, one.choice.micro_batch) for one in found.left_out} & {
        (one.choice.stage, one.choice.micro_batch) for one in found.trials[1:]
    }
    assert "does not fit: host" in found.rows()[-1][1]


def test_what_cannot_be_tuned_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--model M, or a script"):
        TuneOptions(config=tmp_path)
    with pytest.raises(ConfigError, match="at least start_profile_step 6, got 5"):
        search(options(tmp_path, start_profile_step=6))
    with pytest.raises(UsageError, match="name a model"):
        search(options(tmp_path, model_info={}))


# -- trials --------------------------------------------------------------------------------------------------------------


def test_a_trial_writes_nothing_where_the_user_writes(tmp_path: Path) -> None:
    own = {"durability": "step", "durability_path": "/steps", "journal": False}
    config = {"tensorboard": {"enabled": True}, "zstore": own}
    found = trial_config(config, tmp_path / "one")
    assert found["zstore"]["journal"] == str(tmp_path / "one" / "journal")
    assert found["zstore"]["durability_path"] == str(tmp_path / "one" / "steps")
    assert "tensorboard" not in found
    assert config["zstore"] == own | {"durability_path": "/steps"}


def test_a_journal_gives_the_times_once_it_has_all_steps(tmp_path: Path) -> None:
    lines = [{"kind": "step", "at": 1, "step": step, "step_s": step / 10, "samples": 4} for step in (11, 12, 13)]
    assert measured(tmp_path, range(2, 4)) is None
    (tmp_path / "journal-r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert measured(tmp_path, range(2, 4)) == Measured(step_s=(1.2, 1.3), samples=4)
    assert measured(tmp_path, range(2, 5)) is None


def test_arguments_of_a_script_follow_the_config(tmp_path: Path) -> None:
    config, other = tmp_path / "ds.json", tmp_path / "new.json"
    words = ["--a", "1", f"--deepspeed_config={config}"]
    assert replaced_config(words, config, other)[2] == f"--deepspeed_config={other}"
    assert replaced_config(["--deepspeed", str(config)], config, other) == ["--deepspeed", str(other)]
    with pytest.raises(UsageError, match="do not name"):
        replaced_config(["--a", "1"], config, other)
    mappings = {"train_micro_batch_size_per_gpu": "--mbs", "zero_optimization.stage": "--stage", "seed": "--seed"}
    tuned = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
    assert mapped(["--mbs", "1"], tuned, mappings) == ["--mbs", "1", "--mbs", "4", "--stage", "2"]


def test_a_failed_trial_tells_what_its_rank_said() -> None:
    launcher = "zstore: rank 0 on localhost failed with exit code 1; see its output above"
    found = failed(f"[rank0]: RuntimeError: boom\n{launcher}\n".encode(), 1)
    assert str(found) == "failed: [rank0]: RuntimeError: boom"
    assert failed(b"CUDA out of memory", 1).status == failed(b"", 128 + 9).status == "out of memory"


# -- the command ---------------------------------------------------------------------------------------------------------


def test_a_script_is_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tuning = {
        "enabled": True, "start_profile_step": 2, "end_profile_step": 4, "tuner_num_trials": 3, "model_info": INFO,
        "num_tuning_micro_batch_sizes": 2, "min_train_micro_batch_size_per_gpu": 4,
        "arg_mappings": {"train_micro_batch_size_per_gpu": "--mbs"},
    }  # fmt: skip
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    config = BASE | {"optimizer": optimizer, "autotuning": tuning, "zero_optimization": {"stage": 0}}
    Path("ds.json").write_text(json.dumps(config))
    words = ["tune", "--config", "ds.json", "--json", "--", str(SCRIPT), "--fail-at", "8"]
    done = run(*words, "--mbs", "1", "--deepspeed_config", "ds.json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["best"] == "z0-mbs4"
    results = {one["trial"]: one["result"] for one in found["trials"]}
    assert "samples/s" in results["z0-mbs4"]
    assert "samples/s" in results["start"]
    assert "out of memory" in results["z0-mbs8"]
    best = json.loads(Path("autotuning_results/ds_config_optimal.json").read_text())
    assert load_config(best).resolve(ResolveContext(world_size=1)).batch.train_batch_size == 8
    assert best["train_micro_batch_size_per_gpu"] == 4
    assert "| z0-mbs8 | out of memory: " in Path("autotuning_results/trials.md").read_text()
