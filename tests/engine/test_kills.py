"""`durability: "step"`: a run that is killed, at any file operation or moment, resumes at its last finished step."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.engine.kill_runs import Run, train_until_killed, uninterrupted
from tests.killing import Killing

STEPS = 6

RUNS = {
    "disk": Run(tier="nvme", accumulation=2),
    "device": Run(stage=0, tier="none", precision="fp32"),
    "forward": Run(stage=3, tier="nvme", parameters="nvme", overlap="forward", split=True),
    "backward": Run(stage=3, tier="cpu", parameters="cpu", overlap="backward"),
    "two on disk": Run(world_size=2, stage=3, tier="nvme", parameters="cpu", overlap="auto", save_every=3),
    "two in memory": Run(world_size=2, stage=1, tier="cpu", precision="fp16", accumulation=2),
}


def _points(run: Run, rng: random.Random) -> list[int]:
    """An operation for one of the ranks, of some 200 a step; -1: the rank is killed when the other is."""
    chosen = rng.randrange(run.world_size)
    return [rng.randrange(1000) if rank == chosen else -1 for rank in range(run.world_size)]


MORE = ("disk", "device", "backward", "two in memory")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in MORE else name for name in RUNS]
)
def test_a_killed_run_goes_on_at_its_last_finished_step(name: str, tmp_path: Path) -> None:
    run, rng = RUNS[name], random.Random(name)
    killing = Killing(train_until_killed, run, tmp_path / "run", uninterrupted(run, STEPS))
    least = 0
    kills = 0
    for _ in range(2):
        kills += killing.go(STEPS - 1, points=_points(run, rng))
        least = killing.check(least)
    assert kills > 0, "the points lie behind the end of the run: nothing was shown"
    assert not killing.go(STEPS)
    killing.check(least)
    assert all(noted[-1].get("ended") == STEPS for noted in killing.lines())


def _all_runs() -> list[Run]:
    places = [(0, "none", "none"), *((stage, tier, "none") for stage in (1, 2) for tier in ("none", "cpu", "nvme"))]
    places += [(3, tier, other) for tier in ("none", "cpu", "nvme") for other in ("none", "cpu", "nvme")]
    rng = random.Random(7)
    return [
        Run(
            world_size=world_size,
            stage=stage,
            tier=tier,
            parameters=parameters,
            overlap=rng.choice(("none", "backward", "forward", "speculative", "auto")),
            accumulation=rng.choice((1, 2)),
            split=rng.random() < 0.3,
            save_every=rng.choice((0, 3)),
        )
        for world_size in (1, 2)
        for stage, tier, parameters in places
    ]


@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_several_hundred_kills(tmp_path: Path) -> None:
    """Each run is killed at operations and at moments, and resumed, until it ends; then it begins anew."""
    steps, rng, counts = 12, random.Random(11), Counter[str]()
    for number, run in enumerate(_all_runs()):
        killing = Killing(train_until_killed, run, tmp_path / str(number), uninterrupted(run, steps))
        started = time.monotonic()
        killing.go(2)
        seconds = time.monotonic() - started
        least = killing.check(0)
        for start in range(16):
            if start % 2:
                moment = rng.uniform(0.2, 1.5) * seconds
                after_s = [moment + rng.uniform(0, 0.02) for _ in range(run.world_size)]
                killed = killing.go(steps, after_s=after_s)
            else:
                killed = killing.go(steps, points=_points(run, rng))
            before, least = least, killing.check(least)
            counts["starts"] += 1
            counts["kills"] += killed
            counts[f"kills on {run.world_size} ranks"] += killed
            counts["steps won"] += least - before
            resumed = [line for noted in killing.lines() for line in noted if "resumed" in line]
            counts["resumed states compared"] += len(resumed)
        killing.go(steps)
        killing.check(least)
        assert all(noted[-1].get("ended") == steps for noted in killing.lines())
    print(", ".join(f"{name} {count}" for name, count in counts.items()))  # noqa: T201
    assert counts["kills"] > 300
