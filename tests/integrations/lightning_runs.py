"""A module, its data and Trainers for the tests of `zstore.lightning`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.nn import functional as F

BATCH, WIDTH = 4, 192
"""Of the width a half of a matrix is large enough to rest on disk."""
SEED = 7
BATCHES = 7
"""Of an epoch on one rank: with 3 micro-batches a step, its last step has one."""


class Net(L.LightningModule):
    """Two blocks in a list, a head, and a parameter of its own."""

    def __init__(self, lr: float = 1e-2, dropout: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.build()
        self.losses: list[float] = []
        self.counted = 0

    def build(self) -> None:
        dropout = self.hparams["dropout"]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1]) + 1e-3 * self.scale.square().sum()
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.counted += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counted"] = self.counted
        checkpoint["mark"] = {1: ("a", torch.arange(3)), "path": Path("x")}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.counted = checkpoint["counted"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.1)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


class LateNet(Net):
    """Builds its layers where a strategy may shard them."""

    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            state = torch.get_rng_state()
            torch.manual_seed(SEED)
            super().build()
            torch.set_rng_state(state)


class Batches:
    """A loader that says where it is, as torchdata's StatefulDataLoader does."""

    batch_size = BATCH

    def __init__(self, rank: int, count: int = BATCHES, seed: int = 0) -> None:
        made = torch.Generator().manual_seed(100 * seed + rank)
        self._batches = [
            (torch.randn(BATCH, WIDTH, generator=made), torch.randn(BATCH, 4, generator=made)) for _ in range(count)
        ]
        self._first = self._next = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        first, self._first = self._first, 0
        for number in range(first, len(self._batches)):
            self._next = number + 1
            yield self._batches[number]

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._first = state["next"] % len(self._batches)


def make_trainer(strategy: Any, world_size: int = 1, **options: Any) -> L.Trainer:
    chosen: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": world_size,
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 0.2,
        "val_check_interval": 4,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "use_distributed_sampler": False,
        "plugins": [TorchElasticEnvironment()],
    }
    with quiet():
        return L.Trainer(**{**chosen, **options}, strategy=strategy)


class quiet(warnings.catch_warnings):
    """Lets Lightning say what it thinks of small runs."""

    def __enter__(self) -> Any:
        found = super().__enter__()
        warnings.simplefilter("ignore")
        return found


def fit(trainer: L.Trainer, module: Net, rank: int, **options: Any) -> list[float]:
    """Train; return the losses of this rank."""
    torch.manual_seed(rank)
    with quiet():
        trainer.fit(module, Batches(rank), Batches(rank, 2, seed=1), **options)
    return module.losses


def make_net(kind: type[Net] = Net, **options: Any) -> Net:
    torch.manual_seed(SEED)
    return kind(**options)


def disk_config(folder: Path, **keys: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    zero = {
        "stage": 3,
        "offload_optimizer": nvme,
        "offload_param": nvme,
        "stage3_param_persistence_threshold": 20,
    }
    return {"zero_optimization": zero, "train_batch_size": "auto", "bf16": {"enabled": "auto"}} | keys
