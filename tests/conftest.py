"""Settings that all tests share."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Two workers on two cores: torch's threads would spin against each other. Before torch is imported, and for every child.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a shell runs in the background ignores Ctrl-C, and so do its children: tests that press it would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import settings

from zstore.store import StoreOptions, TensorStore
from zstore.testing.faults import FaultyFiles

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


@pytest.fixture
def files() -> FaultyFiles:
    """File operations that a test may let fail."""
    return FaultyFiles()


@pytest.fixture
def store(tmp_path: Path, files: FaultyFiles) -> Iterator[TensorStore]:
    """A store with a disk tier, whose files may fail until the test is over."""
    with TensorStore(StoreOptions(run_path=tmp_path, num_threads=2), files=files) as store:
        yield store
        files.heal()
