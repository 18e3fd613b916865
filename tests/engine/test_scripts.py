"""Training scripts as people have them: only the import differs, and calls that no longer belong in the loop are still there.

Each runs as a process of its own, alone or as two ranks under torch's launcher, and is judged by what it prints.
"""

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests import launched
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint

SCRIPTS = Path(__file__).parents[1] / "scripts"
DS_JSON = """\
{
  // left over from the documentation
  "train_batch_size": 8,
  "optimizer": {"type": "Adam", "params": {"lr": 0.003, "betas": [0.9, 0.95]}},
  "scheduler": {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.003, "warmup_num_steps": 4} # short
  },
  "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16},
  "gradient_clipping": 1.0,
  "zero_optimization": %s, /* what varies */
}
"""


@dataclass(frozen=True)
class Output:
    lines: dict[int, list[str]]
    """Of each rank, in order."""
    errors: str

    def losses(self) -> list[float]:
        found = [
            [float(re.findall(r"loss (\S+)", line)[0]) for line in lines if " loss " in f" {line}"]
            for lines in self.lines.values()
        ]
        return [mean(ranks) for ranks in zip(*found, strict=True)]

    def steps(self) -> list[int]:
        return [int(found[1]) for line in self.lines[0] if (found := re.match(r"step (\d+) ", line))]

    def after(self, words: str, rank: int = 0) -> list[str]:
        return [line.removeprefix(words).strip() for line in self.lines[rank] if line.startswith(words)]


def run(script: str, *words: str, world_size: int = 1) -> Output:
    printed, errors = launched.run(SCRIPTS / f"{script}.py", *words, world_size=world_size)
    lines: dict[int, list[str]] = defaultdict(list)
    for line in printed:
        found = re.fullmatch(r"rank (\d+) (.*)", line)
        assert found is not None, line
        lines[int(found[1])].append(found[2])
    assert sorted(lines) == list(range(world_size))
    return Output(dict(lines), errors)


def write_config(folder: Path, zero: Any) -> str:
    path = folder / "ds.json"
    path.write_text(DS_JSON % json.dumps(zero), encoding="utf-8-sig")
    return str(path)


def disk(folder: Path, stage: int) -> dict[str, Any]:
    (folder / "nvme").mkdir(exist_ok=True)
    return {"stage": stage, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder / "nvme")}}


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_script_resumes_where_client_sd_says_at_another_world_size(world_size: int, tmp_path: Path) -> None:
    words = ["--deepspeed", "--deepspeed_config"]
    zero: tuple[Any, Any] = (True, disk(tmp_path, stage=3)) if world_size == 1 else (disk(tmp_path, stage=2), False)
    folder = tmp_path / "ckpt"
    first = [*words, write_config(tmp_path, zero[0]), "--save_dir", str(folder)]
    whole = run("getting_started", *first, world_size=world_size)
    losses = whole.losses()
    assert whole.steps() == list(range(12))
    assert mean(losses[-3:]) < 0.8 * mean(losses[:3])

    names = whole.after("saved ")
    assert [info.tag for info in tags(folder)] == names
    for name in names:
        with open_checkpoint(folder, name) as saved:
            assert verify_checkpoint(saved) == []
            assert saved.record.world_size == world_size

    words += [write_config(tmp_path, zero[1]), "--load_dir", str(folder), "--ckpt_id", names[0]]
    again = run("getting_started", *words, "--save_dir", str(tmp_path / "other"), world_size=3 - world_size)
    assert again.after("resumed at ") == ["4 after 32"]
    assert again.steps() == list(range(4, 12))
    assert again.losses() == pytest.approx(losses[4:], abs=0.02)
    assert [len(ranks) for ranks in again.lines.values()] == [11] * (3 - world_size)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_script_with_an_optimizer_a_scheduler_and_a_loader(world_size: int, tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    words = ["--stage", str(world_size + 1), "--nvme_path", str(tmp_path / "nvme")]
    done = run("finetune", *words, "--save_dir", str(tmp_path / "ckpt"), world_size=world_size)
    assert done.after("has ") == [f"8 batches of {16 // world_size}"]
    losses = done.losses()
    assert mean(losses[-8:]) < mean(losses[:8]) - 0.2
    # A step is two micro-batches; the schedule goes on by one step, once.
    rates = [re.findall(r"lr (\S+) after (\d+)", line)[0] for line in done.lines[0][1:]]
    assert [int(steps) for _, steps in rates] == [(i + 1) // 2 for i in range(32)]
    assert [float(lr) for lr, _ in rates] == pytest.approx([3e-3 * min(1, (1 + (i + 1) // 2) / 4) for i in range(32)])
    assert "remove" not in done.errors

    # The loader goes on in the middle of its second epoch, with the same batches.
    again = run("finetune", "--stage", "1", "--load_dir", str(tmp_path / "ckpt"), world_size=3 - world_size)
    assert again.steps() == list(range(12, 32))
    assert again.losses() == pytest.approx(losses[12:], abs=0.02)


def test_a_second_step_of_ones_own_scheduler_is_answered_once_and_by_one_rank() -> None:
    done = run("finetune", "--leftovers", "--epochs", "1", world_size=2)
    assert re.findall(r"remove (\S+)", done.errors) == ["optimizer.step()", "scheduler.step()"]
    assert "Traceback" not in done.errors


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_script_with_its_own_process_group_builds_its_model_in_shards(world_size: int, tmp_path: Path) -> None:
    done = run("sharded_init", "--nvme_path", str(tmp_path), world_size=world_size)
    assert done.errors.count("nccl") == 1  # asked for, without a device
    losses = done.losses()
    assert done.steps() == list(range(12))
    assert mean(losses[-3:]) < 0.7 * mean(losses[:3])
    for rank in range(world_size):
        assert float(done.after("off by ", rank)[0]) < 0.05  # in bf16
    assert len({done.after("sum ", rank)[0] for rank in range(world_size)}) == 1
    assert list(tmp_path.rglob("*.shard")) == []
