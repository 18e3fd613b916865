"""A loop that saves behind each step with `"keep": 1` and is killed at any moment goes on with the bits of the plain loop."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import zstore
from tests.engine.bits import Case, assert_equal
from tests.engine.models import batch, make_net
from zstore.checkpoint import tags
from zstore.testing.ranks import kill_ranks

STEPS = 7


@dataclass(frozen=True)
class Run:
    """What is trained, where its state is, and on how many ranks."""

    case: Case
    world_size: int = 1

    def config(self, folder: Path) -> dict[str, Any]:
        found = self.case.config(self.world_size, str(folder / "nvme"))
        found["zstore"]["keep"] = 1
        return found


def _train(rank: int, run: Run, base: str, die: tuple[int, float] | None) -> None:
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


def _go(run: Run, folder: Path, die: tuple[int, float] | None, least: int) -> tuple[bool, int]:
    """Start the run, killed as `die` says on one rank; return whether it was, and the least step that the next start resumes.

    Raises AssertionError if it resumed an earlier step than `least`, or ranks resumed different ones."""
    for rank in range(run.world_size):
        (folder / f"log-{rank}").unlink(missing_ok=True)
    ended = kill_ranks(_train, run.world_size, run, str(folder), die, timeout_s=250)
    lines = [json.loads(line) for path in folder.glob("log-*") for line in path.read_text().splitlines()]
    resumed = {line["resumed"] for line in lines if "resumed" in line}
    assert len(resumed) <= 1
    assert all(step >= least for step in resumed)
    # A save begins once the one before it is committed.
    return not all(ended), max([least, *resumed, *(line["saved"] - 1 for line in lines if "saved" in line)])


def _show(run: Run, folder: Path, rng: random.Random, starts: int) -> int:
    """Kill and resume a run so many times, then let it end; return how often it was killed."""
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


RUNS = {
    "device": Run(Case(0, "none", "fp32", 1, 0.0)),
    "disk": Run(Case(3, "nvme", "fp32", 1, 0.0, parameters="nvme", overlap="forward")),
    "two in memory": Run(Case(2, "cpu", "bf16", 1, 0.0), 2),
    "two on disk": Run(Case(3, "nvme", "fp32", 1, 0.0, parameters="cpu"), 2),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_loop_that_saves_each_step_and_is_killed_has_the_bits_of_the_plain_loop(name: str, tmp_path: Path) -> None:
    assert _show(RUNS[name], tmp_path / "run", random.Random(name), 2) > 0


def _all_runs(rng: random.Random) -> list[Run]:
    places = [(0, "none", "none"), *((stage, tier, "none") for stage in (1, 2) for tier in ("none", "cpu", "nvme"))]
    places += [(3, tier, other) for tier in ("none", "cpu", "nvme") for other in ("none", "cpu", "nvme")]
    return [
        Run(Case(stage, tier, rng.choice(("fp32", "bf16")), 1, 0.0, parameters=parameters, overlap=overlap), world_size)
        for world_size in (1, 2)
        for stage, tier, parameters in places
        for overlap in [rng.choice(("none", "backward", "forward", "auto"))]
    ]


@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_several_hundred_kills(tmp_path: Path) -> None:
    rng = random.Random(11)
    assert sum(_show(run, tmp_path / str(n), rng, 12) for n, run in enumerate(4 * _all_runs(rng))) > 150
