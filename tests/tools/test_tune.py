"""`zstore tune`: what it tries, how trials end, what is left behind, and going on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools.commands import run
from zstore.engine.config.autotuning import AutotuningSection
from zstore.engine.config.config import load_config
from zstore.engine.config.resolve import ResolveContext
from zstore.errors import ConfigError, UsageError
from zstore.tools.tune.options import TuneOptions
from zstore.tools.tune.space import Batch, Candidate, first_candidates, micro_batches, refinements, samples_of, spaces
from zstore.tools.tune.task import make_task, mapped, replaced_config
from zstore.tools.tune.trial import Measured, _failed, measured, trial_config

SCRIPT = Path(__file__).parent.parent / "scripts" / "tuned.py"
FIXED = Batch(samples_per_rank=8, micro_batch=1, accumulation=8)
OPEN = Batch(samples_per_rank=None, micro_batch=1, accumulation=2)
BASE: dict[str, Any] = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}


def section(**keys: Any) -> AutotuningSection:
    return AutotuningSection(**keys)


def candidates(base: dict[str, Any] = BASE, batch: Batch = FIXED, **keys: Any) -> list[Candidate]:
    found = spaces(1, on_gpu=False, has_drive=False)
    return first_candidates(base, batch, section(**keys), found, num_ranks=1, job=None, nvme_path="")


# -- what is tried ------------------------------------------------------------------------------------------------------


def test_micro_batches_keep_the_samples_of_a_step_or_the_limits() -> None:
    assert micro_batches(FIXED, section(), 1) == [1, 2, 4, 8]
    limits = {"min_train_micro_batch_size_per_gpu": 2, "max_train_micro_batch_size_per_gpu": 4}
    assert micro_batches(FIXED, section(**limits), 1) == [1, 2, 4]  # and the config's own
    assert micro_batches(OPEN, section(max_train_batch_size=16), 2) == [1, 2, 4]
    assert micro_batches(Batch(samples_per_rank=6, micro_batch=3, accumulation=2), section(), 1) == [1, 2, 3]
    elastic = Batch(samples_per_rank=8, micro_batch=2, accumulation=4, is_elastic=True)
    assert micro_batches(elastic, section(), 1) == [2]
    assert samples_of(FIXED, 4, section(), 1) == 8
    assert samples_of(OPEN, 4, section(), 2) == 8
    assert samples_of(OPEN, 4, section(min_train_batch_size=64), 2) == 32


def test_candidates_are_sound_configs_of_the_same_batch_in_the_order_asked_for() -> None:
    found = candidates()
    assert {one.space for one in found} == {(0, "none", "none"), (3, "none", "none")}
    assert [one.name for one in found] == [f"z{stage}-mbs{size}" for stage in (0, 3) for size in (4, 2, 1)]
    for one in found:
        batch = load_config(one.config).resolve(ResolveContext(world_size=1)).batch
        assert (batch.train_batch_size, batch.micro_batch_size) == (8, one.micro_batch)
    assert [one.name for one in candidates(tuner_type="gridsearch")][:3] == ["z0-mbs1", "z0-mbs2", "z0-mbs4"]
    shuffled = [one.name for one in candidates(tuner_type="random")]
    assert shuffled == [one.name for one in candidates(tuner_type="random")]
    assert sorted(shuffled) == sorted(one.name for one in found)
    assert shuffled != [one.name for one in found]
    assert len(candidates(num_tuning_micro_batch_sizes=1)) == 2


def test_offload_is_tried_where_there_is_somewhere_to_offload_to() -> None:
    assert len(spaces(1, on_gpu=False, has_drive=False)) == 2
    tiers = {space[1:] for space in spaces(2, on_gpu=True, has_drive=True)}
    assert tiers == {("none", "none"), ("cpu", "none"), ("cpu", "cpu"), ("nvme", "none"), ("nvme", "nvme")}
    assert (1, "cpu", "none") in spaces(2, on_gpu=True, has_drive=False)


def test_the_plan_leaves_out_what_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(BASE | {"autotuning": {"model_info": {"num_params": 6 * 10**6, "hidden_size": 64, "num_layers": 2}}})
    )
    task = make_task(TuneOptions(config=path, script=["train.py", str(path)], memory=300 * 10**6, seq_len=4096))
    every = spaces(1, on_gpu=False, has_drive=False)
    found = first_candidates(
        task.base, task.batch, task.section, every, num_ranks=1, job=task.plan_job, nvme_path=""
    )  # fmt: skip
    fitting, left = [one for one in found if not one.lacking], [one for one in found if one.lacking]
    assert left
    assert max((one.micro_batch for one in fitting), default=0) < min(one.micro_batch for one in left)
    assert found == fitting + left


def test_the_best_is_refined_by_the_modes_that_act_and_by_buckets() -> None:
    def names(ranks: int, **config: Any) -> list[str]:
        best = Candidate(
            name="best", config=BASE | {"gradient_clipping": 0.0} | config, space=(3, "none", "none"), micro_batch=1
        )
        return [one.name for one in refinements(best, ResolveContext(world_size=ranks))]

    assert names(1) == ["best-backward"]
    stage = {"stage": 3}
    assert names(2, zero_optimization=stage) == ["best-forward", "best-backward", "best-bucket5M", "best-bucket50M"]
    assert names(2, zero_optimization=stage, gradient_clipping=1.0)[:2] == ["best-forward", "best-bucket5M"]


# -- trials --------------------------------------------------------------------------------------------------------------


def test_a_trial_writes_nothing_where_the_user_writes(tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": ["/a", "/b"]}
    config = {
        "zero_optimization": {"stage": 3, "offload_optimizer": offload},
        "tensorboard": {"enabled": True},
        "zstore": {"durability": "step", "durability_path": "/steps", "journal": False},
    }
    found = trial_config(config, tmp_path / "one")
    assert found["zstore"]["journal"] == str(tmp_path / "one" / "journal")
    assert found["zstore"]["durability_path"] == str(tmp_path / "one" / "steps")
    assert found["zero_optimization"]["offload_optimizer"]["nvme_path"] == ["/a/zstore-tune-one", "/b/zstore-tune-one"]
    assert "tensorboard" not in found
    assert offload["nvme_path"] == ["/a", "/b"]


def test_a_journal_gives_the_times_once_it_has_all_steps(tmp_path: Path) -> None:
    lines = [{"kind": "start", "at": 1, "run": "r", "parameters": 7}]
    lines += [
        {"kind": "step", "at": 1, "step": step, "step_s": step / 10, "samples": 4, "tokens": 8} for step in (11, 12, 13)
    ]
    assert measured(tmp_path, range(2, 4)) is None
    (tmp_path / "journal-r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = measured(tmp_path, range(2, 4))
    assert found == Measured(status="ok", step_s=(1.2, 1.3), samples=4, tokens=8, parameters=7)
    assert measured(tmp_path, range(2, 5)) is None
    assert found.metric("latency") == -1.25
    assert found.metric("throughput") == 4 / 1.25
    assert found.metric("flops") == 6 * 7 * 8 / 1.25


def test_arguments_of_a_script_follow_the_config(tmp_path: Path) -> None:
    config, other = tmp_path / "ds.json", tmp_path / "new.json"
    assert (
        replaced_config(["--a", "1", f"--deepspeed_config={config}"], config, other)[2] == f"--deepspeed_config={other}"
    )
    assert replaced_config(["--deepspeed", str(config)], config, other) == ["--deepspeed", str(other)]
    with pytest.raises(UsageError, match="do not name"):
        replaced_config(["--a", "1"], config, other)
    mappings = {"train_micro_batch_size_per_gpu": "--mbs", "zero_optimization.stage": "--stage", "seed": "--seed"}
    tuned = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
    assert mapped(["--mbs", "1", "--stage=0"], tuned, mappings) == ["--mbs", "4", "--stage=2"]
    assert mapped([], tuned, mappings) == ["--mbs", "4", "--stage", "2"]


def test_what_cannot_be_tuned_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(BASE | {"autotuning": {"start_profile_step": 6}}))
    with pytest.raises(UsageError, match="--model M, or a script"):
        TuneOptions(config=path)
    with pytest.raises(ConfigError, match="at least start_profile_step 6, got 5"):
        make_task(TuneOptions(config=path, model="gpt-tiny"))


# -- the command ---------------------------------------------------------------------------------------------------------


def test_a_script_is_tuned_and_an_interrupted_search_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tuning = {
        "enabled": True, "fast": True, "start_profile_step": 2, "end_profile_step": 4, "tuner_num_trials": 3,
        "num_tuning_micro_batch_sizes": 3, "min_train_micro_batch_size_per_gpu": 4, "tuner_type": "gridsearch",
        "arg_mappings": {"train_micro_batch_size_per_gpu": "--mbs"},
    }  # fmt: skip
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    config = BASE | {"optimizer": optimizer, "autotuning": tuning, "zero_optimization": {"stage": 0}}
    Path("ds.json").write_text(json.dumps(config))
    words = ["tune", "--config", "ds.json", "--repeats", "0", "--json", "--", str(SCRIPT), "--fail-at", "8"]
    done = run(*words, "--mbs", "1", "--deepspeed_config", "ds.json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["best"] == "z0-mbs4"
    statuses = {one["name"]: one["runs"][0]["status"] for one in found["trials"]}
    assert statuses == {"z0-mbs4": "ok", "start": "ok", "z0-mbs8": "out of memory"}
    best = json.loads(Path("autotuning_results/ds_config_optimal.json").read_text())
    assert (best["train_batch_size"], best["train_micro_batch_size_per_gpu"]) == (8, 4)
    assert "autotuning" not in best
    load_config(best)
    command = Path("autotuning_results/cmd_optimal.txt").read_text()
    assert command.startswith("zstore run --nproc 1 ")
    assert "--mbs 4 --deepspeed_config autotuning_results/ds_config_optimal.json" in command
    assert "| z0-mbs8 | out of memory: " in Path("autotuning_results/trials.md").read_text()
    # As if it had been interrupted in the trial of 4 samples.
    (stopped,) = Path("autotuning_exps").glob("z0-mbs4-*")
    (stopped / "result.json").unlink()
    again = run(*words, "--mbs", "1", "--deepspeed_config", "ds.json")
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("(recorded)") == 2
    assert json.loads(again.stdout)["best"] == "z0-mbs4"


def test_a_failed_trial_tells_what_its_rank_said(tmp_path: Path) -> None:
    launcher = "zstore: rank 0 on localhost failed with exit code 1; see its output above"
    for output, last in (
        (f"[rank0]: RuntimeError: boom\n{launcher}\n", "[rank0]: RuntimeError: boom"),
        (launcher, launcher),
    ):
        (tmp_path / "output.log").write_text(output)
        assert _failed(tmp_path, 1).problem.splitlines()[-1] == last
