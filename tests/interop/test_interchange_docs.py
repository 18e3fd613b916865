"""The examples in docs/dcp.md and docs/convert.md are run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import zstore.dcp
from zstore.tools.cli import app

DOCS = Path(__file__).parents[2] / "docs"
alone = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


def run(line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        app(shlex.split(line)[1:])
    assert ended.value.code in (0, None)


@alone
def test_the_example_of_dcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("dcp.md", "python")
    exec(block, {})
    for line in ("zstore inspect ckpt", "zstore verify ckpt", "zstore consolidate ckpt out"):
        assert f"`{line}`" in (DOCS / "dcp.md").read_text()
        run(line)
    assert load_file("out/model.safetensors")["weight"].shape == (4, 16)


@alone
def test_the_examples_of_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weight = torch.randn(100, 30)
    dcp.save({"model": {"w": weight}, "step": 30}, checkpoint_id="theirs/step-30", no_dist=True)
    (block,) = blocks("convert.md", "bash")
    for line in block.splitlines():
        run(line)
    assert torch.equal(torch.load("model.pt", weights_only=True)["w"], weight)
    assert torch.equal(load_file("hf/model.safetensors")["w"], weight.bfloat16())
    target = {"model": {"w": torch.zeros(100, 30)}, "step": 0}
    dcp.load(target, storage_reader=zstore.dcp.Reader("again"), no_dist=True)
    assert target["step"] == 30
    assert torch.equal(target["model"]["w"], weight)
