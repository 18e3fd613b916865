"""Second copies of the parameters in groups of ranks (hpZ): the bits of full sharding, and bytes by formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zstore
from tests.engine.bits import Case, compare
from tests.engine.block_models import Base, ids_of
from tests.engine.models import Block
from tests.engine.runs import moved_since
from zstore.engine.config.config import load_config
from zstore.engine.config.resolve import ResolveContext
from zstore.errors import ConfigError
from zstore.testing.ranks import run_ranks

HPZ = {"zero_hpz_partition_size": 2}
RANKS = 4

CASES = [Case(3, "none", "fp32", 1, 0.0, overlap="backward", keys=HPZ, seed=6)]
MORE_CASES = [Case(3, "cpu", "bf16", 2, 0.25, parameters="nvme", overlap="forward", keys=HPZ, seed=5)]


def _compare(rank: int, cases: list[Case]) -> list[str]:
    return [f"{case}: {found}" for case in cases for found in compare(case, rank, RANKS, steps=2)]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.soak)], ids=["some", "more"])
def test_bits_are_those_of_the_plain_loop(cases: list[Case]) -> None:
    for differences in run_ranks(_compare, RANKS, cases):
        assert differences == []


def _step_bytes(rank: int, folder: str, changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train two steps with each of `changes` to the ZeRO section; return what the second one sent and what is held, and
    planned."""
    found = []
    for keys in changes:
        torch.manual_seed(0)
        zero = {"stage": 3, "stage3_param_persistence_threshold": 50} | keys
        for key in [key for key in zero if key.startswith("offload")]:
            zero[key] = {"device": "nvme", "nvme_path": folder}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW"},
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "steps_per_print": 0,
            "zstore": {"step_overlap": "none"},
        }
        with zstore.initialize(model=Base([Block(24) for _ in range(3)]), config=config)[0] as engine:
            for step in range(2):
                before = engine.statistics()
                for _ in range(2):
                    engine.backward(engine(ids_of(step, rank)))
                    engine.step()
            now, plan = engine.statistics(), engine.training_state.plan
            records = engine.training_state.state.records
            links = {name: link.bytes for name, link in moved_since(engine, before).items()}
            second = plan.held.get("secondary parameters")
            found.append(
                {
                    "sent": (links.get("within_group", 0), links.get("between_groups", 0)),
                    "all": sum(links.get(kind, 0) for kind in ("all_gather", "reduce_scatter", "all_reduce")),
                    "state": now.held.optimizer_state,
                    "second": now.held.secondary,
                    "planned second": second.total if second is not None else 0,
                    "own": sum(record.owned_numel for record in records),
                }
            )
    return found


def test_second_copies_are_as_planned_and_fewer_bytes_leave_a_group(tmp_path: Path) -> None:
    offloads = {"offload_optimizer": {}, "offload_param": {}}
    by_rank = run_ranks(_step_bytes, RANKS, str(tmp_path), [{}, HPZ, HPZ | offloads])
    for full, hpz, offloaded in by_rank:
        for one in (hpz, offloaded):
            assert sum(one["sent"]) == one["all"]
            assert one["second"] == one["planned second"]
        # Of four gathers one is from all ranks, and of each tensor two of three other ranks are in another group.
        assert hpz["sent"][1] < full["all"] * 2 / 3 * 0.7
        assert offloaded["sent"] == hpz["sent"]
        assert hpz["state"] == full["state"] == 12 * full["own"]
    numel = sum(rank[0]["own"] for rank in by_rank)
    for group in (by_rank[:2], by_rank[2:]):
        assert 2 * numel > sum(one[1]["second"] for one in group) == sum(one[2]["second"] for one in group) > 0


@pytest.mark.parametrize(
    ("zero", "world_size", "message"),
    [
        (
            {"stage": 3, "zero_hpz_partition_size": 3},
            8,
            "size 3 does not divide the world size 8; take 2 or 4 or 8, or",
        ),
        ({"stage": 3, "zero_hpz_partition_size": 8}, 1, "8 does not divide the world size 1; leave it out"),
        ({"stage": 3, "mics_shard_size": 2}, 4, "write zero_hpz_partition_size at stage 3"),
        ({"stage": 3, "zeropp_loco_param": {"err_beta": 0.8}}, 4, "quantized_gradient_bits: 8"),
        ({"stage": 2, "zero_hpz_partition_size": 2}, 2, "zero_hpz_partition_size.* needs stage 3, got stage 2"),
    ],
)
def test_groups_that_cannot_be_are_refused(zero: dict[str, Any], world_size: int, message: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    with pytest.raises(ConfigError, match=message):
        load_config(config).resolve(ResolveContext(world_size=world_size))
