"""Copies of the state in groups of ranks (MiCS) and second copies of the parameters (hpZ): the bits of full sharding, and
bytes by formula."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import zstore
from tests.engine.bits import Case, compare_all
from tests.engine.block_models import Base, ids_of
from tests.engine.models import Block
from zstore.testing.ranks import run_ranks

MICS, HPZ = {"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}
RANKS, GROUP, COPIES, STEPS, MICRO = 4, 2, 2, 2, 2


def _cases() -> list[Case]:
    return [
        Case(3, "nvme", "bf16", 2, 0.25, 40_000, parameters="cpu", overlap="forward", keys=MICS, seed=1),
        Case(3, "none", "bf16", 1, 0.0, overlap="backward", keys=MICS, seed=2),
        Case(2, "cpu", "fp16", 1, 0.25, keys=MICS, seed=3),
        Case(1, "none", "bf16", 2, 0.25, 40_000, keys=MICS, seed=4),
        Case(3, "cpu", "bf16", 2, 0.25, parameters="nvme", overlap="forward", keys=HPZ, seed=5),
        Case(3, "none", "fp32", 1, 0.0, overlap="backward", keys=HPZ, seed=6),
    ]


def test_bits_are_those_of_the_plain_loop() -> None:
    cases = [asdict(case) for case in _cases()]
    for failed in run_ranks(compare_all, RANKS, RANKS, cases, timeout_s=120):
        assert failed == []


def _step_bytes(rank: int, folder: str, changes: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Train two steps with each of `changes` to the ZeRO section; return what the second one sent and what is held, beside
    the plan's numbers and those that formulas are made of."""
    found = []
    for keys in changes:
        torch.manual_seed(0)
        zero = {"stage": 3, "stage3_param_persistence_threshold": 50} | keys
        for key in [key for key in zero if key.startswith("offload")]:
            zero[key] = {"device": "nvme", "nvme_path": folder}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICRO,
            "optimizer": {"type": "AdamW"},
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "steps_per_print": 0,
            "zstore": {"step_overlap": "none"},
        }
        with zstore.initialize(model=Base([Block(24) for _ in range(3)]), config=config)[0] as engine:
            for step in range(2):
                before = engine.statistics()
                for _ in range(MICRO):
                    engine.backward(engine(ids_of(step, rank)))
                    engine.step()
            now, plan = engine.statistics(), engine.training_state.plan
            records = engine.training_state.state.records
            links = {name: link["bytes"] for name, link in now.links_since(before).items()}
            large = [record for record in records if record.numel >= 50]
            over_all = {record: RANKS * record.grid.shard_numel for record in records}
            found.append(
                {
                    "within": links.get("within_group", 0),
                    "between": links.get("between_groups", 0),
                    "all": sum(links.get(kind, 0) for kind in ("all_gather", "reduce_scatter", "all_reduce")),
                    "read": now.store.disk_read_bytes - before.store.disk_read_bytes,
                    "planned within": plan.sent_total.within,
                    "planned between": plan.sent_total.between,
                    "planned read": plan.traffic_total.read,
                    "state": now.held.optimizer_state,
                    "second": now.held.secondary,
                    "planned second": plan.held["secondary parameters"].total
                    if "secondary parameters" in plan.held
                    else 0,
                    "own": sum(record.owned_numel for record in records),
                    "all padded": 2 * sum(over_all.values()),
                    "large padded": 2 * sum(over_all[record] for record in large),
                    # The head is the last unit of a forward and the first of the backward, and gathered once for both.
                    "turn padded": 2 * sum(over_all[record] for record in large if record.name.startswith("head.")),
                }
            )
    return found


def test_bytes_are_those_of_the_formulas_and_of_the_plan(tmp_path: Path) -> None:
    offloads = {"offload_optimizer": {}, "offload_param": {}}
    changes = [{}, MICS, HPZ, HPZ | offloads, MICS | {"stage": 2}, MICS | {"stage": 1, "reduce_scatter": False}]
    near, far = GROUP - 1, RANKS - GROUP
    by_rank = run_ranks(_step_bytes, RANKS, str(tmp_path), changes)
    for full, mics, hpz, offloaded, second_stage, first_stage in by_rank:
        whole, large = full["all padded"], full["large padded"]
        small = whole - large
        gathers = MICRO * (2 * large - full["turn padded"])
        # Full sharding: a reduce-scatter for each micro-batch, gathers for forward and backward, small ones after the update.
        assert full["all"] == (MICRO * whole + gathers + small) * (RANKS - 1) // RANKS
        # Copies: the same reduce-scatter and a gather between the groups of what it gave; other gathers within the group.
        assert mics["between"] == MICRO * whole * (far + COPIES - 1) // RANKS
        assert mics["within"] == MICRO * whole * near // RANKS + (gathers + small) * near // GROUP
        # Second copies: the first gather of a step is from all ranks.
        assert hpz["between"] == (MICRO * whole + large + small) * far // RANKS
        assert hpz["within"] == (MICRO * whole + large + small) * near // RANKS + (gathers - large) * near // GROUP
        assert second_stage["between"] == mics["between"]
        assert second_stage["within"] == MICRO * whole * near // RANKS + whole * near // GROUP
        # An all-reduce a step, over all ranks.
        assert first_stage["between"] == 2 * whole * far // RANKS
        assert first_stage["within"] == 2 * whole * near // RANKS + whole * near // GROUP
        for one in (mics, hpz, offloaded, second_stage, first_stage):
            assert (one["within"], one["between"]) == (one["planned within"], one["planned between"])
            assert one["within"] + one["between"] == one["all"]
            assert one["second"] == one["planned second"]
        assert full["planned within"] == full["all"]
        assert (offloaded["between"], offloaded["read"]) == (hpz["between"], offloaded["planned read"])
        assert mics["state"] == 12 * mics["own"]
        assert hpz["state"] == full["state"] == 12 * full["own"]
    numel = sum(by_rank[rank][0]["own"] for rank in range(RANKS))
    for group in range(COPIES):
        ranks = by_rank[GROUP * group :][:GROUP]
        assert sum(one[1]["own"] for one in ranks) == numel
        assert 2 * numel > sum(one[2]["second"] for one in ranks) == sum(one[3]["second"] for one in ranks) > 0
