"""Fixtures of tests of the commands."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(400)))
    return path


@pytest.fixture
def memory() -> Iterator[Any]:
    """The file system behind `memory://` URLs, which is empty again after the test."""
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
