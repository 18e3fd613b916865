"""Copies of the state in groups of ranks (MiCS) and second copies of the parameters (hpZ): the bits of full sharding, and
bytes by formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zstore
from tests.engine.bits import Case, compare, digest, engine_digests
from tests.engine.block_models import Base, ids_of
from tests.engine.models import Block, batch, make_net
from tests.engine.resume_runs import config as resumed_config
from tests.engine.resume_runs import train
from tests.engine.runs import make_config
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.engine import Engine
from zstore.engine.access.safe_access import safe_get_full_fp32_param
from zstore.engine.config.config import load_config
from zstore.engine.config.resolve import ResolveContext
from zstore.engine.extras.zeropp.copies import CopiesReduction
from zstore.engine.params.record import make_record
from zstore.engine.params.sharding import Sharding
from zstore.engine.zero.collectives import pack, plan_buckets, put_rows
from zstore.errors import ConfigError
from zstore.ranks.groups import make_groups
from zstore.ranks.work import Done, Kind, Work
from zstore.ranks.world import World
from zstore.testing.ranks import run_ranks

MICS, HPZ = {"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}
RANKS, GROUP, COPIES, STEPS, MICRO = 4, 2, 2, 2, 2


CASES = [
    Case(3, "nvme", "bf16", 2, 0.25, 40_000, parameters="cpu", overlap="forward", keys=MICS, seed=1),
    Case(2, "cpu", "fp16", 1, 0.25, keys=MICS, seed=3),
    Case(3, "none", "fp32", 1, 0.0, overlap="backward", keys=HPZ, seed=6),
]
MORE_CASES = [
    Case(3, "none", "bf16", 1, 0.0, overlap="backward", keys=MICS, seed=2),
    Case(1, "none", "bf16", 2, 0.25, 40_000, keys=MICS, seed=4),
    Case(3, "cpu", "bf16", 2, 0.25, parameters="nvme", overlap="forward", keys=HPZ, seed=5),
]


def _compare(rank: int, cases: list[Case]) -> list[str]:
    return [f"{case}: {found}" for case in cases for found in compare(case, rank, RANKS, steps=2)]


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.soak)], ids=["some", "more"])
def test_bits_are_those_of_the_plain_loop(cases: list[Case]) -> None:
    for differences in run_ranks(_compare, RANKS, cases):
        assert differences == []


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
            # A group's shards have less padding where all rows are in a few of the shards over all ranks.
            near = {record: GROUP * min(COPIES, record.grid.num_shards) * record.grid.shard_numel for record in records}
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
                    "all near": 2 * sum(near.values()),
                    "large near": 2 * sum(near[record] for record in large),
                    "turn near": 2 * sum(near[record] for record in large if record.name.startswith("head.")),
                    # The head is the last unit of a forward and the first of the backward, and gathered once for both.
                    "turn padded": 2 * sum(over_all[record] for record in large if record.name.startswith("head.")),
                }
            )
    return found


def test_bytes_are_those_of_the_formulas_and_of_the_plan(tmp_path: Path) -> None:
    offloads = {"offload_optimizer": {}, "offload_param": {}}
    changes = [{}, MICS, HPZ, HPZ | offloads, MICS | {"stage": 1, "reduce_scatter": False}]
    near, far = GROUP - 1, RANKS - GROUP
    by_rank = run_ranks(_step_bytes, RANKS, str(tmp_path), changes)
    for full, mics, hpz, offloaded, first_stage in by_rank:
        whole, large = full["all padded"], full["large padded"]
        small = whole - large
        gathers = MICRO * (2 * large - full["turn padded"])
        gathers_near = MICRO * (2 * full["large near"] - full["turn near"])
        small_near = full["all near"] - full["large near"]
        # Full sharding: a reduce-scatter for each micro-batch, gathers for forward and backward, small ones after the update.
        assert full["all"] == (MICRO * whole + gathers + small) * (RANKS - 1) // RANKS
        # Copies: the same reduce-scatter and a gather between the groups of what it gave; other gathers within the group.
        assert mics["between"] == MICRO * whole * (far + COPIES - 1) // RANKS
        assert mics["within"] == MICRO * whole * near // RANKS + (gathers_near + small_near) * near // GROUP
        # Second copies: the first gather of a step is from all ranks.
        assert hpz["between"] == (MICRO * whole + large + small) * far // RANKS
        later = gathers_near - full["large near"]
        assert hpz["within"] == (MICRO * whole + large + small) * near // RANKS + later * near // GROUP
        # An all-reduce a step, over all ranks.
        assert first_stage["between"] == 2 * whole * far // RANKS
        assert first_stage["within"] == 2 * whole * near // RANKS + full["all near"] * near // GROUP
        for one in (mics, hpz, offloaded, first_stage):
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


def _engine(keys: dict[str, Any], nvme: str, seed: int) -> Engine:
    config = resumed_config(3, "nvme", nvme) | {"train_micro_batch_size_per_gpu": 1}
    config["zero_optimization"] |= keys
    return zstore.initialize(model=make_net(seed, width=112), config=config)[0]


def _save_copies(rank: int, folder: str) -> tuple[int, dict[str, str], dict[str, str]]:
    """Save a run of two copies, load it again, and train on; return linked bytes and hashes of both runs after that."""
    with _engine(MICS, folder, 0) as engine:
        train(engine, 1)
        engine.save_checkpoint(f"{folder}/ckpt", "copies")
        engine.save_checkpoint(f"{folder}/part", "part", trainable_only=True)
        train(engine, 1)
        expected = engine_digests(engine)
    with _engine(MICS, folder, 1) as engine:
        engine.load_checkpoint(f"{folder}/ckpt", "copies")
        report = engine.load_report
        train(engine, 1)
        return report.linked_bytes, expected, engine_digests(engine)


def _load_and_save(rank: int, folder: str, keys: dict[str, Any], loads: str, saves: str) -> None:
    with _engine(keys, folder, 1) as engine:
        engine.load_checkpoint(f"{folder}/ckpt", loads)
        engine.save_checkpoint(f"{folder}/ckpt", saves)
        # What is left out is compared by digests with what the load before gave.
        engine.load_checkpoint(f"{folder}/part", "part")
        train(engine, 1)


@pytest.mark.soak
def test_checkpoints_of_copies_are_written_once_and_load_anywhere(tmp_path: Path) -> None:
    folder = str(tmp_path)
    for linked, expected, resumed in run_ranks(_save_copies, RANKS, folder):
        assert linked > 0
        assert resumed == expected
    run_ranks(_load_and_save, 3, folder, {}, "copies", "of-three")
    run_ranks(_load_and_save, RANKS, folder, MICS, "of-three", "back")
    with open_checkpoint(tmp_path / "ckpt", "copies") as copies:
        embed = copies.array("model/embed.weight")
        assert embed.grid.num_shards == GROUP
        files = [path for path in (tmp_path / "ckpt" / "copies").rglob("c.*") if "model/embed.weight" in str(path)]
        assert len(files) == GROUP
        for tag in ("of-three", "back"):
            with open_checkpoint(tmp_path / "ckpt", tag) as other:
                assert verify_checkpoint(other) == []
                assert copies.arrays.keys() == other.arrays.keys()
                for name in copies.arrays:
                    assert copies.read_array(name).tobytes() == other.read_array(name).tobytes(), (tag, name)


class _Native(World):
    """Ranks whose backend has a reduction of its own."""

    def reduce_scatter_mean(self, out: torch.Tensor, send: torch.Tensor, *, kind: Kind) -> Work:
        """Fill `out` with the mean of this rank's row, as the backend would."""
        received = torch.empty_like(send)
        self.all_to_all(received, send, kind=kind).wait()
        out.copy_(received.mean(0))
        return Done()


def _masters(engine: Engine) -> dict[str, str]:
    return {
        name: digest(safe_get_full_fp32_param(p).flatten())
        for name, p in engine.module.named_parameters()
        if p.requires_grad
    }


def _with_others(rank: int) -> dict[str, Any]:
    """Train with an optimizer of whole tensors by three configs, one of them from a model built in shards; and reduce as
    other backends do."""
    found: list[dict[str, str]] = []
    for keys, built in (({}, False), (MICS, True), (HPZ, False)):
        config = make_config(3, "cpu", optimizer={"type": "adafactor", "params": {"lr": 1e-2}}, scheduler=None)
        config["zero_optimization"] |= keys
        with zstore.Init(config=config, enabled=built):
            model = make_net()
        with zstore.initialize(model=model, config=config)[0] as engine:
            for number in range(4):  # two steps
                engine.backward(engine(*batch(0, number, rank)))
                engine.step()
            found.append(_masters(engine) | {"norm": str(engine.get_global_grad_norm())})
    current = World.current()
    world = _Native(**current.__dict__ | {"backend": "native"})
    groups = make_groups(world, GROUP)
    record = make_record("p", (), nn.Parameter(torch.zeros(100, 16)), group=0, sharding=_TWO_COPIES, rank=rank)
    (bucket,) = plan_buckets([record], RANKS, 10_000)
    gradients = [torch.randn(1600, generator=torch.Generator().manual_seed(each)) for each in range(RANKS)]
    reduction = CopiesReduction(groups, world, bucket, pack(bucket, RANKS, lambda _: gradients[rank]), "reduce_scatter")
    rows = torch.empty(record.owned_numel)
    put_rows(bucket, reduction.finish(), lambda _, where, mean: rows[where].copy_(mean))
    mean = torch.stack(gradients).mean(0)[slice(*record.owned_range)]
    sent = {name: link.bytes for name, link in world.links.statistics().items()}
    groups.release()
    return {"masters": found, "close": torch.allclose(rows, mean), "sent": sent, "bytes": 4 * RANKS * bucket.cols}


_TWO_COPIES = Sharding.of_stage(3, RANKS, copy_size=GROUP)


@pytest.mark.soak
def test_whole_tensors_models_in_shards_and_reductions_of_other_backends() -> None:
    for one in run_ranks(_with_others, RANKS):
        assert one["masters"][1:] == one["masters"][:1] * 2
        assert one["close"]
        assert one["sent"]["within_group"] == one["bytes"] * (GROUP - 1) // GROUP
        assert one["sent"]["between_groups"] == 2 * one["bytes"] * (COPIES - 1) // RANKS


@pytest.mark.parametrize(
    ("zero", "world_size", "message"),
    [
        (
            {"stage": 3, "mics_shard_size": 3},
            8,
            "mics_shard_size 3 does not divide the world size 8; take 2 or 4 or 8, or",
        ),
        ({"stage": 3, "zero_hpz_partition_size": 8}, 1, "8 does not divide the world size 1; leave it out"),
        ({"stage": 0, "mics_shard_size": 2}, 2, "mics_shard_size.* needs stage 1, 2 or 3, got stage 0"),
        ({"stage": 2, "zero_hpz_partition_size": 2}, 2, "zero_hpz_partition_size.* needs stage 3, got stage 2"),
        ({"stage": 3, **MICS, **HPZ}, 4, "leave out zero_hpz_partition_size, or with less memory mics_shard_size"),
        ({"stage": 3, "mics_shard_size": 1}, 4, "a group of one rank shards nothing; take stage 0"),
    ],
)
def test_groups_that_cannot_be_are_refused(zero: dict[str, Any], world_size: int, message: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    with pytest.raises(ConfigError, match=message):
        load_config(config).resolve(ResolveContext(world_size=world_size))
