"""A plugin of pytest: of the tests that are collected those run that the file CHOSEN names."""

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    chosen = set(Path(os.environ["CHOSEN"]).read_text().splitlines())
    items[:] = [item for item in items if item.nodeid in chosen]
