"""Fixtures of tests of the engine."""

from pathlib import Path

import pytest


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    path = tmp_path / "nvme"
    path.mkdir()
    return path
