"""The page of the store says what is so, and its examples run with the bits of plain torch."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zstore
from tests import warm
from tests.open.api import PAGE, shown, table
from zstore.io.tensors import as_numpy
from zstore.testing.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    path = EXAMPLES / "tensor_store.py"
    (shown,) = re.findall(r"<!-- example -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown == path.read_text()
    assert len([line for line in shown.splitlines() if line]) <= 20
    ran = warm.run([sys.executable, str(path), str(tmp_path)], capture_output=True, text=True)
    assert ran.stdout == "(128, 1024) 3.5\n{'loss': 1.0} 8 262144.0\n", ran.stderr


def test_the_table_of_the_page_is_made_of_docstrings() -> None:
    assert shown() == table(), "run `python -m tests.open.api`"


def _plain(rank: int, world_size: int, steps: int) -> dict[str, bytes]:
    """The loop of the example with one optimizer of torch whose state is in memory."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)])
    if world_size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(step)).tensor_split(world_size)[rank]
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        found |= {f"model/{name}": parameter, **{f"optimizer/{slot}/{name}": state[slot] for slot in SLOTS}}
    whole = {name: value.full_tensor() if world_size > 1 else value for name, value in found.items()}
    return {name: as_numpy(value).tobytes() for name, value in whole.items()}


SLOTS = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_training_loop_has_the_bits_of_torch(world_size: int, tmp_path: Path) -> None:
    path = EXAMPLES / "store_adamw.py"
    assert len(path.read_text().splitlines()) <= 60
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size), "--standalone"]

    def train(steps: int, *options: str) -> None:
        command = [*(launch if world_size > 1 else [sys.executable]), str(path), "--out", str(tmp_path)]
        ran = warm.run([*command, "--steps", str(steps), *options], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr

    train(2)
    train(4, "--resume", str(tmp_path / "step-2"))
    (expected, *_) = run_ranks(_plain, world_size, world_size, 4)
    with zstore.open_checkpoint(tmp_path / "step-4") as checkpoint:
        assert checkpoint.verify() == []
        assert {name: values.numpy().tobytes() for name, values in checkpoint.items()} == expected
