"""Whoever is killed, the trainer or those who serve: nobody ever has weights that no step had."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests import warm
from tests.engine.published import Weights, consolidated, in_folder, publishing, same, served, versions
from tests.engine.runs import start, step
from tests.waiting import until
from zstore.errors import CheckpointNotFoundError
from zstore.publish import Receiver
from zstore.testing.ranks import kill_ranks, run_ranks


def _config(folder: Path) -> dict[str, Any]:
    return publishing(folder / "weights", stage=2, publish={"full_every": 7}, own={"keep": 2})


def _train(rank: int, folder: Path, steps: int) -> None:
    with start(_config(folder)) as engine:
        engine.load_checkpoint(str(folder / "ckpt"))
        while engine.global_steps < steps:
            step(engine)
            engine.save_checkpoint(str(folder / "ckpt"))


def _expected(rank: int, folder: Path, steps: int) -> None:
    """Leave what `zstore consolidate` gives of each step of a run that nobody kills."""
    with start(_config(folder)) as engine:
        while engine.global_steps < steps:
            step(engine)
            consolidated(engine, folder / "ckpt")


class Killed:
    """A run whose processes are killed, and those that receive its weights."""

    def __init__(self, folder: Path, steps: int, seed: int) -> None:
        self.folder, self.steps = folder, steps
        self.draw = random.Random(seed)
        run_ranks(_expected, 2, folder / "whole", steps, timeout_s=3600)
        self.model = served()
        self.receiver = Receiver(self.model, folder / "weights")
        self.puller: Any = None

    def expected(self, at: int) -> Weights:
        return load_file(self.folder / f"whole/ckpt/step-{at}/hf/model.safetensors")

    def pull(self) -> None:
        words = ["-m", "zstore", "pull", str(self.folder / "weights"), "--into", str(self.folder / "hf"), "--follow"]
        self.puller = warm.Popen([sys.executable, *words, "--every", "0.01"], stderr=subprocess.PIPE, text=True)

    def kill_puller(self) -> None:
        self.puller.send_signal(signal.SIGKILL)
        self.puller.wait()
        self.puller.stderr.close()

    def check(self) -> int:
        """Compare what each receiver has; return the newest version."""
        index = self.folder / "hf/model.safetensors.index.json"
        if index.exists():
            at = json.loads(index.read_text())["metadata"]["zstore"]["step"]
            assert same(in_folder(self.folder / "hf"), self.expected(at)), at
        try:
            newest = self.receiver.update()
        except CheckpointNotFoundError:
            return 0
        at = versions(self.folder / "weights")[newest]["step"]
        assert same(dict(self.model.state_dict()), self.expected(at)), at
        return newest

    def go(self, longest_s: float) -> int:
        """Kill until the run is done; return the number of versions."""
        done = False
        while not done:
            self.pull()
            done = all(kill_ranks(_train, 2, self.folder, self.steps, after_s=[self.draw.uniform(0.2, longest_s)]))
            self.kill_puller()
            self.check()
        self.pull()
        last = max(versions(self.folder / "weights"))
        index = self.folder / "hf/model.safetensors.index.json"
        until(lambda: json.loads(index.read_text())["metadata"]["zstore"]["number"] == last)
        self.kill_puller()
        assert self.check() == last
        assert versions(self.folder / "weights")[last]["step"] == self.steps
        return last


def test_a_few_versions_survive_kills_of_either_side(tmp_path: Path) -> None:
    assert Killed(tmp_path, 12, seed=1).go(2.5) >= 12


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_thousand_versions_survive_kills_of_either_side(tmp_path: Path) -> None:
    assert Killed(tmp_path, 1000, seed=2).go(20.0) >= 1000
