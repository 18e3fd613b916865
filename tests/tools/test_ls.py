"""`zstore ls`: the checkpoints of a folder, and what each takes and shares."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.checkpoints import save_arrays
from zstore.tools.ls import ls_command
from zstore.tools.opening import Common

ARRAYS = {"model/w": np.ones((1000, 300), np.float32), "model/b": np.zeros(77, np.float32)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints that have the files of `model/w` together, and one of them also with another folder."""
    run = tmp_path / "run"
    first = save_arrays(run, ARRAYS, world_size=2, step=1)
    second = save_arrays(run, ARRAYS, world_size=2, step=2, tag="[best]")
    for shard in ("c.0.0", "c.1.0"):
        (second / "model/w" / shard).unlink()
        os.link(first / "model/w" / shard, second / "model/w" / shard)
    os.link(first / "model/b/c.0", tmp_path / "elsewhere")
    return run


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert ls_command(folder, Common(json=True)) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["checkpoints"]
    return found


def test_json_tells_sizes_and_what_is_shared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = listed(folder, capsys)
    assert [(e["tag"], e["step"], e["world_size"], e["newest"]) for e in (first, second)] == [
        ("step-00000001", 1, 2, False),
        ("[best]", 2, 2, True),
    ]
    for entry in (first, second):
        files = [path for path in Path(entry["path"]).rglob("*") if path.is_file()]
        weights = sum(path.stat().st_size for path in files if path.parent.name == "w" and path.name.startswith("c."))
        assert entry["size_bytes"] == sum(path.stat().st_size for path in files)
        assert entry["shared_bytes"] == weights
        linked = os.stat(Path(entry["path"]) / "model/b/c.0").st_size if entry is first else 0
        assert entry["freed_bytes"] == entry["size_bytes"] - weights - linked
        assert 0 <= entry["age_s"] < 3600


def test_the_table_marks_the_newest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ls_command(folder) == 0
    lines = capsys.readouterr().out.splitlines()
    (newest,) = [line for line in lines if "newest" in line]
    assert "[best]" in newest
    assert "MB" in newest


def test_what_is_no_checkpoint_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = folder / "%5Bbest%5D/zstore.json"
    record.chmod(0o644)
    record.write_text("{}")
    assert ls_command(folder) == 0
    printed = capsys.readouterr()
    assert "%5Bbest%5D is not a checkpoint" in printed.err
    assert "step-00000001" in printed.out
