"""What each key of the ZeRO section moves: counters differ, results do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zstore
from tests.engine.bits import engine_digests
from tests.engine.models import batch, make_net
from tests.engine.runs import ADAM
from zstore.testing.ranks import run_ranks


def _run(rank: int, stage: int, changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train three steps with each of `changes` to the ZeRO section; return counters and hashes."""
    torch.set_num_threads(1)
    found = []
    for keys in changes:
        zero = {"stage": stage, "stage3_param_persistence_threshold": 100} | keys
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": ADAM,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "steps_per_print": 0,
        }
        engine, *_ = zstore.initialize(model=make_net(), config=config)
        with engine:
            for step in range(3):
                engine.backward(engine(*batch(step, 0, rank)))
                engine.step()
            counted = engine.statistics()
            units = counted.units
            found.append(
                {
                    "operations": {name: link.operations for name, link in counted.links.items()},
                    "sent": dict(counted.sent_bytes),
                    "numel": sum(
                        p.numel()
                        for name, p in engine.module.named_parameters()
                        if p.requires_grad and not name.startswith("unused.")
                    ),
                    "reductions beside": counted.overlapped,
                    "gathers beside": 0 if units is None else units.overlapped,
                    "ahead": 0 if units is None else units.gathered_ahead,
                    "bits": engine_digests(engine),
                }
            )
    return found


def run(stage: int, *changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what rank 0 counted without and with each of `changes`; no bit differs."""
    counted: list[dict[str, Any]] = run_ranks(_run, 2, stage, [{}, *changes])[0]
    for other in counted:
        assert other["bits"] == counted[0]["bits"]
    return counted


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak), 3])
def test_sizes_of_buckets(stage: int) -> None:
    usual, reduce, gather = run(stage, {"reduce_bucket_size": 20_000}, {"allgather_bucket_size": 20_000})
    assert reduce["operations"]["reduce_scatter"] > usual["operations"]["reduce_scatter"]
    assert gather["operations"]["all_gather"] > usual["operations"]["all_gather"]
    assert reduce["sent"]["reduce_scatter"] == usual["sent"]["reduce_scatter"]
    assert gather["sent"]["all_gather"] == usual["sent"]["all_gather"]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_without_reduce_scatter_gradients_are_all_reduced(stage: int) -> None:
    on, off = run(stage, {"reduce_scatter": False})
    assert "all_reduce" not in on["sent"]
    assert "reduce_scatter" not in off["sent"]
    # At stage 1 they are summed where they are, without padding.
    sent = 3 * 2 * on["numel"] if stage == 1 else 2 * on["sent"]["reduce_scatter"]
    assert off["sent"]["all_reduce"] == sent


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak), 3])
def test_overlap_comm_runs_collectives_beside_the_computation(stage: int) -> None:
    bucket = {"reduce_bucket_size": 20_000}
    _, on, off = run(stage, bucket, bucket | {"overlap_comm": False})
    assert on["reductions beside"] > 0
    assert (off["reductions beside"] > 0) == (stage == 3)
    assert (on["gathers beside"] > 0) == (stage == 3)
    assert off["gathers beside"] == 0
    assert off["ahead"] == on["ahead"]
    for kind in ("reduce_scatter", "all_gather"):
        assert off["sent"].get(kind) == on["sent"].get(kind)


def test_persistent_parameters_are_not_gathered() -> None:
    usual, none, every, some = run(
        3,
        {"stage3_param_persistence_threshold": 0},
        {"stage3_param_persistence_threshold": 10**9},
        {"stage3_param_persistence_threshold": 10**9, "stage3_model_persistence_threshold": 20_000},
    )
    sent = [one["sent"]["all_gather"] for one in (none, usual, some, every)]
    assert sent == sorted(sent, reverse=True)
    assert len(set(sent)) == 4
    assert every["ahead"] == 0
