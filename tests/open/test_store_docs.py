"""The page of the store says what is so: its example runs, and its table names every method."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from zstore.open.store import Store

PAGE = Path(__file__).parents[2] / "docs" / "store.md"


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (example,) = re.findall(r"<!-- example -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(example, {"__name__": "__main__"})
    assert capsys.readouterr().out == "(128, 1024)\n{'loss': 1.0}\nblock.7/weight (512, 1024)\n"


def test_the_page_names_every_method() -> None:
    methods = {name for name in vars(Store) if not name.startswith("_")} - {"close"}
    assert methods - set(re.findall(r"`(?:name in )?(\w+)[(`]", PAGE.read_text())) == set()
