"""The examples of pages that begin with the reader's own engine run as they are printed."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zstore
from zstore.checkpoint import tags

DOCS = Path(__file__).parents[2] / "docs"
CONFIG = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def engine_of(model: nn.Module, **keys: Any) -> zstore.engine.Engine:
    engine: zstore.engine.Engine = zstore.initialize(model=model, config=CONFIG | keys)[0]
    return engine


class Loss(nn.Linear):
    """A model that returns its loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def test_saving(folder: Path) -> None:
    later, _, signal, watched = blocks("saving.md")
    with engine_of(Loss(8, 8)) as engine:
        exec(later, {"engine": engine})
        exec(signal, {"engine": engine})
    assert [info.tag for info in tags(folder / "ckpt")] == ["step-00000000"]
    with engine_of(Loss(8, 8)) as engine:
        exec(watched, {"engine": engine, "batches": [torch.ones(4, 8)] * 2})
        assert engine.global_steps == 2


def test_an_average_of_the_weights() -> None:
    (example,) = blocks("optimizers.md")
    with engine_of(Loss(8, 8)) as engine:
        names: dict[str, Any] = {"engine": engine, "batches": [torch.ones(4, 8)] * 2}
        first = engine.get_full_parameter("weight").clone()
        exec(example, names)
        found, last = names["averaged"].module.weight, engine.get_full_parameter("weight")
        assert not torch.equal(last, first)
        assert (found - last).abs().max() < (first - last).abs().max()


def test_a_checkpointed_block() -> None:
    (example,) = blocks("activations.md")
    names: dict[str, Any] = {"zstore": zstore, "block": nn.Linear(8, 8), "x": torch.ones(4, 8)}
    expected = names["block"](names["x"])
    exec(example, names)
    assert torch.equal(names["x"], expected)


def test_moving_from_deepspeed() -> None:
    moved, loaded = blocks("deepspeed.md")
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 1}},
    }
    Path("ds_config.json").write_text(json.dumps(config))
    names: dict[str, Any] = {"args": Namespace(), "model": Loss(8, 8), "steps": 10}
    exec(moved, names)
    with names["engine"] as engine:
        assert (engine.train_micro_batch_size_per_gpu(), engine.global_steps) == (4, 0)
    config["train_micro_batch_size_per_gpu"] = 4
    config["optimizer"] = CONFIG["optimizer"]
    del config["scheduler"]
    Path("ds_config.json").write_text(json.dumps(config))
    names = {"zstore": zstore, "model": Loss(8, 8)}
    with engine_of(Loss(8, 8)) as engine:
        engine.save_checkpoint("runs/7b", client_state={"epoch": 1})
    exec(loaded, names)
    with names["engine"]:
        assert names["client_state"] == {"epoch": 1}


def test_block_sparse_attention() -> None:
    names: dict[str, Any] = {}
    exec(blocks("models.md")[1], names)
    assert names["mixed"].shape == names["query"].shape
