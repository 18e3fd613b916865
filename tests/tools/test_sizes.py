"""One checkpoint has one size: `inspect`, `ls`, `prune` and `reshard` give the same number the same name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from tests.checkpoint.checkpoints import save_arrays
from zstore.checkpoint.retention import Keep
from zstore.sizes import format_bytes
from zstore.tools.inspect import inspect_command
from zstore.tools.ls import ls_command
from zstore.tools.opening import Common
from zstore.tools.prune import prune_folder

URL = "memory://bucket/run"
JSON = Common(json=True)
ARRAYS = {"model/w": np.ones((1000, 300), np.float32), "model/b": np.zeros(77, np.float32)}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """Two checkpoints, of which the later one links a file of the first."""
    first = save_arrays(tmp_path / "run", ARRAYS, world_size=2, step=1)
    second = save_arrays(tmp_path / "run", ARRAYS, world_size=2, step=2)
    (second / "model/w/c.0.0").unlink()
    os.link(first / "model/w/c.0.0", second / "model/w/c.0.0")
    memory = fsspec.filesystem("memory")
    yield tmp_path / "run"
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("place", ["folder", "url"])
def test_all_commands_give_one_size(place: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    location: str | Path = run
    if place == "url":
        fsspec.filesystem("memory").put(str(run), "/bucket/run", recursive=True)
        location = URL
    size = bytes_of(run / "step-00000002")
    inspect_command(location, JSON)
    assert told(capsys)["checkpoint"]["size_bytes"] == size
    ls_command(location, JSON)
    assert told(capsys)["checkpoints"][1]["size_bytes"] == size
    prune_folder(location, Keep(last=2), dry_run=True, common=JSON)
    assert told(capsys)["checkpoints"][1]["size_bytes"] == size
    # In words, too.
    inspect_command(location)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"  on disk      {format_bytes(size)} in ") for line in lines)
    ls_command(location)
    printed = capsys.readouterr().out
    assert "on disk" in printed.splitlines()[1]
    assert format_bytes(size) in printed
    prune_folder(location, Keep(last=2), dry_run=True)
    assert f"{format_bytes(size)} on disk  keep (last)" in capsys.readouterr().out
