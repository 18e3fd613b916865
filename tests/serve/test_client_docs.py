"""The examples of `docs/remote.md` that read from a service run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.checkpoint.checkpoints import open_world
from tests.serve.conftest import Serve
from zstore.tools.cli import app
from zstore.tools.consolidate import consolidate_command

TEXT = (Path(__file__).parents[2] / "docs/remote.md").read_text()


def blocks(language: str, section: str, base: str) -> list[str]:
    text = TEXT.partition(f"## {section}\n")[2].partition("\n## ")[0]
    found = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found
    return [block.replace("http://store:8700", base) for block in found]


def test_the_examples_run(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZSTORE_TOKEN", "open-sesame-open")
    values = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    with open_world({"model/0.weight": values}, world_size=2) as world:
        world.save(tmp_path / "run", step=2)
    base = serve(tmp_path / "run", token="open-sesame-open")
    names: dict[str, Any] = {}
    for block in blocks("python", "Reading from a service", base):
        exec(block, names)
    assert np.array_equal(names["rows"], values[10:20])
    assert np.array_equal(names["first"], values[0])
    for line in blocks("bash", "Reading from a service", base)[0].splitlines():
        result = CliRunner().invoke(app, line.split()[1:])
        assert result.exit_code == 0, result.output
    download, resume = blocks("bash", "Weights from a training machine", base)
    subprocess.run(["bash", "-e", "-c", download], check=True, capture_output=True, env=os.environ)
    got = tmp_path / "model.safetensors"
    consolidate_command(tmp_path / "run", tmp_path / "expected", "bf16")
    expected = (tmp_path / "expected" / got.name).read_bytes()
    assert got.read_bytes() == expected
    got.write_bytes(expected[:5000])
    url = download.splitlines()[0]
    subprocess.run(["bash", "-e", "-c", f"{url}\n{resume}"], check=True, capture_output=True, env=os.environ)
    assert got.read_bytes() == expected
