"""The examples of `docs/remote.md` run, on an object store in memory in place of S3; those of a service in `tests/serve`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from typer.testing import CliRunner

from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.reader import tags as list_tags
from zstore.remote.bucket import PART_BYTES
from zstore.remote.service import open_folder
from zstore.remote.target import NUM_THREADS
from zstore.tools.cli import app

TEXT = (Path(__file__).parents[2] / "docs/remote.md").read_text().partition("## Reading from a service")[0]
URL = "memory://bucket/run"


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def blocks(language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    return [block.replace("s3://bucket", "memory://bucket") for block in found]


def test_the_examples_run(memory: Any, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    for block in blocks("python"):
        exec(block, names)
    assert [info.tag for info in list_tags(open_folder(URL))] == ["step-00000002", "step-00000004"]
    assert names["rows"].shape == (10, 32)
    assert names["weights"]["0.weight"].dtype == torch.bfloat16
    assert not list((tmp_path / "cache/zstore-uploads").glob("*/step-*"))
    for line in blocks("bash")[0].splitlines():
        result = CliRunner().invoke(app, line.split()[1:])
        assert result.exit_code == 0, result.output
    assert (tmp_path / "weights/model.safetensors").exists()
    with open_checkpoint(open_folder("memory://bucket/four")) as reader:
        assert reader.record.world_size == 4
    # Resuming: the loop again goes on at step 4.
    exec(blocks("python")[0], names)
    assert names["engine"].global_steps == 8
    assert (PART_BYTES, NUM_THREADS) == (8 * 2**20, 4)  # as the text says
    # A local folder is uploaded as the docs say.
    result = CliRunner().invoke(app, ["reshard", "memory://bucket/four", "here", "--world-size", "2"])
    assert result.exit_code == 0, result.output
    assert names["upload_all"](tmp_path / "here", "memory://bucket/again") == ["memory://bucket/again/step-00000004"]
