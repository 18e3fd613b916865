"""What the engine counts: bytes held, moved and sent, against formulas and what keys of the ZeRO section change."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zstore
from tests.engine.bits import engine_digests
from tests.engine.models import Base, Block
from tests.engine.runs import make_config, moved_since, start, step, take_steps
from zstore.engine import Engine
from zstore.engine.params.record import Residency
from zstore.testing.ranks import run_ranks


def _with_keys(rank: int, stage: int, keys: dict[str, Any]) -> dict[str, Any]:
    """Train three steps with these keys in the ZeRO section; return counters and hashes."""
    config = make_config(stage, gradient_accumulation_steps=1)
    config["zero_optimization"] |= keys
    with start(config) as engine:
        take_steps(engine, 3)
        counted = engine.statistics()
        units = counted.units
        return {
            "operations": {name: link.operations for name, link in counted.links.items()},
            "sent": dict(counted.sent_bytes),
            "reductions beside": counted.overlapped,
            "gathers beside": 0 if units is None else units.overlapped,
            "ahead": 0 if units is None else units.gathered_ahead,
            "bits": engine_digests(engine),
        }


# By stage, the keys of the ZeRO section of each run; the first is what the others are compared with.
SMALL = {"reduce_bucket_size": 20_000}
RUNS: dict[int, dict[str, dict[str, Any]]] = {
    2: {"usual": {}, "without reduce_scatter": {"reduce_scatter": False}},
    3: {
        "usual": {},
        "small buckets of reductions": SMALL,
        "small buckets of gathers": {"allgather_bucket_size": 20_000},
        "without overlap": SMALL | {"overlap_comm": False},
        "nothing persists": {"stage3_param_persistence_threshold": 0},
        "all persists": {"stage3_param_persistence_threshold": 10**9},
        "some persists": {"stage3_param_persistence_threshold": 10**9, "stage3_model_persistence_threshold": 20_000},
    },
}


def _run_all(rank: int) -> dict[int, dict[str, dict[str, Any]]]:
    return {stage: {name: _with_keys(rank, stage, keys) for name, keys in runs.items()} for stage, runs in RUNS.items()}


@pytest.fixture(scope="module")
def counted() -> dict[int, dict[str, dict[str, Any]]]:
    """What rank 0 counted in each run; one start of the ranks serves all tests."""
    found: dict[int, dict[str, dict[str, Any]]] = run_ranks(_run_all, 2)[0]
    return found


def test_no_key_changes_a_bit(counted: dict[int, dict[str, dict[str, Any]]]) -> None:
    for runs in counted.values():
        assert {name for name, one in runs.items() if one["bits"] != runs["usual"]["bits"]} == set()


def test_sizes_of_buckets(counted: dict[int, dict[str, dict[str, Any]]]) -> None:
    usual, reduce, gather = (
        counted[3][name] for name in ("usual", "small buckets of reductions", "small buckets of gathers")
    )
    assert reduce["operations"]["reduce_scatter"] > usual["operations"]["reduce_scatter"]
    assert gather["operations"]["all_gather"] > usual["operations"]["all_gather"]
    assert reduce["sent"]["reduce_scatter"] == usual["sent"]["reduce_scatter"]
    assert gather["sent"]["all_gather"] == usual["sent"]["all_gather"]


def test_without_reduce_scatter_gradients_are_all_reduced(counted: dict[int, dict[str, dict[str, Any]]]) -> None:
    on, off = counted[2]["usual"], counted[2]["without reduce_scatter"]
    assert "all_reduce" not in on["sent"]
    assert "reduce_scatter" not in off["sent"]
    assert off["sent"]["all_reduce"] == 2 * on["sent"]["reduce_scatter"]


def test_overlap_comm_runs_collectives_beside_the_computation(counted: dict[int, dict[str, dict[str, Any]]]) -> None:
    on, off = counted[3]["small buckets of reductions"], counted[3]["without overlap"]
    assert on["reductions beside"] > 0
    assert on["gathers beside"] > 0
    assert off["gathers beside"] == 0
    assert off["ahead"] == on["ahead"]
    for kind in ("reduce_scatter", "all_gather"):
        assert off["sent"].get(kind) == on["sent"].get(kind)


def test_persistent_parameters_are_not_gathered(counted: dict[int, dict[str, dict[str, Any]]]) -> None:
    runs = [counted[3][name] for name in ("nothing persists", "usual", "some persists", "all persists")]
    sent = [one["sent"]["all_gather"] for one in runs]
    assert sent == sorted(sent, reverse=True)
    assert len(set(sent)) == 4
    assert runs[-1]["ahead"] == 0


WIDTH, IDS = 24, torch.arange(12).view(2, 6)


class Peak(nn.Module):
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


def config_of(stage: int, threshold: int, accumulation: int = 1) -> dict[str, Any]:
    config = make_config(stage, gradient_accumulation_steps=accumulation, scheduler=None)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    return config


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
                * sum(r.grid.shard_numel for r in records if r.name.startswith("head.") and r.numel >= threshold),
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
        config = config_of(stage, 50, 3)
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


def on_disk_bytes(engine: Engine) -> int:
    """Bytes of one pass over the arrays that rest on disk, checksums and padding included, from the files."""
    store = engine.training_state.state.store
    total = 0
    for name in store.names():
        if store.tier(name).name == "disk":
            local = store.local(name)
            payload = local.grid.chunk_numel * local.spec.itemsize
            slot = -(-(payload + 4) // 4096) * 4096
            total += slot * local.grid.present_chunks(local.shard)
    return total


def test_a_step_reads_and_writes_the_state_that_rests_on_disk(tmp_path: Path) -> None:
    with start(make_config(3, "nvme", tmp_path)) as engine:
        step(engine)
        before = engine.statistics()
        step(engine)
        moved = moved_since(engine, before)
        one_pass = on_disk_bytes(engine)
        # One parameter got no gradient and none of its state is touched; it is small, and rests in host memory.
        assert one_pass > 0
        for name in ("disk_read", "disk_write", "optimizer_read", "optimizer_write"):
            assert (name, moved[name].bytes) == (name, one_pass)
            assert moved[name].operations > 0
            assert moved[name].busy_s > 0
        assert engine.statistics().links["disk_read"].stall_s["not read yet"] > 0
        # Of so few requests none waits for room.
        assert "queue full" not in engine.statistics().links["disk_write"].stall_s
        assert "all_gather" not in moved  # alone


def test_what_a_save_copies_and_how_long_it_held_training_up(tmp_path: Path) -> None:
    with start(make_config(1)) as engine:
        step(engine)
        assert "checkpoint_write" not in engine.statistics().links
        tickets = [engine.save_checkpoint(str(tmp_path), "a")]
        step(engine)  # else the second save would link what the first one wrote
        tickets.append(engine.save_checkpoint(str(tmp_path), "b"))
        found = engine.statistics().links["checkpoint_write"]
        state = sum(
            engine.training_state.state.store.local(name).nbytes for name in engine.training_state.state.store.names()
        )
    assert found.bytes > 2 * state
    assert found.stall_s == {"save called": sum(ticket.stall_s for ticket in tickets)}


def test_statistics_become_json(tmp_path: Path) -> None:
    with start(make_config(3, "nvme", tmp_path)) as engine:
        step(engine)
        found = engine.statistics()
        data = asdict(found)
        assert set(json.loads(json.dumps(data))) == set(data)
        assert data["links"]["disk_read"]["bytes"] == found.links["disk_read"].bytes
        assert data["process_peak_bytes"] > 10**7
        step(engine)
        assert asdict(found) == data


def _links_of(rank: int, stage: int) -> dict[str, Any]:
    with start(make_config(stage)) as engine:
        step(engine)
        before = engine.statistics()
        step(engine)
        return {
            name: [link.bytes, link.operations, link.busy_s, link.stall_s]
            for name, link in moved_since(engine, before).items()
        }


def test_collectives_are_counted_and_timed() -> None:
    ranks = run_ranks(_links_of, 2, 3)
    for links in ranks:
        for name in ("all_gather", "reduce_scatter", "control"):
            nbytes, operations, busy_s, stall_s = links[name]
            assert nbytes > 0
            assert operations > 0
            assert busy_s >= sum(stall_s.values()) > 0
            assert stall_s["begun earlier"] > 0
    assert [links["all_gather"][0] for links in ranks] == [ranks[0]["all_gather"][0]] * 2
    # Sent when the model was laid out, and not in a step.
    assert ranks[0]["broadcast"][:2] == [0, 0]
