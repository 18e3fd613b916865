"""A run whose ranks come and go under torchrun: with `elasticity` its steps keep their samples, and none is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.tools.commands import free_port

SCRIPT = Path(__file__).parent.parent / "scripts" / "elastic.py"
STEPS = 12
CONFIG = {
    "elasticity": {"enabled": True, "max_train_batch_size": 5, "micro_batch_sizes": [1, 2]},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2},
    "steps_per_print": 0,
}
# Torch's agents share a store that one that joins later does not find: https://github.com/pytorch/pytorch/issues/135712
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def prepare(folder: Path, gate: int) -> Path:
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    (folder / "gate").write_text(str(gate))
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    """Every whole line, in the order of steps."""
    texts = [path.read_text().splitlines(keepends=True) for path in folder.glob("steps-*.jsonl")]
    found = [json.loads(line) for text in texts for line in text if line.endswith("\n")]
    return sorted(found, key=lambda line: (line["step"], line["rank"]))


def steps_of(folder: Path) -> list[tuple[int, list[int], float]]:
    """(batch, samples, loss) of each step."""
    found = []
    for step in range(STEPS):
        here = [line for line in lines(folder) if line["step"] == step]
        assert len({line["world"] for line in here}) == 1, f"step {step} was taken twice: {here}"
        numbers = sorted(number for line in here for number in line["numbers"])
        found.append((here[0]["batch"], numbers, sum(line["loss"] for line in here) / len(here)))
    return found


def wait_for(what: Callable[[], bool], why: str) -> None:
    # A guard: what is awaited is progress. On a busy machine agents miss heartbeats, and meet again after some rounds.
    deadline = time.monotonic() + 800
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.1)


def torchrun(tmp_path: Path, port: int, *words: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
    command += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    # A loaded machine may keep an agent from its heartbeat for seconds; one that is taken for dead never comes back.
    command += ["--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=15"]
    command += ["--monitor-interval", "0.1"]
    return [*command, "--log-dir", str(tmp_path / "logs"), *words]


@contextmanager
def agents(command: list[str]) -> Iterator[Callable[[], Any]]:
    """Give what starts an agent by `command`; all are killed at the end of the block."""
    started: list[Any] = []

    def starts() -> Any:
        started.append(warm.Popen(command, env=ENVIRONMENT, start_new_session=True))
        return started[-1]

    try:
        yield starts
    finally:
        for agent in started:
            agent.kill()


@pytest.mark.timeout(1200)
def test_a_run_goes_on_with_one_rank_and_with_two_again(tmp_path: Path) -> None:
    whole, run = prepare(tmp_path / "whole", STEPS), prepare(tmp_path / "run", 0)
    alone = warm.run([sys.executable, str(SCRIPT), str(whole), str(STEPS)], check=False, env=ENVIRONMENT, timeout=800)
    assert alone.returncode == 0
    port = free_port()
    command = torchrun(tmp_path, port, str(SCRIPT), str(run), str(STEPS))

    def worlds(step: int) -> set[int]:
        return {line["world"] for line in lines(run) if line["step"] == step}

    with agents(command) as starts:
        first = starts()
        wait_for(lambda: is_there(port), "the first agent does not listen")
        second = starts()
        # The first may have begun alone, if the second took long.
        wait_for(lambda: any(run.glob("steps-2-*")), "no run of two ranks began")
        (run / "gate").write_text("4")
        wait_for(lambda: worlds(3) == {2}, "the run did not begin with two ranks")
        wait_for((run / "saved" / "step-00000004").is_dir, "its step was not saved")
        # An agent's end is a machine's: its rank goes with it.
        second.kill()
        os.kill(next(line["pid"] for line in lines(run) if line["agent"] == second.pid), signal.SIGKILL)
        (run / "gate").write_text("8")
        wait_for(lambda: worlds(7) == {1}, "the run did not go on with one rank")
        of_two = set(run.glob("steps-2-*"))
        third = starts()
        wait_for(lambda: set(run.glob("steps-2-*")) > of_two, "no rank joined")
        (run / "gate").write_text(str(STEPS))
        assert [agent.wait(800) for agent in (first, third)] == [0, 0]
    assert [sorted(worlds(step)) for step in (0, 4, STEPS - 1)] == [[2], [1], [2]]
    for (batch, numbers, loss), (_, same, expected) in zip(steps_of(run), steps_of(whole), strict=True):
        assert batch == 4
        assert numbers == same
        assert loss == pytest.approx(expected, rel=1e-4)
    used = [number for _, numbers, _ in steps_of(run)[:10] for number in numbers]
    assert sorted(used) == list(range(40))  # an epoch


def is_there(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0
