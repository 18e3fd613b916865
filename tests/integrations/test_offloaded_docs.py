"""The examples of `docs/offloaded-optimizer.md` run as they are printed, and so do the scripts that it names."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/offloaded-optimizer.md"


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_the_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert len(list(tmp_path.rglob("optimizer.pt"))) == len(list(tmp_path.rglob("step-3"))) == 1


def test_the_plain_loop_trains(tmp_path: Path) -> None:
    ran = warm.run(
        [sys.executable, str(ROOT / "examples/plain_loop.py"), "--out", str(tmp_path)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    losses = [float(line.split()[-1]) for line in ran.stdout.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0] / 2, ran.stdout
    assert (tmp_path / "checkpoint.pt").is_file()


def test_the_loop_of_fsdp2_trains(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    script = [str(ROOT / "examples/fsdp2_offloaded.py"), "--out", str(tmp_path), "--steps", "6"]
    ran = warm.run([*launch, *script], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    first, last = (float(found) for found in re.findall(r"loss ([\d.]+)", str(ran.stdout)))
    assert last < first
