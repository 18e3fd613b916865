"""Saving and loading through the engine: exact resume, other world sizes, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zstore
from tests.engine_models import Net, batch, make_net
from tests.test_engine_bits import engine_digests
from zstore.checkpoint import open_checkpoint
from zstore.dist import World
from zstore.engine import Engine
from zstore.errors import (
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptionError,
    RankError,
    UsageError,
)
from zstore.testing.ranks import run_ranks

STEPS = 2


def config(stage: int, tier: str, folder: str, *, batch_size: int = 12, precision: str = "bf16") -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 100
    if tier != "none":
        zero["offload_optimizer"] = {"device": tier} | ({"nvme_path": folder} if tier == "nvme" else {})
    found: dict[str, Any] = {
        "train_batch_size": batch_size,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}},
        "zero_optimization": zero,
        "steps_per_print": 0,
    }
    if precision != "fp32":
        found[precision] = {"enabled": True} | ({"initial_scale_power": 8} if precision == "fp16" else {})
    return found


def start(*args: Any, model: nn.Module | None = None, seed: int = 0, **kwargs: Any) -> Engine:
    engine, *_ = zstore.initialize(model=model or make_net(seed), config=config(*args, **kwargs))
    return engine


def train(engine: Engine, steps: int) -> list[float]:
    """Train from where the engine stands; return this rank's losses. Data depends on the global sample number alone."""
    losses = []
    for _ in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            number = micro * engine.world_size + engine.global_rank
            loss = engine(*batch(engine.global_steps, 0, number))
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
    return losses


def _save_and_go_on(rank: int, folder: str, stage: int, tier: str, precision: str) -> dict[str, Any]:
    engine = start(stage, tier, folder, precision=precision)
    with engine:
        train(engine, STEPS)
        torch.rand(3 + rank), random.random(), np.random.rand()
        engine.save_checkpoint(f"{folder}/ckpt", "mid", {"epoch": 3, "best": [torch.arange(5) * 0.5, "x"]})
        at_save = engine_digests(engine)
        drawn = [torch.rand(1).item(), random.random(), float(np.random.rand())]
        losses = train(engine, STEPS)
        return {"at_save": at_save, "drawn": drawn, "losses": losses, "after": engine_digests(engine)}


def _resume(rank: int, folder: str, stage: int, tier: str, precision: str) -> dict[str, Any]:
    engine = start(stage, tier, folder, precision=precision, seed=1)
    with engine:
        path, state = engine.load_checkpoint(f"{folder}/ckpt")
        assert path == f"{folder}/ckpt/mid"
        assert state["epoch"] == 3
        assert state["best"][0].tolist() == [0, 0.5, 1, 1.5, 2]
        assert state["best"][1] == "x"
        assert (engine.global_steps, engine.skipped_steps) == (STEPS, 0)
        at_save = engine_digests(engine)
        drawn = [torch.rand(1).item(), random.random(), float(np.random.rand())]
        losses = train(engine, STEPS)
        return {"at_save": at_save, "drawn": drawn, "losses": losses, "after": engine_digests(engine)}


@pytest.mark.parametrize(
    ("world_size", "stage", "tier", "precision"),
    [(1, 0, "none", "fp32"), (1, 3, "nvme", "fp16"), (2, 3, "nvme", "bf16"), (2, 0, "none", "bf16"), (3, 1, "cpu", "fp32")],
)
def test_resume_is_exact(tmp_path: Path, world_size: int, stage: int, tier: str, precision: str) -> None:
    args = (str(tmp_path), stage, tier, precision)
    saved = run_ranks(_save_and_go_on, world_size, *args)
    resumed = run_ranks(_resume, world_size, *args)
    assert resumed == saved
    assert len({str(result["drawn"]) for result in saved}) == world_size


def _save(rank: int, folder: str, stage: int, tier: str) -> list[float]:
    with start(stage, tier, folder) as engine:
        train(engine, STEPS)
        engine.save_checkpoint(f"{folder}/ckpt", client_state={"note": "elastic"})
        return train(engine, STEPS)


def _load_elsewhere(rank: int, folder: str, stage: int, tier: str) -> tuple[list[float], str]:
    with start(stage, tier, folder, seed=1, batch_size=2 * World.current().world_size) as e:
        path, state = e.load_checkpoint(f"{folder}/ckpt")
        assert path is not None
        assert state == {"note": "elastic"}
        assert e.train_batch_size() == 12
        e.save_checkpoint(f"{folder}/again", tag=f"from-{e.world_size}", client_state=state)
        return train(e, STEPS), path


@pytest.mark.parametrize(
    ("before", "after"), [((2, 3, "nvme"), (1, 1, "cpu")), ((1, 0, "none"), (3, 2, "nvme")), ((3, 3, "cpu"), (2, 0, "none"))]
)
def test_another_world_size(tmp_path: Path, before: tuple[int, int, str], after: tuple[int, int, str]) -> None:
    whole = run_ranks(_save, before[0], str(tmp_path), *before[1:])
    loaded = run_ranks(_load_elsewhere, after[0], str(tmp_path), *after[1:])
    per_step = [np.mean([loss for rank in whole for loss in _of_step(rank, step)]) for step in range(STEPS)]
    here = [np.mean([loss for rank, _ in loaded for loss in _of_step(rank, step)]) for step in range(STEPS)]
    np.testing.assert_allclose(here, per_step, rtol=2e-3)
    with open_checkpoint(tmp_path / "ckpt") as one, open_checkpoint(tmp_path / "again") as other:
        assert one.arrays.keys() == other.arrays.keys()
        assert (one.record.world_size, other.record.world_size) == (before[0], after[0])
        assert one.record.run == other.record.run
        for name in one.arrays:
            np.testing.assert_array_equal(one.read_array(name), other.read_array(name), err_msg=name)


def _of_step(losses: list[float], step: int) -> list[float]:
    each = len(losses) // STEPS
    return losses[step * each : (step + 1) * each]
