"""Trainer on zstore beside Trainer alone, in one run."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

import zstore.hf
from tests.integrations.trainers import Texts, arguments, config, history, llama
from zstore.testing.ranks import run_ranks

LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss")
EPOCH = {
    "num_train_epochs": 2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "eval_strategy": "epoch",
    "max_grad_norm": 0.5,
    "label_smoothing_factor": 0.1,
    "activation_checkpointing": True,
}
"""Two epochs with short accumulations at their ends, clipping, a cosine schedule after a warm-up, evaluation."""


def _quiet() -> None:
    warnings.simplefilter("default")  # accelerate's, of threads and devices


def _train(kind: type, folder: Path, run: dict[str, Any], extra: dict[str, Any], **train: Any) -> Any:
    trainer = kind(llama(), arguments(folder, **run), train_dataset=Texts(14), eval_dataset=Texts(6, seed=3), **extra)
    trainer.train(**train)
    return trainer


def _beside(rank: int, folder: str, world_size: int) -> None:
    _quiet()
    place = Path(folder)
    # At 2 ranks 4 batches in 2 steps of 2, and with a short one at the end: 7 batches in 3, 3 and 1.
    run = {**EPOCH, "gradient_accumulation_steps": 3}
    wanted = _train(Trainer, place / "plain", run, {})
    found = _train(zstore.hf.Trainer, place / "ours", run, {"zstore_config": config(place / "nvme")})
    for name in LOGGED:
        assert history(found, name) == pytest.approx(history(wanted, name), rel=1e-5, abs=1e-8), name
    assert found.state.global_step == wanted.state.global_step == (6 if world_size == 1 else 4)
    expected = wanted.accelerator.unwrap_model(wanted.model_wrapped).state_dict()
    state = found.engine.module_state_dict()
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
    assert bool(state) == (rank == 0)
    assert found.evaluate()["eval_loss"] == pytest.approx(wanted.evaluate()["eval_loss"], rel=1e-6)
    predicted, truth = found.predict(Texts(3, seed=4)), wanted.predict(Texts(3, seed=4))
    torch.testing.assert_close(
        torch.tensor(predicted.predictions), torch.tensor(truth.predictions), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epoch_from_disk_has_the_losses_of_trainer_alone(tmp_path: Path, world_size: int) -> None:
    (tmp_path / "nvme").mkdir()
    run_ranks(_beside, world_size, os.fspath(tmp_path), world_size)
