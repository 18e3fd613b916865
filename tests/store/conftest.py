"""Fixtures of tests of the store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from zstore.store import Store, StoreOptions
from zstore.testing.faults import FaultyFiles


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def store(tmp_path: Path, files: FaultyFiles) -> Iterator[Store]:
    with Store(StoreOptions(run_path=tmp_path, num_threads=2), files=files) as store:
        yield store
        files.heal()
