"""A stage shards: bytes held and bytes sent by each rank are counted, and equal the formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import zstore
from tests.engine.block_models import Base
from tests.engine.models import Block
from zstore.engine.params.record import Residency
from zstore.testing.ranks import run_ranks

WIDTH, IDS = 24, torch.arange(12).view(2, 6)


class Peak(nn.Module):
    """Notes how many elements are gathered while its block runs."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.block = Block(WIDTH)
        self.seen = seen
        self.engine: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.engine is not None:
            self.seen.append(gathered_numel(self.engine()))
        return self.block(x)


def gathered_numel(engine: Any) -> int:
    records = engine.training_state.state.records
    return sum(record.numel for record in records if record.residency is Residency.GATHERED)


def config_of(stage: int, threshold: int) -> dict[str, Any]:
    zero = {"stage": stage} | ({"stage3_param_persistence_threshold": threshold} if stage == 3 else {})
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": zero,
        "steps_per_print": 0,
    }


def _count(rank: int, stages: list[int], threshold: int) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for stage in stages:
        torch.manual_seed(0)
        seen: list[int] = []
        model = Base([Peak(seen) for _ in range(4)])
        engine, *_ = zstore.initialize(model=model, config=config_of(stage, threshold))
        for block in model.blocks:
            block.engine = lambda engine=engine: engine
        with engine:
            loss = engine(IDS)
            engine.backward(loss)
            accumulated = engine.statistics().held
            engine.step()
            engine.backward(engine(IDS))
            engine.step()
            done = engine.statistics()
            records = engine.training_state.state.records
            found[str(stage)] = {
                "parameters": done.held.parameters,
                "gradients": accumulated.gradients,
                "state": done.held.optimizer_state,
                "numel": sum(record.numel for record in records),
                "own": sum(record.grid.shard_valid_numel(rank) for record in records),
                "padded": sum(record.grid.shard_numel for record in records) * engine.world_size,
                "small": sum(record.numel for record in records if record.numel < threshold),
                "small_own": sum(record.grid.shard_valid_numel(rank) for record in records if record.numel < threshold),
                "small_padded": engine.world_size
                * sum(record.grid.shard_numel for record in records if record.numel < threshold),
                # The head is the last unit of the forward and the first of the backward: the second step, which knows
                # that, gathers it once.
                "turn_padded": engine.world_size
                * sum(
                    record.grid.shard_numel
                    for record in records
                    if record.name.startswith("head.") and record.numel >= threshold
                ),
                # Less than 16 elements, or than the rows that hold a multiple of 16, for each parameter and rank.
                "most_padding": sum(math.lcm(16, record.grid.row_numel) for record in records) * engine.world_size,
                "most_gathered": max(seen),
                "block": sum(p.numel() for p in model.blocks[0].parameters()),
                **{kind: done.sent_bytes.get(kind, 0) for kind in ("all_reduce", "reduce_scatter", "all_gather")},
            }
    return found


def _accumulated(rank: int) -> list[list[int]]:
    """Elements of which this rank holds gradients, and their bytes after each micro-batch of a step, by stage."""
    found = []
    for stage in range(4):
        torch.manual_seed(0)
        config = config_of(stage, 50) | {"gradient_accumulation_steps": 3}
        model = Base([Peak([]) for _ in range(4)])
        with zstore.initialize(model=model, config=config)[0] as engine:
            records = engine.training_state.state.records
            found.append([sum(r.owned_numel if stage >= 2 else r.numel for r in records)])
            for _ in range(3):
                loss = engine(IDS)
                engine.backward(loss)
                found[-1].append(engine.statistics().held.gradients)
                engine.step()
    return found


def _both(rank: int, threshold: int) -> tuple[dict[str, dict[str, int]], list[list[int]]]:
    return _count(rank, [0, 1, 2, 3], threshold), _accumulated(rank)


@pytest.mark.parametrize(
    "world_size", [1, pytest.param(2, marks=pytest.mark.soak), 3, pytest.param(4, marks=pytest.mark.soak)]
)
def test_bytes_held_and_sent(world_size: int) -> None:
    threshold = 50
    results, accumulated = zip(*run_ranks(_both, world_size, threshold), strict=True)
    for by_stage in accumulated:
        for numel, *counted in by_stage:
            assert counted == [4 * numel] * 3  # gradients that accumulate take four bytes
    many = world_size > 1
    for by_stage in results:
        for stage in range(4):
            f = by_stage[str(stage)]
            whole_state = stage == 0 or not many
            assert f["state"] == 12 * (f["numel"] if whole_state else f["own"])
            assert f["gradients"] == 2 * (f["own"] if stage >= 2 and many else f["numel"])
            released = stage == 3 and many
            resident = f["small"] + f["own"] - f["small_own"] if released else f["numel"]
            assert f["parameters"] == 2 * resident

            # In two steps; a collective moves (N - 1) / N of its bytes, padding included, from every rank.
            one = 2 * 2 * f["padded"] * (world_size - 1) // world_size
            small = 2 * 2 * f["small_padded"] * (world_size - 1) // world_size
            # Two ranks sum gradients where they are, without padding.
            whole = 2 * 2 * f["numel"] if world_size == 2 else 2 * one
            assert f["all_reduce"] == (whole if stage == 0 else 0)
            assert f["reduce_scatter"] == (one if stage >= 1 else 0)
            gathers = 2 * (one - small) - 2 * f["turn_padded"] * (world_size - 1) // world_size
            assert f["all_gather"] == (0 if stage == 0 else one if stage < 3 else gathers + small)
            # One block at a time.
            assert f["most_gathered"] <= (f["block"] if released else 0)
    for stage in range(4):
        ranks = [by_stage[str(stage)] for by_stage in results]
        assert sum(f["own"] for f in ranks) == ranks[0]["numel"]
        assert ranks[0]["padded"] - ranks[0]["numel"] <= ranks[0]["most_padding"]
