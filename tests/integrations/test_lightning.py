"""Lightning's Trainer on the engine, beside Lightning's own DDP: losses, checkpoints, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import zstore
from tests import warm
from tests.integrations.lightning_runs import Batches, LateNet, disk_config, fit, make_net, make_trainer, quiet
from zstore.journal import read
from zstore.lightning import ZstoreStrategy
from zstore.testing.ranks import run_ranks

ROUNDING = 2e-6

STARTED = """
import sys, tempfile, torch, zstore.lightning
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

class Small(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

if __name__ == "__main__":
    for method in sys.argv[1:]:
        ends = []
        for strategy in (f"ddp_{method}", f"zstore_{method}"):
            torch.manual_seed(0)
            module, data = Small(), TensorDataset(torch.randn(16, 8), torch.randn(16, 4))
            with tempfile.TemporaryDirectory() as folder:
                trainer = L.Trainer(
                    max_epochs=1, accelerator="cpu", devices=2, strategy=strategy, callbacks=[ModelCheckpoint(folder)],
                    logger=False, enable_progress_bar=False, enable_model_summary=False,
                )
                trainer.fit(module, DataLoader(data, 4))
                assert trainer.checkpoint_callback.best_model_path.endswith("step=2.ckpt")
            ends.append((trainer.callback_metrics["loss"], module.net.weight.detach()))
        torch.testing.assert_close(*ends)
        print("same", method)
"""


def _on_two_ranks(rank: int, folder: str) -> dict[str, Any]:
    """Train by DDP and by the engine with modules built in shards; go on with what one rank saved."""
    base = Path(folder)
    plain = fit(make_trainer("ddp", 2), make_net(), rank)
    strategy = ZstoreStrategy(disk_config(base / "run"))
    module = make_net(LateNet)
    trainer = make_trainer(strategy, 2)
    ours = fit(trainer, module, rank)
    with pytest.raises(zstore.ZstoreError, match="outside of a forward"):
        module.layers[0][0].weight.isnan()
    with quiet():
        validated = trainer.validate(module, Batches(rank, 2, seed=1), verbose=False)
        predicted = trainer.predict(module, Batches(rank, 2, seed=1))
        with pytest.raises(zstore.ZstoreError, match=r"ranks have \[\[1\], \[2\]\] batches"):
            trainer.predict(module, Batches(rank, rank + 1))
    strategy.close()

    resumed = {
        name: fit(
            make_trainer(name, 2),
            make_net(dropout=0.0, lr=1.0),
            rank,
            ckpt_path=str(base / name / "start.ckpt"),
            weights_only=False,
        )
        for name in ("ddp", "zstore")
    }
    return {
        "plain": plain,
        "ours": ours,
        "validated": (trainer.callback_metrics.get("val", validated[0]["val"]), validated[0]["val"]),
        "predicted": [tuple(values.shape) for values in predicted],
        "resumed": resumed,
    }


def _on_one_rank(rank: int, folder: str) -> dict[str, Any]:
    """Train by DDP, by the engine from disk, and by the engine resumed in the middle of the second epoch."""
    base = Path(folder)
    plain = make_net()
    losses = fit(make_trainer("ddp"), plain, rank)

    saves = ModelCheckpoint(base / "ckpt", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    best = ModelCheckpoint(base / "best", monitor="val", save_top_k=1, save_last=True, filename="{epoch} {val:.3f}")
    module = make_net()
    strategy = ZstoreStrategy(disk_config(base / "run"))
    trainer = make_trainer(strategy, callbacks=[best, saves], enable_checkpointing=True)
    ours = fit(trainer, module, rank)
    final = strategy.engine.module_state_dict()
    counted = module.counted

    resumed = make_net(lr=1.0)
    other = make_trainer(ZstoreStrategy(disk_config(base / "resumed")))
    again = fit(other, resumed, rank, ckpt_path=str(base / "ckpt" / "step=4.ckpt"))
    refinal = other.strategy.engine.module_state_dict()
    with quiet():
        tested = trainer.test(module, Batches(rank, 2, seed=1), ckpt_path="best", verbose=False)
    trainer.strategy.close()
    other.strategy.close()

    # For another world size.
    start = ModelCheckpoint(base / "ddp", every_n_train_steps=3, filename="start")
    fit(make_trainer("ddp", callbacks=[start], enable_checkpointing=True, max_epochs=1), make_net(dropout=0.0), rank)
    start = ModelCheckpoint(base / "zstore", every_n_train_steps=3, filename="start")
    fit(make_trainer("zstore", callbacks=[start], enable_checkpointing=True, max_epochs=1), make_net(dropout=0.0), rank)
    return {
        "plain": losses,
        "ours": ours,
        "again": again,
        "best": (best.best_model_score.item(), tested[0]["val"]),
        "counted": (plain.counted, counted, resumed.counted),
        "steps": (trainer.global_step, other.global_step),
        "far": max((final[name] - value).abs().max().item() for name, value in plain.state_dict().items()),
        "same": all(torch.equal(value, refinal[name]) for name, value in final.items()),
    }


def test_lightning_trains_as_ddp_and_resumes_within_an_epoch_and_on_more_ranks(tmp_path: Path) -> None:
    (found,) = run_ranks(_on_one_rank, 1, str(tmp_path))
    assert found["ours"] == pytest.approx(found["plain"], rel=ROUNDING)
    assert found["far"] < ROUNDING
    assert found["counted"] == (6, 6, 6)
    assert found["steps"] == (6, 6)
    assert found["again"] == found["ours"][10:]
    assert found["same"]
    assert found["best"][0] == pytest.approx(found["best"][1])
    kept = sorted(path.name for path in (tmp_path / "best").iterdir())
    assert len(kept) == 3, kept  # the best, its link, and the last
    (started, *_) = read(tmp_path / "best")
    assert (started["loop"], started["total_steps"]) == ("lightning", found["steps"][0])

    for found in run_ranks(_on_two_ranks, 2, str(tmp_path)):
        assert found["ours"] == pytest.approx(found["plain"], rel=ROUNDING)
        assert found["predicted"] == [(4, 4), (4, 4)]
        assert len(found["resumed"]["ddp"]) == 7
        assert found["resumed"]["zstore"] == pytest.approx(found["resumed"]["ddp"], rel=ROUNDING)


def _start(tmp_path: Path, method: str) -> str:
    (tmp_path / "small.py").write_text(STARTED)
    command = [sys.executable, str(tmp_path / "small.py"), method]
    # Anew: Lightning forks no process in which a former fork made a CUDA build of torch say that it must not.
    return warm.run(command, capture_output=True, text=True, check=True, timeout=200, anew=True).stdout


def test_ranks_that_lightning_forks_bring_weights_back(tmp_path: Path) -> None:
    assert "same fork" in _start(tmp_path, "fork")


@pytest.mark.soak
def test_ranks_that_lightning_spawns_bring_weights_back(tmp_path: Path) -> None:
    assert "same spawn" in _start(tmp_path, "spawn")


@pytest.mark.soak
def test_pytorch_lightning_has_a_strategy_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(
        STARTED.replace("import sys", "import pytorch_lightning, sys")
        .replace("import lightning as L", "import pytorch_lightning as L")
        .replace("from lightning.pytorch", "from pytorch_lightning")
    )
    command = [sys.executable, str(tmp_path / "small.py"), "fork"]
    done = warm.run(command, capture_output=True, text=True, check=True, timeout=200, anew=True)
    assert "same fork" in done.stdout


class _Trouble(L.Callback):
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        raise RuntimeError("in a callback")


def _fails_at_the_end(rank: int) -> None:
    for strategy in ("ddp", ZstoreStrategy()):
        trainer = make_trainer(strategy, max_epochs=1, callbacks=[_Trouble()])
        with pytest.raises(RuntimeError, match="in a callback"):
            fit(trainer, make_net(), rank)


def test_an_error_after_the_teardown_is_the_callbacks_own() -> None:
    run_ranks(_fails_at_the_end, 1)
