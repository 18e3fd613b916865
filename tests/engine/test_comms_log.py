"""The log of collectives: bytes by the formulas of the stages, times, selection, texts."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
import torch
from torch import nn

import zstore
from tests.engine.runs import ADAM
from zstore.errors import ConfigError, UsageError
from zstore.profiling import comms_summary
from zstore.ranks.comms_log import bus_factor
from zstore.testing.ranks import run_ranks

NUMEL = 64 * 32
RANKS = 2


def _run(rank: int) -> dict[str, Any]:
    """Train with each kind of log; return what rank `rank` says."""
    torch.set_num_threads(1)
    lines = io.StringIO()
    logger, handler = logging.getLogger("zstore"), logging.StreamHandler(lines)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    found: dict[str, Any] = {}
    for name, keys in {
        "all": {"enabled": True},
        "some": {
            "enabled": True,
            "prof_all": False,
            "prof_ops": ["reduce_scatter_tensor"],
            "debug": True,
            "verbose": True,
        },
        "off": {},
    }.items():
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": ADAM,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "steps_per_print": 0,
            "comms_logger": keys,
        }
        torch.manual_seed(0)
        with zstore.initialize(model=nn.Sequential(nn.Linear(64, 32, bias=False)), config=config)[0] as engine:
            for _ in range(3):
                engine.backward(engine(torch.ones(2, 64)).mean())
                engine.step()
            if engine.world.log is None:
                with pytest.raises(UsageError, match='"comms_logger"'):
                    comms_summary(engine)
                continue
            times = engine.world.log.times()
            found[name] = [
                (one.operation, one.purpose, one.nbytes, one.caller, spent.calls) for one, spent in times.items()
            ]
            assert all(0 < spent.shortest_s <= spent.longest_s <= spent.total_s for spent in times.values())
            found[f"{name} sent"] = dict(engine.world.sent_bytes)
            found[f"{name} text"] = comms_summary(engine, show_straggler=True)
    found["log"] = lines.getvalue()
    return found


def test_collectives_of_stage_3() -> None:
    first, second = run_ranks(_run, RANKS)
    nbytes = 4 * NUMEL
    big = {(operation, purpose, size): calls for operation, purpose, size, _, calls in first["all"]}
    gathers, reductions = big["all_gather", "all_gather", nbytes], big["all_to_all", "reduce_scatter", nbytes]
    assert reductions == 3  # one a step
    assert gathers >= 3  # as many as the engine sent
    assert first["all sent"]["all_gather"] == gathers * nbytes // RANKS
    sent = sum(calls * size for (_, purpose, size), calls in big.items() if purpose == "reduce_scatter")
    assert first["all sent"]["reduce_scatter"] == sent // RANKS
    assert any(purpose == "control" for _, purpose, *_ in first["all"])
    assert [(row[0], row[1], row[2], row[4]) for row in first["some"]] == [("all_to_all", "reduce_scatter", nbytes, 3)]
    assert first["some"][0][3].startswith("collectives.py:")
    header, *rows = first["all text"].splitlines()
    assert header.split("  ")[0] == "operation"
    assert header.endswith("straggler ms")
    assert len(rows) == len(first["all"])
    assert first["some text"].splitlines()[0].endswith("caller")
    # Verbose lines are rank 0's, and so is the table at the end.
    assert first["log"].count("collective: all_to_all for reduce_scatter 8.19 kB in ") == 3
    assert "collectives of rank 0:\noperation" in first["log"]
    assert "collective" not in second["log"]


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    for operation in ("all_gather", "reduce_scatter", "all_to_all"):
        assert bus_factor(operation, 4) == 3 / 4
    assert bus_factor("broadcast", 4) == bus_factor("send", 4) == 1


def test_unknown_collectives_are_an_error() -> None:
    config = {"train_batch_size": 1, "optimizer": ADAM, "comms_logger": {"enabled": True, "prof_ops": ["all_reduced"]}}
    with pytest.raises(ConfigError, match="no collective; expected some of all_gather, all_to_all"):
        zstore.initialize(model=nn.Linear(1, 1), config=config)
