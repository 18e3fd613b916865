"""The examples of `docs/publish.md` run as they are printed, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.engine.published import in_folder, same
from zstore.engine import Engine
from zstore.tools.cli import app

PAGE = Path(__file__).parents[2] / "docs/publish.md"


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    text = PAGE.read_text().replace("/tmp/", f"{tmp_path}/")
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    engine, served = names["engine"], names["served"]
    assert isinstance(engine, Engine)
    assert isinstance(served, torch.nn.Module)
    assert names["version"] == 3
    engine.save_16bit_model(tmp_path / "whole", dtype="bf16")
    expected = load_file(tmp_path / "whole/model.safetensors")
    assert same(dict(served.state_dict()), expected)
    (command,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    assert CliRunner().invoke(app, command.split()[1:]).exit_code == 0
    assert same(in_folder(tmp_path / "served"), expected)
    engine.close()
    first = load_file(tmp_path / "run/weights/weight_v000001/model.safetensors")["1.weight"]
    bits = first.view(-1).view(torch.int16).numpy().view(np.uint16).copy()
    positions, values = names["positions"], names["values"]
    assert len(positions) == len(values) > 0  # type: ignore[arg-type]
    assert (bits[positions] != values).all()  # type: ignore[index]


@pytest.mark.parametrize("key", ["to", "every", "full_every"])
def test_the_keys_are_on_the_page_of_keys(key: str) -> None:
    assert (
        f"| `{key}` |"
        in (PAGE.parent / "config.md").read_text().partition("## zstore.publish")[2].partition("\n## ")[0]
    )
