"""Under Lightning a resume goes on with the samples and the random numbers of the run that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import zstore.lightning  # noqa: F401 - so that Lightning knows the names
from tests.integrations.lightning_runs import make_trainer, quiet
from zstore.testing.ranks import run_ranks

SAMPLES, BATCH, EPOCHS = 24, 4, 2
Seen = list[tuple[list[int], float]]


class Numbered(Dataset[tuple[torch.Tensor, int]]):
    """Samples that say which they are."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), float(number)), number


class Sees(L.LightningModule):
    """Remembers which samples it saw, and a loss that depends on the random numbers at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
        self.seen: Seen = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.seen.append((batch[1].tolist(), loss.item()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _seen(
    strategy: str, folder: Path, kind: Any = StatefulDataLoader, workers: int = 0, seed: int = 0, **options: Any
) -> Seen:
    """Train with a shuffled loader, and a checkpoint after each step or each epoch; return what was seen."""
    ckpt, every = options.pop("ckpt_path", None), options.pop("every", "n_train_steps")
    ends = {"save_on_train_epoch_end": True} if every == "n_epochs" else {}
    saves = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **{f"every_{every}": 1}, **ends)
    torch.manual_seed(seed)
    chosen: dict[str, Any] = {
        "max_epochs": EPOCHS, "callbacks": [saves], "enable_checkpointing": True, "accumulate_grad_batches": 1,
        "gradient_clip_val": None, "val_check_interval": None, "use_distributed_sampler": True,
    }  # fmt: skip
    with quiet():
        module, data = Sees(), kind(Numbered(), BATCH, shuffle=True, num_workers=workers)
        make_trainer(strategy, **chosen | options).fit(module, data, ckpt_path=ckpt)
    return module.seen


def _resumes(whole: Seen, folder: Path, steps: list[int], **options: Any) -> None:
    for step in steps:
        path = str(folder / f"step={step}.ckpt")
        again = _seen("zstore", folder.with_name(f"{folder.name}-{step}"), seed=5, ckpt_path=path, **options)
        assert again == whole[step:], step


def _on_one_rank(rank: int, folder: str) -> None:
    base, per_epoch = Path(folder), SAMPLES // BATCH
    plain = _seen("auto", base / "plain", plugins=[])
    assert [len(batch) for batch, _ in plain] == [BATCH] * per_epoch * EPOCHS
    whole = _seen("zstore", base / "steps")
    assert [batch for batch, _ in whole] == [batch for batch, _ in plain]
    assert [loss for _, loss in whole] == pytest.approx([loss for _, loss in plain], rel=1e-6)
    _resumes(whole, base / "steps", [2, per_epoch, per_epoch + 1])

    ends = _seen("zstore", base / "epochs", every="n_epochs")
    assert [batch for batch, _ in ends] == [batch for batch, _ in plain]
    _resumes(ends, base / "epochs", [per_epoch])

    # Of a loader without a state the next epoch.
    plain = _seen("auto", base / "plain-loader", DataLoader, plugins=[])
    whole = _seen("zstore", base / "loader", DataLoader)
    assert [batch for batch, _ in whole] == [batch for batch, _ in plain]
    _resumes(whole, base / "loader", [per_epoch], kind=DataLoader)


def _on_two_ranks(rank: int, folder: str) -> None:
    base, per_epoch = Path(folder), SAMPLES // BATCH // 2
    sampler = DistributedSampler(Numbered(), 2, rank, shuffle=True, seed=0)
    expected = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        expected += torch.tensor(list(sampler)).reshape(-1, BATCH).tolist()
    whole = _seen("zstore", base / "steps", world_size=2)
    assert [batch for batch, _ in whole] == expected
    _resumes(whole, base / "steps", [1, per_epoch, per_epoch + 1], world_size=2)


def test_a_shuffled_stateful_loader_resumes_with_the_samples_of_the_run(tmp_path: Path) -> None:
    run_ranks(_on_one_rank, 1, str(tmp_path))


def test_ranks_share_a_shuffled_stateful_loader_and_resume_it(tmp_path: Path) -> None:
    run_ranks(_on_two_ranks, 2, str(tmp_path))
