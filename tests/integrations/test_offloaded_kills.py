"""`Offloaded(durability="step")`: a loop that is killed, at any file operation or moment, goes on from its last step."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.integrations.offloaded_kills import Loop, Run, train_until_killed, uninterrupted
from tests.killing import Killing
from zstore.checkpoint.reader import CheckpointReader, tags


def test_a_killed_loop_goes_on_at_its_last_finished_step_and_at_another_world_size(tmp_path: Path) -> None:
    run = Run(world_size=2, parallel="fsdp", overlap="forward", clip=0.5)
    killing = Killing(train_until_killed, run, tmp_path / "run", uninterrupted(run, 4))
    # Behind the first step, and before the last.
    assert killing.go(3, points=[200, -1])
    least = killing.check(0)
    assert least > 0
    assert not killing.go(4)
    killing.check(least)
    assert all(noted[-1]["ended"] == 4 for noted in killing.lines())

    loop = Loop.make(replace(run, world_size=1, parallel="none"), tmp_path / "run/state", durable=True)
    assert loop.resume() == 4
    (info,) = tags(tmp_path / "run/state/zstore-run/steps")
    with CheckpointReader(info) as reader:
        for number, (parameter, entry) in enumerate(loop.optimizer.state.items()):
            for name, values in {
                "model": parameter,
                **{f"optimizer/{s}": entry[s] for s in entry if s != "step"},
            }.items():
                stored = torch.from_numpy(reader.read_array(f"{name}/parameter-{number}"))
                assert torch.equal(values.detach().clone(), stored), name
    loop.step()
    loop.optimizer.close()
    (info,) = tags(tmp_path / "run/state/zstore-run/steps")
    assert (info.record.step, info.record.world_size) == (5, 1)


def _all_runs() -> list[Run]:
    rng = random.Random(3)
    runs = []
    for world_size, parallel in ((1, "none"), (1, "none"), (2, "ddp"), (2, "fsdp"), (2, "fsdp")):
        for device in ("nvme", "cpu"):
            for overlap in ("none", "forward", "backward"):
                if parallel == "ddp" and overlap == "backward":
                    continue
                clip = 0.5 if overlap != "backward" and rng.random() < 0.5 else None
                runs.append(
                    Run(
                        world_size=world_size,
                        parallel=parallel,
                        device=device,
                        overlap=overlap,
                        clip=clip,
                        kind=rng.choice(("AdamW", "NAdam", "SGD")),
                        dtype=rng.choice(("float32", "bfloat16")),
                        frees=parallel != "ddp" and rng.random() < 0.5,
                    )
                )
    return runs


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_kills_of_loops(tmp_path: Path) -> None:
    """Each loop is killed at operations and at moments, and resumed, until it ends; then the next begins."""
    steps, rng, counts = 12, random.Random(11), Counter[str]()
    for number, run in enumerate(_all_runs()):
        killing = Killing(train_until_killed, run, tmp_path / str(number), uninterrupted(run, steps))
        started = time.monotonic()
        killing.go(2)
        seconds, operations = time.monotonic() - started, killing.lines()[0][-1]["operations"]
        least = killing.check(0)
        for start in range(8):
            if start % 2:
                moment = rng.uniform(0.4, 1.5) * seconds
                killed = killing.go(steps, after_s=[moment + rng.uniform(0, 0.02) for _ in range(run.world_size)])
            else:
                chosen = rng.randrange(run.world_size)
                point = rng.randrange(4 * operations)
                killed = killing.go(steps, points=[point if rank == chosen else -1 for rank in range(run.world_size)])
            before, least = least, killing.check(least)
            counts["starts"] += 1
            counts["kills"] += killed
            counts[f"kills on {run.world_size} ranks"] += killed
            counts["steps won"] += least - before
            counts["resumed states compared"] += sum("resumed" in line for noted in killing.lines() for line in noted)
        killing.go(steps)
        killing.check(least)
        assert all(noted[-1].get("ended") == steps for noted in killing.lines())
    print(", ".join(f"{name} {count}" for name, count in counts.items()))  # noqa: T201
    assert counts["kills"] > 100
