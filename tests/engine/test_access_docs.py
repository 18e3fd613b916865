"""The examples of `docs/access.md` run as they are printed, on one rank and on two."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from zstore.testing.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs/access.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def _run(rank: int, folder: str, examples: list[str]) -> list[str]:
    os.chdir(folder)
    names: dict[str, Any] = {}
    for example in examples:
        exec(example, names)
    with names["engine"] as engine:
        assert names["largest"] > 0
        master = engine.get_full_parameter("0.weight")
        written = load_file(names["files"][0])["0.weight"]
        assert torch.equal(written, master.to(names["x"].dtype))
        assert engine.global_steps == 3  # load_module_only leaves the counters
    return sorted(names["state"])


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_examples_run(world_size: int, tmp_path: Path) -> None:
    assert len(blocks()) == 9
    whole = ["0.bias", "0.weight", "2.bias", "2.weight"]
    first, *others = run_ranks(_run, world_size, str(tmp_path), blocks())
    assert first == whole
    assert others == [[]] * (world_size - 1)


def test_every_option_is_named() -> None:
    from dataclasses import fields

    from zstore.engine.checkpoint.record import LoadOptions

    assert set(re.findall(r"^\| `(load_\w+|names)=", PAGE.read_text(), re.MULTILINE)) == {
        f.name for f in fields(LoadOptions)
    }
