"""The page of the store says what is so, and its example runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests import warm
from tests.open.api import PAGE, shown, table

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    path = EXAMPLES / "tensor_store.py"
    (shown,) = re.findall(r"<!-- example -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown == path.read_text()
    assert len([line for line in shown.splitlines() if line]) <= 20
    ran = warm.run([sys.executable, str(path), str(tmp_path)], capture_output=True, text=True)
    assert ran.stdout == "(128, 1024) 3.5\n{'loss': 1.0} 8 262144.0\n", ran.stderr


def test_the_table_of_the_page_is_made_of_docstrings() -> None:
    assert shown() == table(), "run `python -m tests.open.api`"
