"""Commands on a URL say what they say of the folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

import zstore
from tests.checkpoint.checkpoints import save_arrays
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.retention import Keep
from zstore.errors import CheckpointNotFoundError
from zstore.remote.service import open_folder
from zstore.tools.consolidate import consolidate_command
from zstore.tools.convert import convert_command
from zstore.tools.diff import diff_command
from zstore.tools.inspect import inspect_command
from zstore.tools.opening import Common
from zstore.tools.prune import prune_folder
from zstore.tools.reshard import reshard_command
from zstore.tools.verify import verify_command

ARRAYS = {"model/w": np.arange(300_000, dtype=np.float32).reshape(1000, 300), "model/b": np.zeros(77, np.float32)}
JSON = Common(json=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_arrays(tmp_path / "run", ARRAYS, world_size=2, step=1)
    save_arrays(tmp_path / "run", ARRAYS | {"model/b": np.ones(77, np.float32)}, world_size=2, step=2)
    return tmp_path / "run"


@pytest.fixture
def url(run: Path) -> Iterator[str]:
    fs = fsspec.filesystem("memory")
    fs.put(str(run), "/bucket/run", recursive=True)
    yield "memory://bucket/run"
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def test_other_softwares_checkpoints_are_not_read_behind_urls(url: str, tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe_file("/bucket/theirs/model.safetensors", b"x")
    theirs, out = "memory://bucket/theirs", tmp_path / "out"
    for call in (
        lambda: inspect_command(theirs),
        lambda: verify_command(theirs),
        lambda: diff_command(url, theirs),
        lambda: consolidate_command(theirs, out, "fp32", 10**9),
        lambda: reshard_command(theirs, out),
        lambda: convert_command(theirs, out),
        lambda: zstore.open_checkpoint(theirs),
        lambda: prune_folder(theirs, Keep()),
    ):
        with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
            call()


@pytest.mark.parametrize("world_size", [None, 3])
def test_a_resharded_checkpoint_that_is_uploaded_is_found_where_json_says(
    world_size: int | None, run: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    to = "memory://bucket/again"
    assert reshard_command(run, to, world_size, common=JSON) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["url"] == f"{to}/step-00000002"
    with open_checkpoint(open_folder(to)) as reader:
        assert reader.record.world_size == (world_size or 2)
    # Where it was in between is of no use to anybody.
    assert "zstore-reshard-" not in printed.err + printed.out
