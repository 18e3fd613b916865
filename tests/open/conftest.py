"""Stores."""

from pathlib import Path
from typing import Any

import pytest

import zstore


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with zstore.open_store(tmp_path / "run", host_budget_bytes=64e6) as opened:
        yield opened
