"""Copies of the state in groups (MiCS), and second copies of the parameters (hpZ): the bits of full sharding, bytes by formula."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

import zstore
from tests.engine.bits import Case, compare_all
from tests.engine.models import batch, make_net
from zstore.engine.config.config import load_config
from zstore.engine.config.resolve import ResolveContext
from zstore.errors import ConfigError
from zstore.testing.ranks import run_ranks

MICS, HPZ = {"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}


def test_bits_are_those_of_the_plain_loop() -> None:
    cases = [
        Case(3, "nvme", "bf16", 2, 0.25, 40_000, parameters="cpu", overlap="forward", keys=MICS, seed=1),
        Case(3, "none", "bf16", 1, 0.0, overlap="backward", keys=MICS, seed=2),
        Case(2, "cpu", "fp16", 1, 0.25, keys=MICS, seed=3, split=False),
        Case(1, "none", "bf16", 2, 0.25, 40_000, keys=MICS, seed=4),
        Case(3, "cpu", "bf16", 2, 0.25, parameters="nvme", overlap="forward", keys=HPZ, seed=5),
        Case(3, "none", "fp32", 1, 0.0, overlap="backward", keys=HPZ, seed=6),
    ]
    for failed in run_ranks(compare_all, 4, 4, [asdict(case) for case in cases], timeout_s=120):
        assert failed == []


def _sent(rank: int, changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train two steps of two micro-batches with each of `changes` to the ZeRO section."""
    found = []
    for keys in changes:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100} | keys,
            "steps_per_print": 0,
        }
        with zstore.initialize(model=make_net(), config=config)[0] as engine:
            seen = []
            for step in range(3):
                before = engine.statistics()
                for micro in range(2):
                    engine.backward(engine(*batch(step, micro, rank)))
                    engine.step()
                now = engine.statistics()
                seen.append({name: link["bytes"] for name, link in now.links_since(before).items()})
            found.append({"sent": seen[-1], "held": asdict(now.held)})
    return found
