"""The examples of `docs/checkpoints.md` run as they are printed, and the commands that it names are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.checkpoints import save_arrays
from zstore.tools import cli

PAGE = Path(__file__).parents[2] / "docs/checkpoints.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "model/embed.weight": rng.standard_normal((50, 16)).astype(np.float32),
        "model/head.bias": rng.standard_normal(50).astype(np.float32),
        "optimizer/exp_avg/embed.weight": rng.standard_normal((50, 16)).astype(np.float32),
    }
    save_arrays(tmp_path / "run", arrays, world_size=2, record={"engine": {"groups": [{"lr": 0.1}]}})
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    assert len(blocks()) == 4
    for example in blocks():
        exec(example, names)
    embedding = arrays["model/embed.weight"]
    assert (names["lr"], names["faults"]) == (0.1, [])
    assert np.array_equal(names["rows"], embedding[10:20])
    assert np.array_equal(names["corner"], embedding[-1, ::2])
    assert np.array_equal(names["whole"], embedding)
    assert np.array_equal(names["tensor"].numpy(), embedding)
    assert np.array_equal(names["momentum"], arrays["optimizer/exp_avg/embed.weight"][:4])
    assert torch.equal(names["bias"], torch.from_numpy(arrays["model/head.bias"]).bfloat16())
    assert sorted(names["state"]) == ["embed.weight", "head.bias"]
    assert list(names["heads"]) == ["head.bias"]
    assert names["shape"] == (50, 16)


def test_the_commands_of_the_page_are_there() -> None:
    assert set(re.findall(r"^\| `zstore (\w+) ", PAGE.read_text(), re.MULTILINE)) <= set(cli.COMMANDS)
