"""Settings that all tests share."""

import os
from pathlib import Path

# Two workers on two cores: torch's threads would spin against each other. Before torch is imported, and for every child.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("zstore.testing.contract")

# No deadline: a busy machine is no bug.
settings.register_profile("zstore", deadline=None)
settings.load_profile("zstore")


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    """A folder for the disk tier."""
    path = tmp_path / "nvme"
    path.mkdir()
    return path
