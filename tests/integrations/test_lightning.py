"""Lightning's Trainer on the engine, beside Lightning alone: losses, weights, checkpoints; its page and its example."""

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import zstore
from tests import warm
from tests.pages import ROOT, blocks
from zstore.checkpoint.reader import tags
from zstore.errors import CheckpointError, CheckpointMismatchError
from zstore.testing.ranks import run_ranks

WIDTH, BATCH, BATCHES = 192, 4, 7
"""Of the width a half of a matrix is large enough to rest on disk. With 3 batches a step the last of an epoch has one."""
ROUNDING = 2e-6


class Net(L.LightningModule):
    """Two blocks, and a head; clips gradients by itself as well, and keeps something in checkpoints."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.losses: list[float] = []
        self.kept: Any = None
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.losses.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))
        nn.utils.clip_grad_norm_(self.parameters(), 0.5)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = {1: ("a", torch.arange(3)), "path": Path("x")}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint["kept"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.1)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


class LateNet(Net):
    """Builds its layers where a strategy may shard them."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__(lr)
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with torch.random.fork_rng():
                self.net = Net().net


class Plateau(Net):
    """Steps by itself after two backwards, and lowers its rate when the validation asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx) / 2)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def on_validation_epoch_end(self) -> None:
        self.lr_schedulers().step(self.trainer.callback_metrics["val"])

    def configure_optimizers(self) -> Any:
        head = [{"params": self.net[0].parameters()}, {"params": self.net[3].parameters(), "lr": 0.05}]
        optimizer = torch.optim.SGD(head, lr=0.1, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):
        yield


def _batches(rank: int, count: int) -> DataLoader[Any]:
    made = torch.Generator().manual_seed(rank)
    data = (torch.randn(BATCH * count, width, generator=made) for width in (WIDTH, 4))
    return DataLoader(TensorDataset(*data), BATCH)


def _trainer(strategy: Any, ranks: int, folder: Path | None = None, **options: Any) -> L.Trainer:
    saves = [] if folder is None else [ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)]
    chosen: dict[str, Any] = {
        "max_epochs": 2, "accelerator": "cpu", "devices": ranks, "accumulate_grad_batches": 3, "gradient_clip_val": 0.2,
        "logger": False, "enable_checkpointing": folder is not None, "enable_progress_bar": False, "callbacks": saves,
        "enable_model_summary": False, "use_distributed_sampler": False, "plugins": [TorchElasticEnvironment()],
    }  # fmt: skip
    return L.Trainer(**chosen | options, strategy=strategy)


def _fit(trainer: L.Trainer, module: Net, rank: int, **options: Any) -> list[float]:
    torch.manual_seed(rank)
    trainer.fit(module, _batches(rank, BATCHES), _batches(rank, 2), **options)
    return module.losses


def _strategy(config: dict[str, Any], **options: Any) -> Any:
    """Return the strategy, which makes `import deepspeed` give zstore: in ranks alone, not in the process of the tests."""
    from zstore.lightning import ZstoreStrategy

    return ZstoreStrategy(config, **options)


def _zero(stage: int, folder: Path | None = None) -> dict[str, Any]:
    nvme = {} if folder is None else {"device": "nvme", "nvme_path": str(folder)}
    offload = {"offload_optimizer": nvme, "offload_param": nvme} if nvme else {}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 20, **offload}
    return {"zero_optimization": zero, "train_batch_size": "auto", "bf16": {"enabled": "auto"}}


def _beside_lightning(rank: int, ranks: int, folder: Path) -> None:
    """Compare losses, norms, weights and metrics with Lightning's own, then go on in the middle of the run."""
    plain = Net()
    alone = _trainer("ddp", ranks)
    losses = _fit(alone, plain, rank)
    other = ("two", Net, _zero(2)) if ranks == 1 else ("three", LateNet, _zero(3))
    for name, kind, config in (other, ("disk", LateNet, _zero(3, folder))):
        module, strategy = kind(), _strategy(config)
        trainer = _trainer(strategy, ranks, folder / name)
        assert _fit(trainer, module, rank) == pytest.approx(losses, rel=ROUNDING), name
        assert trainer.global_step == alone.global_step == 6
        assert trainer.callback_metrics["val"].item() == pytest.approx(alone.callback_metrics["val"].item())
        (validated,) = trainer.validate(module, _batches(rank, 2), verbose=False)
        assert validated["val"] == trainer.callback_metrics["val"].item()
        weights = zstore.load_state_dict(folder / name / "step=6.ckpt")
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=5e-6)

        again = _trainer(_strategy(config, load_objects=True), ranks)
        late = kind(lr=1.0)
        assert _fit(again, late, rank, ckpt_path=str(folder / name / "step=3.ckpt")) == module.losses[10:], name
        assert late.kept[1][1].tolist() == [0, 1, 2]
        final = again.strategy.model.module_state_dict()
        assert all(torch.equal(value, weights[key]) for key, value in final.items())  # rank 0 has them


def _on_one_rank(rank: int, folder: str) -> None:
    with _quiet():
        _beside_lightning(rank, 1, Path(folder))
        manual = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
        plain, module = Plateau(), Plateau()
        losses = _fit(_trainer("ddp", 1, **manual), plain, rank)
        trainer = _trainer("deepspeed_stage_3", 1, Path(folder, "manual"), **manual)
        assert _fit(trainer, module, rank) == pytest.approx(losses, rel=1e-5)
        assert trainer.optimizers[0].param_groups[0]["lr"] < 0.1

        saved = str(Path(folder, "two", "step=6.ckpt"))
        loaded = Net.load_from_checkpoint(saved, weights_only=False, lr=0.5)
        assert loaded.hparams["lr"] == 0.5
        assert loaded.kept["path"] == Path("x")
        weights = zstore.load_state_dict(saved)
        assert all(torch.equal(value, weights[key]) for key, value in loaded.state_dict().items())
        with pytest.raises(CheckpointError, match="load_objects=True"):
            _fit(_trainer(_strategy(_zero(2)), 1), Net(), rank, ckpt_path=saved)
        trainer.strategy.model.save_checkpoint(Path(folder, "loop"))
        with pytest.raises(CheckpointMismatchError, match="was not saved by a Trainer"):
            Net.load_from_checkpoint(Path(folder, "loop"))


def _on_two_ranks(rank: int, folder: str) -> None:
    with _quiet():
        _beside_lightning(rank, 2, Path(folder, "2"))
        trainer, module = _trainer(_strategy(_zero(3), load_objects=True), 2), LateNet()
        saved = Path(folder, "disk", "step=6.ckpt")  # by one rank
        (validated,) = trainer.validate(module, _batches(0, 2), ckpt_path=str(saved), verbose=False)
        plain = Net()
        plain.load_state_dict(zstore.load_state_dict(saved))
        (wanted,) = _trainer("ddp", 2).validate(plain, _batches(0, 2), verbose=False)
        assert validated["val"] == pytest.approx(wanted["val"], rel=ROUNDING)


def test_lightning_trains_as_alone_and_resumes_and_on_more_ranks(tmp_path: Path) -> None:
    run_ranks(_on_one_rank, 1, str(tmp_path))
    run_ranks(_on_two_ranks, 2, str(tmp_path))


def _page(rank: int, folder: str) -> None:
    os.chdir(folder)
    (block,) = blocks("docs/lightning.md")
    with _quiet():
        exec(block, {"__name__": "page"})
        exec(block, {"__name__": "page"})  # and once more, from the last checkpoint


def test_the_example_of_the_page(tmp_path: Path) -> None:
    run_ranks(_page, 1, str(tmp_path))
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["epoch=1-step=6.ckpt", "last.ckpt"]
    assert [info.tag for info in tags(tmp_path / "checkpoints" / "last.ckpt")] == ["checkpoint"]


def test_lightning_starts_the_ranks_of_the_example(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "lightning_fit.py")
    command = [sys.executable, script, "--devices", "2", "--out", str(tmp_path)]
    told = warm.run(command, capture_output=True, text=True, check=True, timeout=100)
    shown = sorted(re.findall(r"rank \d: \d+ steps, loss 0\.", told.stdout))
    assert shown == ["rank 0: 32 steps, loss 0.", "rank 1: 32 steps, loss 0."]
