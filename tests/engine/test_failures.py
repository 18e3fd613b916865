"""A rank that dies, hangs or fails alone, a full drive, a kill: all ranks raise soon and say why; the last save goes on."""

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import zstore
from bench.process import free_port
from tests import warm
from tests.engine.bits import SPILLS, Case, assert_equal, engine_digests
from tests.engine.models import batch, make_net
from tests.engine.runs import make_config, start, state_of, step, take_steps, unchanged
from tests.engine.step_modes import say
from zstore.checkpoint.reader import tags
from zstore.engine import Engine
from zstore.engine.checkpoint import save as checkpointing
from zstore.errors import DiskFullError, RankError, UsageError
from zstore.ranks import reports
from zstore.testing.faults import Fault, FaultyFiles, GatedFiles
from zstore.testing.ranks import kill_ranks, run_ranks


def _kill(*_: Any, **_keys: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(*_: Any, **_keys: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(*_: Any, **_keys: Any) -> None:
    raise ValueError("what only this rank sees")


def _arrange(engine: Engine, where: str, happen: Any, files: FaultyFiles) -> None:
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
    reports.RESPONSE_TIMEOUT_S = 1.0
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
def test_a_failed_rank_ends_others(nvme: Path, stage: int, world_size: int, where: str, what: str, mode: str) -> None:
    may_die = () if what == "raise" else (FAILING,)
    # A rank that waits for silence or for the process group's own timeout is stopped by the ranks' guard before.
    results = run_ranks(_run, world_size, str(nvme), stage, where, what, mode, may_die=may_die)
    ranks = dict(enumerate(results))
    if what != "raise":
        assert ranks.pop(FAILING) is None
    for rank, found in ranks.items():
        # A failure that the ranks agreed on leaves them able to talk: a load mends it.
        go_on = "the state is inconsistent; load a checkpoint" if where == "read" else "Restart the processes"
        assert go_on in found["refusal"]
        if what == "raise" and rank == FAILING:
            assert found["type"] == ("StorageError" if where == "read" else "ValueError")
            continue
        assert found["type"] == "RankError"
        assert f"rank 1 of {world_size} failed" in found["text"]
        if what != "raise":
            assert "rank 1 is gone" in found["text"]
            assert "the process was killed, or its machine is down or unreachable" in found["text"]
            # The rank that is gone cannot say where it was; this one says where it waited.
            unit = "backward, unit '[a-z0-9.]+'"
            at = unit if where != "step" else f"(step|{unit})" if mode == "backward" else "step"
            assert re.search(rf"; rank {rank} is stopping too, in {at}, collective [a-z_]+\n", found["text"])
            continue
        if where == "read":
            assert "rank 1 of 2 failed in step; rank 0 is stopping too" in found["text"]
            assert "Input/output error" in found["text"]
            continue
        at = "step" if where == "reduce" else f"{where}, unit 'blocks.1'" if stage == 3 else where
        assert f"(rank 1 in {at}: ValueError: what only this rank sees); rank {rank} is stopping too" in found["text"]


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
    port = free_port()
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", LOOP, str(failing), what]
    envs = [env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    ranks = [warm.Popen(command, env=each, stderr=subprocess.PIPE, text=True) for each in envs]
    try:
        errors = [process.communicate(timeout=200)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    own = {"raise": 1, "kill": -signal.SIGKILL, "stop early": 0}[what]
    assert [process.returncode for process in ranks] == ([own, 1] if failing == 0 else [1, own])
    assert said in errors[1 - failing]
    assert "terminate called" not in "".join(errors)


def _dies_in_a_save(rank: int, folder: str) -> str:
    reports.RESPONSE_TIMEOUT_S, checkpointing._GRACE_PERIOD_S = 1.0, 0.5  # type: ignore[assignment]
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
    assert "rank 0 is stopping too, in save" in text
    assert list(tags(tmp_path)) == []


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


# Parameters are on disk too: their files, or those of the state; or of gradients that wait there.
FULL = [
    ("allocate", "none", "*.shard"),
    *(("write", mode, "*/parameter*.shard") for mode in ("forward", "backward")),
    ("write", "none", "*/gradient*.shard"),
]
MORE_FULL = [
    ("allocate", "forward", "*/model*.shard"),
    *(("write", mode, "*.shard") for mode in ("none", "forward", "backward")),
    ("write", "none", "*/parameter*.shard"),
]


def _full_in_mid_step(rank: int, folder: str, kind: str, mode: str, pattern: str) -> tuple[list[Any], list[Any], str]:
    waits = {"host_budget_bytes": SPILLS} if "gradient" in pattern else {}
    own = "none" if pattern == "*.shard" else "nvme"
    config = make_config(3, "nvme", f"{folder}/nvme", own, zstore={"step_overlap": mode} | waits)
    with start(config) as engine:
        whole = [engine_digests(engine) for _ in range(4) if step(engine) is None]
    files = FaultyFiles()
    with start(config, _files=files) as engine:
        assert bool(engine.training_state.state.spilled) == bool(waits)
        take_steps(engine, 2)
        engine.save_checkpoint(f"{folder}/ckpt")
        if rank == 1:
            full = {"first": int(pattern == "*.shard"), "times": None, "error_number": errno.ENOSPC}
            files.inject(Fault(kind=kind, pattern=pattern, **full))  # type: ignore[arg-type]
        with pytest.raises(DiskFullError if rank == 1 else RankError) as caught:
            take_steps(engine, 1 if mode == "none" else 2)
        files.heal()
        if "parameter" in pattern:  # in the update, part of which was applied: a load mends that, in this engine too
            for refused in (
                lambda: step(engine),
                lambda: engine.get_full_parameter("blocks.0.up.weight"),
                lambda: engine.save_checkpoint(f"{folder}/torn"),
            ):
                with pytest.raises((UsageError, RankError, DiskFullError)) as told:
                    refused()
            assert "the state is inconsistent" in say(told.value) or "rank 1 of 2 failed" in say(told.value)
            engine.load_checkpoint(f"{folder}/ckpt")
            step(engine)
            assert engine_digests(engine) == whole[2]
    with start(config) as engine:
        engine.load_checkpoint(f"{folder}/ckpt")
        again = [engine_digests(engine)] + [engine_digests(engine) for _ in range(2) if step(engine) is None]
    return whole[1:], again, say(caught.value)


@pytest.mark.parametrize(
    ("kind", "mode", "pattern"), [*FULL, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE_FULL)]
)
def test_a_full_disk_in_mid_step(tmp_path: Path, kind: str, mode: str, pattern: str) -> None:
    (tmp_path / "nvme").mkdir()
    for whole, again, text in run_ranks(_full_in_mid_step, 2, str(tmp_path), kind, mode, pattern, timeout_s=60):
        assert again == whole
        assert "No space left on device [ENOSPC]" in text
        assert ("in the update of step 3, which was applied in part" if "parameter" in pattern else "step") in text
    assert not (tmp_path / "torn").exists()


def test_a_save_that_leaves_no_room_for_the_next_step_is_refused(nvme: Path) -> None:
    files = FaultyFiles()
    folder = nvme.parent / "ckpt"
    with start(make_config(3, "nvme", nvme), _files=files) as engine:
        step(engine)
        shards = {path: path.stat().st_size for path in nvme.rglob("*.shard")}
        before = state_of(engine)
        files.free = sum(shards.values()) - 1
        with pytest.raises(DiskFullError, match=f"the next step needs {files.free + 1} bytes .* only {files.free} are"):
            engine.save_checkpoint(str(folder))
        assert state_of(engine) == before
        step(engine)
        # Nothing was pinned: the files were changed in place.
        assert {path: path.stat().st_size for path in nvme.rglob("*.shard")} == shards
        files.free = sum(shards.values())
        with pytest.raises(DiskFullError, match=f"and the next step {files.free} too, but only {files.free} are"):
            engine.save_checkpoint(str(folder))
        files.free *= 3
        engine.save_checkpoint(str(folder))
        step(engine)
        assert not shards.keys() & set(nvme.rglob("*.shard"))


STEPS = 7


@dataclass(frozen=True)
class Killed:
    """What is trained, where its state is, and on how many ranks."""

    case: Case
    world_size: int = 1

    def config(self, folder: Path) -> dict[str, Any]:
        found = self.case.config(self.world_size, str(folder / "nvme"))
        found["zstore"]["keep"] = 1
        return found


def _train_or_die(rank: int, run: Killed, base: str, die: tuple[int, float] | None) -> None:
    """Resume, compare with the plain loop, and go on to the last step; after the save of step `die[0]` and so many times that
    step's seconds as `die[1]` says the process is killed."""
    folder, reference = Path(base), run.case.reference(run.world_size)
    (folder / "nvme").mkdir(exist_ok=True)
    is_first = all(".tmp-" in path.parent.name for path in (folder / "ckpt").glob("[!.]*/zstore.json"))
    with (
        (folder / f"log-{rank}").open("a") as log,
        zstore.initialize(model=make_net(0 if is_first else 9), config=run.config(folder))[0] as engine,
    ):
        path, _ = engine.load_checkpoint(f"{base}/ckpt")
        assert (path is None) == is_first
        print(json.dumps({"resumed": engine.global_steps}), file=log, flush=True)
        for step in range(engine.global_steps):
            reference.step([[batch(step, 0, each) for each in range(run.world_size)]])
        assert_equal(engine, reference)
        for step in range(engine.global_steps, STEPS):
            began_s = time.monotonic()
            engine.backward(engine(*batch(step, 0, rank)))
            engine.step()
            engine.save_checkpoint(f"{base}/ckpt", wait=False)
            print(json.dumps({"saved": step + 1}), file=log, flush=True)
            if die is not None and die[0] == step + 1:
                after_s = die[1] * (time.monotonic() - began_s)
                threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            reference.step([[batch(step, 0, each) for each in range(run.world_size)]])
        engine.wait_for_checkpoint()
        assert_equal(engine, reference)


def _go(run: Killed, folder: Path, die: tuple[int, float] | None, least: int) -> tuple[bool, int]:
    """Start the run, killed as `die` says on one rank; return whether it was, and the least step that the next start resumes.

    Raises AssertionError if it resumed an earlier step than `least`, or ranks resumed different ones."""
    for rank in range(run.world_size):
        (folder / f"log-{rank}").unlink(missing_ok=True)
    ended = kill_ranks(_train_or_die, run.world_size, run, str(folder), die, timeout_s=250)
    lines = [json.loads(line) for path in folder.glob("log-*") for line in path.read_text().splitlines()]
    resumed = {line["resumed"] for line in lines if "resumed" in line}
    assert len(resumed) <= 1
    assert all(step >= least for step in resumed)
    # A save begins once the one before it is committed.
    return not all(ended), max([least, *resumed, *(line["saved"] - 1 for line in lines if "saved" in line)])


def _show(run: Killed, folder: Path, rng: random.Random, starts: int) -> int:
    folder.mkdir()
    least = kills = 0
    for _ in range(starts):
        if least >= STEPS - 2:
            break
        killed, least = _go(run, folder, (rng.randrange(least + 1, STEPS - 1), 1.5 * rng.random()), least)
        kills += killed
    killed, _ = _go(run, folder, None, least)
    assert not killed
    assert [info.record.step for info in tags(folder / "ckpt")] == [STEPS]
    return kills


KILLED = {
    "device": Killed(Case(0, "none", "fp32", 1, 0.0)),
    "disk": Killed(Case(3, "nvme", "fp32", 1, 0.0, parameters="nvme", overlap="forward")),
    "two in memory": Killed(Case(2, "cpu", "bf16", 1, 0.0), 2),
    "two on disk": Killed(Case(3, "nvme", "fp32", 1, 0.0, parameters="cpu"), 2),
}


@pytest.mark.parametrize("name", KILLED)
def test_a_loop_that_saves_each_step_and_is_killed_has_the_bits_of_the_plain_loop(name: str, tmp_path: Path) -> None:
    assert _show(KILLED[name], tmp_path / "run", random.Random(name), 2) > 0


def _all_runs(rng: random.Random) -> list[Killed]:
    places = [(0, "none", "none"), *((stage, tier, "none") for stage in (1, 2) for tier in ("none", "cpu", "nvme"))]
    places += [(3, tier, other) for tier in ("none", "cpu", "nvme") for other in ("none", "cpu", "nvme")]
    return [
        Killed(
            Case(stage, tier, rng.choice(("fp32", "bf16")), 1, 0.0, parameters=parameters, overlap=overlap), world_size
        )
        for world_size in (1, 2)
        for stage, tier, parameters in places
        for overlap in [rng.choice(("none", "backward", "forward", "auto"))]
    ]


@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_several_hundred_kills(tmp_path: Path) -> None:
    rng = random.Random(11)
    assert sum(_show(run, tmp_path / str(n), rng, 12) for n, run in enumerate(4 * _all_runs(rng))) > 150
