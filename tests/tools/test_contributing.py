"""What CONTRIBUTING.md adds works: a tier keeps the contract of tiers, an extra is told of steps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _example(word: str) -> str:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (example,) = (e for e in re.findall(r"<!-- example -->\n```python\n(.*?)```", page, re.DOTALL) if word in e)
    return str(example)


def test_the_extra_is_told_of_steps(tmp_path: Path) -> None:
    file = tmp_path / "count_tokens.py"
    file.write_text(_example("TokenCount"))
    done = subprocess.run(
        [sys.executable, file], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=200
    )
    assert "step 2: 512 tokens" in done.stdout, done.stderr


def test_the_tier_keeps_the_contract(tmp_path: Path) -> None:
    example = _example("TierContract")
    file = tmp_path / "test_mapped.py"
    file.write_text(example)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 30
