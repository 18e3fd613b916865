"""The page and the example of `zstore.lightning` are run as they stand there."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from bench import lightning
from tests import warm
from tests.integrations.lightning_runs import quiet
from zstore.checkpoint.reader import tags
from zstore.engine.adapters.lightning.strategy import NAMES
from zstore.testing.ranks import run_ranks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "lightning.md"


def _page(rank: int, folder: str) -> None:
    os.chdir(folder)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with quiet():
        exec(block, {"__name__": "page"})
        exec(block, {"__name__": "page"})  # and once more, from the last checkpoint


def test_the_example_of_the_page(tmp_path: Path) -> None:
    run_ranks(_page, 1, str(tmp_path))
    assert [info.tag for info in tags(tmp_path / "checkpoints")] == ["epoch=1-step=6.ckpt", "last.ckpt"]
    assert [name for name in NAMES if f"`{name}`" not in PAGE.read_text()] == ["zstore"]


def test_lightning_starts_the_ranks_of_the_example(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "lightning_fit.py")
    command = [sys.executable, script, "--devices", "2", "--out", str(tmp_path)]
    told = warm.run(command, capture_output=True, text=True, check=True, timeout=100)
    shown = sorted(re.findall(r"rank \d: \d+ steps, loss 0\.", told.stdout))
    assert shown == ["rank 0: 32 steps, loss 0.", "rank 1: 32 steps, loss 0."]
    # torchrun starts them as well, and all was trained already.
    command[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    told = warm.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert sorted(re.findall(r"rank \d: \d+ steps", told.stdout)) == ["rank 0: 32 steps", "rank 1: 32 steps"]
    assert {info.record.world_size for info in tags(tmp_path / "checkpoints")} == {2}


def _benchmark(rank: int, folder: str) -> None:
    sizes = ["--pairs", "1", "--steps", "2", "--width", "64", "--layers", "2"]
    sys.argv = ["lightning", *sizes, "--path", folder, "--json", f"{folder}/figures.json"]
    lightning.main()


def test_the_benchmark_measures_a_step_and_a_save(tmp_path: Path) -> None:
    run_ranks(_benchmark, 1, str(tmp_path))
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["step"]["ratio"] > 0
    assert 0 < figures["save"]["new_bytes"] < figures["save"]["total_bytes"]
