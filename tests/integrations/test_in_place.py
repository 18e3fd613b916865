"""Gradients and weights that modules of Lightning change in place, beside the same runs without zstore."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from lightning.pytorch.utilities import grad_norm
from torch import nn

from tests.integrations.lightning_runs import Net, fit, make_net, make_trainer
from zstore.lightning import ZstoreStrategy

PLACES = ["whole", "disk"]
APART = ["whole", "masters on disk"]


def _config(where: str, folder: Path) -> dict[str, Any]:
    if where == "whole":
        return {"zero_optimization": {"stage": 0}}
    offload = {"device": "nvme", "nvme_path": str(folder)}
    if where == "masters on disk":
        return {"zero_optimization": {"stage": 2, "offload_optimizer": offload}}
    shards = {"stage": 3, "stage3_param_persistence_threshold": 0}
    return {"zero_optimization": {**shards, "offload_optimizer": offload, "offload_param": offload}}


@pytest.fixture
def group_of_lightning() -> Iterator[None]:
    """Destroy the process group that Lightning's strategy makes, and leaves until the process ends."""
    yield
    torch_dist.destroy_process_group()


class _ClampsItself(Net):
    """Clamps weights after each batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.05, 0.05)


@pytest.mark.usefixtures("group_of_lightning")
@pytest.mark.parametrize("where", APART)
def test_a_module_of_lightning_clamps_weights(where: str, tmp_path: Path) -> None:
    def run(strategy: Any) -> list[float]:
        options = {"max_epochs": 1, "accumulate_grad_batches": 1, "plugins": []}
        trainer = make_trainer(strategy, default_root_dir=tmp_path, **options)
        return fit(trainer, make_net(_ClampsItself, dropout=0.0), 0)

    strategy = ZstoreStrategy(_config(where, tmp_path))
    found = run(strategy)
    strategy.close()
    assert found == pytest.approx(run("auto"), rel=1e-4)


class _Clips(Net):
    """Clips by itself before the step, and logs the norms."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.losses.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))
        self.losses.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.05)))


class _ClipsItself(_Clips):
    """Takes its steps itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        optimizer.step()
        return loss


@pytest.mark.usefixtures("group_of_lightning")
@pytest.mark.parametrize("kind", [_Clips, _ClipsItself])
@pytest.mark.parametrize("where", PLACES)
def test_a_module_of_lightning_clips_and_logs_gradients(where: str, kind: Any, tmp_path: Path) -> None:
    def run(strategy: Any) -> list[float]:
        accumulated = 1 if kind is _ClipsItself else 3
        options = {"max_epochs": 1, "gradient_clip_val": None, "accumulate_grad_batches": accumulated, "plugins": []}
        trainer = make_trainer(strategy, default_root_dir=tmp_path, **options)
        return fit(trainer, make_net(kind, dropout=0.0), 0)

    wanted = run("auto")
    strategy = ZstoreStrategy(_config(where, tmp_path))
    found = run(strategy)
    strategy.close()
    assert found == pytest.approx(wanted, rel=1e-4)
