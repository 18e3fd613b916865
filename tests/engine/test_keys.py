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


def _run(rank: int, stage: int, keys: dict[str, Any]) -> dict[str, Any]:
    """Train three steps with these keys in the ZeRO section; return counters and hashes."""
    torch.set_num_threads(1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": ADAM,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100} | keys,
        "steps_per_print": 0,
    }
    with zstore.initialize(model=make_net(), config=config)[0] as engine:
        for step in range(3):
            engine.backward(engine(*batch(step, 0, rank)))
            engine.step()
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
        "some persists": {
            "stage3_param_persistence_threshold": 10**9,
            "stage3_model_persistence_threshold": 20_000,
        },
    },
}


def _run_all(rank: int) -> dict[int, dict[str, dict[str, Any]]]:
    return {stage: {name: _run(rank, stage, keys) for name, keys in runs.items()} for stage, runs in RUNS.items()}


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
