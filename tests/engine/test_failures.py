"""A rank that dies, hangs or fails alone: every other rank raises soon, says who and why, and nothing hangs afterwards."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm
from tests.engine.runs import make_config, start, step, take_steps, unchanged
from tests.engine.step_modes import say
from zstore.checkpoint.reader import tags
from zstore.engine import Engine
from zstore.engine.checkpoint import save as checkpointing
from zstore.errors import RankError, UsageError
from zstore.ranks import incident
from zstore.testing.faults import Fault, FaultyFiles, GatedFiles
from zstore.testing.ranks import run_ranks


def _kill(*_: Any, **_keys: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(*_: Any, **_keys: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(*_: Any, **_keys: Any) -> None:
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
        engine.training_state.gradients.take = happen  # type: ignore[method-assign]
    elif where == "reduce":
        engine.training_state.gradients.reduce = happen  # type: ignore[method-assign]


def _run(rank: int, folder: str, stage: int, where: str, what: str, mode: str) -> dict[str, Any]:
    """Train until a rank fails; with a step mode beside "none" everything rests on disk."""
    files = FaultyFiles()
    # Nobody needs long to answer here: the test need not wait longer.
    incident.ABSENT_S = 1.0
    keys = {"silent_rank_s": 2 if what == "stop" else 1000, "step_overlap": mode}
    own = "nvme" if mode != "none" else "none"
    config = make_config(stage, "nvme" if where == "read" else own, folder, own, zstore=keys)
    engine = start(config, _files=files)
    step(engine)
    if rank == FAILING:
        _arrange(engine, where, {"kill": _kill, "raise": _raise, "stop": _stop}[what], files)
    found: dict[str, Any] = {}
    try:
        take_steps(engine, 1 if mode == "none" else 2)
    except Exception as error:
        found |= {"type": type(error).__name__, "text": say(error)}
    try:
        step(engine)
    except UsageError as error:
        found["refusal"] = str(error)
    engine.close()
    torch.distributed.destroy_process_group()
    return found


CASES = [
    (3, 3, "forward", "kill", "none"),
    (3, 2, "step", "kill", "backward"),
    (1, 2, "forward", "raise", "none"),
    (3, 2, "read", "raise", "none"),
    (3, 3, "forward", "stop", "none"),
]
MORE_CASES = [
    (3, 2, "backward", "kill", "forward"),
    (1, 2, "step", "kill", "none"),
    *((3, 2, where, "raise", "none") for where in ("backward", "reduce")),
    *((3, 3, where, "kill", "none") for where in ("backward", "step")),
    *((3, 2, where, "kill", "forward") for where in ("forward", "step")),
    *((3, 2, "backward", "kill", mode) for mode in ("none", "backward")),
    (3, 3, "forward", "raise", "none"),
]
FAILING = 1


@pytest.mark.parametrize(
    ("stage", "world_size", "where", "what", "mode"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE_CASES)],
)
def test_a_failure_of_one_rank_ends_the_others_soon(
    nvme: Path, stage: int, world_size: int, where: str, what: str, mode: str
) -> None:
    may_die = () if what == "raise" else (FAILING,)
    # A rank that waits for silence or for the process group's own timeout is stopped by the ranks' guard before.
    results = run_ranks(_run, world_size, str(nvme), stage, where, what, mode, may_die=may_die)
    ranks = dict(enumerate(results))
    if what != "raise":
        assert ranks.pop(FAILING) is None
    for rank, found in ranks.items():
        # A failure that the ranks agreed on leaves them able to talk: a load mends it.
        go_on = (
            "the state is inconsistent; load a checkpoint"
            if where == "read"
            else "Start the processes anew and load the last"
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
            # The rank that is gone cannot say where it was; this one says where it waited.
            unit = "backward, unit '[a-z0-9.]+'"
            at = unit if where != "step" else f"(step|{unit})" if mode == "backward" else "step"
            assert re.search(rf"; rank {rank} stops with it, in {at}, collective [a-z_]+\n", found["text"])
            continue
        if where == "read":
            assert "rank 1 of 2 failed in step; rank 0 stops with it" in found["text"]
            assert "Input/output error" in found["text"]
            continue
        at = "step" if where == "reduce" else f"{where}, unit 'blocks.1'" if stage == 3 else where
        assert (
            f"(rank 1 in {at}: ValueError: what only this rank sees); rank {rank} stops with it, in " in found["text"]
        )


# -- what ends the process --------------------------------------------------------------------------------------------

LOOP = """
import os, signal, sys
import zstore
from tests.engine.step_modes import say
from tests.engine.runs import take_steps, make_config, start, step

zstore.init_distributed()
engine = start(make_config(3))
for number in range(4):
    if number == 1 and engine.global_rank == int(sys.argv[1]):
        if sys.argv[2] == "raise":
            raise ValueError("a bad file in the data")
        if sys.argv[2] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        break
    step(engine)
"""


@pytest.mark.parametrize(
    ("failing", "what", "said"),
    [
        (0, "raise", "rank 0 of 2 failed (rank 0 in the training loop: ValueError: a bad file in the data)"),
        # With it goes the store, where the ranks leave their notes.
        (0, "kill", "rank 0 of 2 failed (rank 0 is gone)"),
        pytest.param(1, "stop early", "rank 1 of 2 failed (rank 1 closed its engine)", marks=pytest.mark.soak),
    ],
)
def test_a_process_ends_and_the_other_ends_too(failing: int, what: str, said: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": str(Path(__file__).parents[2])}
    ranks = [
        warm.Popen(
            [sys.executable, "-c", LOOP, str(failing), what],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=200)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    own = {"raise": 1, "kill": -signal.SIGKILL, "stop early": 0}[what]
    assert [process.returncode for process in ranks] == ([own, 1] if failing == 0 else [1, own])
    assert said in errors[1 - failing]
    assert "terminate called" not in "".join(errors)


# -- a save ------------------------------------------------------------------------------------------------------------


def _dies_in_a_save(rank: int, folder: str) -> str:
    incident.ABSENT_S, checkpointing._END_WELL_S = 1.0, 0.5  # type: ignore[assignment]
    held = GatedFiles("write_small", pattern="*manifest*")
    engine = start(make_config(1, zstore={"silent_rank_s": 2}), _files=held if rank == 1 else None)
    step(engine)
    if rank == 1:
        engine.save_checkpoint(folder, wait=False)
        held.arrived(1)
        _kill()
    with pytest.raises(RankError, match="rank 1 is gone") as caught:
        engine.save_checkpoint(folder)
    engine.close()
    return str(caught.value)


def test_nobody_waits_for_the_manifest_of_a_dead_rank(tmp_path: Path) -> None:
    text, _ = run_ranks(_dies_in_a_save, 2, str(tmp_path), may_die=(1,))
    assert "rank 0 stops with it, in save" in text
    assert list(tags(tmp_path)) == []


# -- errors of all ranks at once --------------------------------------------------------------------------------------


def _all_raise(rank: int) -> list[str]:
    engine = start(make_config(3))
    seen = []
    with engine:
        step(engine)
        for where in ("forward", "backward"):
            handle = engine.module.blocks[1].register_forward_hook(
                (lambda *_: _raise()) if where == "forward" else lambda m, a, out: out.register_hook(_raise) and None
            )
            try:
                step(engine)
            except ValueError as error:
                seen.append(say(error))
            handle.remove()
        with unchanged(engine):
            pass
    return seen


def test_what_all_ranks_raise_leaves_the_run_as_it_was() -> None:
    for seen in run_ranks(_all_raise, 2):
        assert seen == ["what only this rank sees"] * 2


def test_of_a_rank_that_was_interrupted_no_traceback_is_shown() -> None:
    texts = {1: "Traceback ...\nKeyboardInterrupt\n", 2: "Traceback ...\nValueError: odd\n"}
    error = RankError("ranks 1 and 2 failed", texts)
    assert str(error) == "ranks 1 and 2 failed\n--- rank 2 ---\nTraceback ...\nValueError: odd"
    assert error.failures == texts
