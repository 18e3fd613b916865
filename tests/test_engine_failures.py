"""A rank that dies, hangs or fails alone: every other rank raises soon, says who and why, and nothing hangs afterwards."""

from __future__ import annotations

import errno
import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine_runs import make_config, start, step
from zstore import incident
from zstore.engine import Engine, wiring
from zstore.errors import UsageError
from zstore.store import TensorStore
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.ranks import run_ranks

SOON_S = 15.0
"""Seconds until every rank has failed: about one in most cases, four for a killed rank; the machine may be busy."""
LIMIT = 40


def _kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(*_: Any) -> None:
    raise ValueError("what only this rank sees")


def _arrange(engine: Engine, where: str, happen: Any, files: FaultyFiles) -> None:
    """Let something happen to this rank in its next step."""
    block = engine.module.blocks[1]
    if where == "forward":
        block.register_forward_pre_hook(happen)
    elif where == "backward":
        block.register_forward_hook(lambda module, args, output: output.register_hook(happen) and None)
    elif where == "read":
        files.inject(Fault(kind="read", error_number=errno.EIO))
    elif where == "step":
        # After the other ranks' update, before they are told that all went well.
        engine.training_state.state.step = happen  # type: ignore[method-assign]
    elif where == "reduce":
        engine.training_state.gradients.reduce = happen  # type: ignore[method-assign]


def _message(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def _run(rank: int, folder: str, stage: int, where: str, what: str) -> dict[str, Any]:
    files = FaultyFiles()
    # Nobody needs long to answer here: the test need not wait longer.
    incident.ABSENT_S = 1.0
    tier = "nvme" if where == "read" else "none"
    wiring.TensorStore = functools.partial(TensorStore, files=files)  # type: ignore[assignment, misc]
    silent_s = 2 if what == "stop" else 45
    engine = start(make_config(stage, tier, folder, zstore={"silent_rank_s": silent_s}))
    step(engine)
    if rank == FAILING:
        _arrange(engine, where, {"kill": _kill, "raise": _raise, "stop": _stop}[what], files)
    found: dict[str, Any] = {}
    started = time.monotonic()
    try:
        step(engine)
    except Exception as error:
        found |= {"seconds": time.monotonic() - started, "type": type(error).__name__, "text": _message(error)}
    try:
        step(engine)
    except UsageError as error:
        found["refusal"] = str(error)
    started = time.monotonic()
    engine.close()
    torch.distributed.destroy_process_group()
    return found | {"closing": time.monotonic() - started}


CASES = [
    *((3, 3, where, "kill") for where in ("forward", "backward", "step")),
    (3, 2, "backward", "kill"),
    (1, 2, "step", "kill"),
    (3, 3, "forward", "raise"),
    (1, 2, "forward", "raise"),
    (3, 2, "backward", "raise"),
    (3, 2, "reduce", "raise"),
    (3, 2, "read", "raise"),
    (3, 3, "forward", "stop"),
]
FAILING = 1


@pytest.mark.parametrize(("stage", "world_size", "where", "what"), CASES)
def test_one_rank_fails(nvme: Path, stage: int, world_size: int, where: str, what: str) -> None:
    may_die = () if what == "raise" else (FAILING,)
    results = run_ranks(_run, world_size, str(nvme), stage, where, what, timeout_s=LIMIT, may_die=may_die)
    if what != "raise":
        assert results.pop(FAILING) is None
    for rank, found in enumerate(results):
        assert found["seconds"] < SOON_S
        assert found["closing"] < SOON_S
        # A failure that the ranks agreed on leaves them able to talk: a load mends it.
        go_on = (
            "a mixture of two: load a checkpoint" if where == "read" else "Start the processes anew and load the last"
        )
        assert go_on in found["refusal"]
        if what == "raise" and rank == FAILING:
            assert found["type"] == ("StorageError" if where == "read" else "ValueError")
            continue
        assert found["type"] == "RankError"
        assert f"rank 1 of {world_size} failed" in found["text"]
        if what != "raise":
            assert "rank 1 is gone" in found["text"]
            assert "its process was killed, or its machine is lost or stopped" in found["text"]
            assert "stops with it, in " in found["text"]
            continue
        assert f"in {'step' if where in ('read', 'reduce') else where}" in found["text"]
        assert ("Input/output error" if where == "read" else "what only this rank sees") in found["text"]
