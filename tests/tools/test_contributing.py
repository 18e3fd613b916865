"""What CONTRIBUTING.md adds works: a tier keeps the contract of tiers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests import warm

ROOT = Path(__file__).parents[2]


def _example(word: str) -> str:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (example,) = (e for e in re.findall(r"<!-- example -->\n```python\n(.*?)```", page, re.DOTALL) if word in e)
    return str(example)


def test_the_tier_keeps_the_contract(tmp_path: Path) -> None:
    example = _example("TierContract")
    file = tmp_path / "test_mapped.py"
    file.write_text(example)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider", str(file)]
    done = warm.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 30
