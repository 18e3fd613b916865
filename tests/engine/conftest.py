"""Fixtures of tests of the engine."""

from pathlib import Path

import pytest


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    """A folder for the disk tier."""
    path = tmp_path / "nvme"
    path.mkdir()
    return path
