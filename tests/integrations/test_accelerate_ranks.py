"""What loops of Accelerate do with their ranks, beside Accelerate alone."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

import zstore.accelerate
from zstore.errors import RankError, UsageError
from zstore.testing.ranks import run_ranks

SOON_S = 15.0


def _prepared(accelerator: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    return accelerator, *accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))


def _steps(accelerator: Any, model: Any, optimizer: Any, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(2 * number + accelerator.process_index))
        loss = model(inputs).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses


def _save_on_the_main_process(rank: int, folder: str) -> None:
    warnings.simplefilter("default")
    plain = _prepared(accelerate.Accelerator(cpu=True))
    _steps(*plain, range(2))
    if rank == 0:
        plain[0].save_state(os.path.join(folder, "plain"))
    _steps(*plain, range(2, 3))
    ours = _prepared(zstore.accelerate.Accelerator(cpu=True, zstore_config={"zero_optimization": {"stage": 1}}))
    _steps(*ours, range(2))
    started, said = (
        time.monotonic(),
        r"accelerator\.save_state\(\) was called on rank 0 while rank 1 is in .*is_main_process",
    )
    if rank == 0:
        with pytest.raises(UsageError, match=said):
            ours[0].save_state(os.path.join(folder, "ours"))
    else:
        with pytest.raises(RankError, match=said):
            _steps(*ours, range(2, 3))
    assert time.monotonic() - started < SOON_S


def test_every_rank_hears_of_a_save_by_the_main_process_alone(tmp_path: Path) -> None:
    run_ranks(_save_on_the_main_process, 2, os.fspath(tmp_path))
    assert os.listdir(tmp_path) == ["plain"]
