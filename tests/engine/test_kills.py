"""A loop that saves behind each step with `"keep": 1` and is killed at any moment goes on with the bits of the plain loop."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

import zstore
from tests.engine.bits import ADAM, assert_equal
from tests.engine.models import batch, make_net
from tests.reference import Reference
from zstore.checkpoint import tags
from zstore.testing.ranks import kill_ranks

STEPS = 7


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained, and where its state is."""

    world_size: int = 1
    stage: int = 0
    tier: str = "none"
    parameters: str = "none"
    overlap: str = "none"
    precision: str = "fp32"

    def config(self, folder: Path) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, "stage3_param_persistence_threshold": 100}
        for section, tier in (("offload_optimizer", self.tier), ("offload_param", self.parameters)):
            if tier != "none":
                zero[section] = {"device": tier} | ({"nvme_path": str(folder / "nvme")} if tier == "nvme" else {})
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "AdamW", "params": ADAM},
            "zero_optimization": zero,
            "steps_per_print": 0,
            "zstore": {"keep": 1, "step_overlap": self.overlap},
        }
        if self.precision == "bf16":
            found["bf16"] = {"enabled": True}
        return found


def _train(rank: int, given: dict[str, Any], base: str, die: tuple[int, float] | None) -> None:
    """Resume, compare with the plain loop, and go on to the last step; after the save of step `die[0]` and so many times that
    step's seconds as `die[1]` says the process is killed."""
    run, folder = Run(**given), Path(base)
    reference = Reference(make_net(), run.world_size, stage=run.stage, precision=run.precision, adam=ADAM)
    (folder / "nvme").mkdir(exist_ok=True)
    is_first = not any((folder / "ckpt").glob("[!.]*/zstore.json"))
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
    ended = kill_ranks(_train, run.world_size, asdict(run), str(folder), die, timeout_s=250)
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
    "device": Run(),
    "disk": Run(stage=3, tier="nvme", parameters="nvme", overlap="forward"),
    "two in memory": Run(world_size=2, stage=2, tier="cpu", precision="bf16"),
    "two on disk": Run(world_size=2, stage=3, tier="nvme", parameters="cpu"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_loop_that_saves_each_step_and_is_killed_has_the_bits_of_the_plain_loop(name: str, tmp_path: Path) -> None:
    assert _show(RUNS[name], tmp_path / "run", random.Random(name), 2) > 0


def _all_runs(rng: random.Random) -> list[Run]:
    places = [(0, "none", "none"), *((stage, tier, "none") for stage in (1, 2) for tier in ("none", "cpu", "nvme"))]
    places += [(3, tier, other) for tier in ("none", "cpu", "nvme") for other in ("none", "cpu", "nvme")]
    return [
        Run(
            world_size=world_size,
            stage=stage,
            tier=tier,
            parameters=parameters,
            overlap=rng.choice(("none", "backward", "forward", "auto")),
            precision=rng.choice(("fp32", "bf16")),
        )
        for world_size in (1, 2)
        for stage, tier, parameters in places
    ]


@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_several_hundred_kills(tmp_path: Path) -> None:
    rng = random.Random(11)
    assert sum(_show(run, tmp_path / str(n), rng, 12) for n, run in enumerate(4 * _all_runs(rng))) > 150
