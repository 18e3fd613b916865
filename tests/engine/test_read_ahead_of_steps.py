"""State is on its way from the drive while a step takes the norm; a step that is skipped leaves no trace of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zstore
from tests.engine.bits import engine_digests
from zstore.engine import Engine
from zstore.testing.faults import GatedFiles

WIDTH = 256
"""A matrix of fp32 is 256 KiB: on disk where that is asked for."""


def start(folder: Path, files: GatedFiles | None = None, **keys: Any) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}}
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero | {"stage3_param_persistence_threshold": 0},
        "steps_per_print": 0,
    }
    return zstore.initialize(model=model, config=config | keys, _files=files)[0]


def take_step(engine: Engine, value: float = 1.0) -> None:
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.full((2, WIDTH), value, dtype=dtype)).float().mean())
    engine.step()


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_a_skipped_step_read_ahead_and_left_no_trace(overlap: str, tmp_path: Path) -> None:
    files = GatedFiles("read", pattern="*.shard")
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    with start(tmp_path, files, fp16=fp16, zstore={"step_overlap": overlap}) as engine:
        files.open_gate()
        take_step(engine)
        before = engine_digests(engine)
        store = engine.training_state.state.store
        written = engine.statistics().store.disk_write_bytes
        files.close_gate()
        num_read = len(files.arrived(0))
        take_step(engine, float("inf"))  # nobody waits for what is read
        files.arrived(num_read + 1)
        files.open_gate()
        assert engine.skipped_steps == 1
        assert engine_digests(engine) == before
        assert engine.statistics().store.disk_write_bytes == written
        pool = store.resources.pool
        pool.acquire(pool.nbytes).release()  # would hang if anything were still held
        take_step(engine)
        assert engine_digests(engine) != before


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_no_byte_is_read_twice_by_a_step_that_read_ahead(overlap: str, tmp_path: Path) -> None:
    with start(tmp_path, bf16={"enabled": True}, zstore={"step_overlap": overlap}) as engine:
        take_step(engine)
        engine.training_state.pending.complete()
        before = engine.statistics().store
        take_step(engine)
        engine.training_state.pending.complete()
        after = engine.statistics().store
        read, written = (
            getattr(after, name) - getattr(before, name) for name in ("disk_read_bytes", "disk_write_bytes")
        )
        assert 0 < read == written
