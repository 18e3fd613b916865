"""Runs on machines that share a bucket and nothing else: killed, cut off, resumed on others, with the bits of a plain loop."""

import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.process import free_port
from tests import warm
from tests.engine.bits import reference_digests
from tests.engine.machine_runs import ADAM, BATCH, make_net
from tests.engine.models import batch
from tests.machines import Machines, machines, why_no_namespaces
from tests.reference import Reference
from tests.waiting import GUARD_S, until
from zstore.testing import ranks

pytest.importorskip("moto", reason="extra test")
pytest.importorskip("s3fs", reason="extra s3")

ranks.PRELOADED += ["s3fs", "tests.engine.machine_runs"]
PROGRAM = "import sys\nfrom tests.engine import machine_runs\ngetattr(machine_runs, sys.argv[1])(*sys.argv[2:])"


class Rank:
    def __init__(self, process: Any) -> None:
        self.process = process
        self.said: list[dict[str, Any]] = []
        self.errors = ""
        self._more = threading.Condition()
        self._ended = False
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._listen, self._hear)]
        for thread in self._threads:
            thread.start()

    def _listen(self) -> None:
        for line in warm.without_gloo(self.process.stdout):
            if line.endswith("\n"):  # else it was killed as it said it
                with self._more:
                    self.said.append(json.loads(line))
                    self._more.notify_all()
        with self._more:
            self._ended = True
            self._more.notify_all()

    def _hear(self) -> None:
        for line in self.process.stderr:
            self.errors += line

    def heard(self, word: str, least: int = 0) -> bool:
        """Wait until it said a line of that kind, of at least this number; return whether it did before its end."""

        def there() -> bool:
            return any(int(line.get(word, -1)) >= least for line in self.said)

        with self._more:
            assert self._more.wait_for(lambda: there() or self._ended, GUARD_S), self.errors
        return there()

    def end(self) -> int:
        if not warm.ends_within(self.process, GUARD_S):
            self.process.send_signal(signal.SIGUSR2)  # it writes down where it hangs
            until(lambda: self.process.poll() is not None or "Current thread" in self.errors)
            raise AssertionError(self.errors)
        code: int = self.process.wait()
        for thread in self._threads:
            thread.join()
        self.process.stdout.close()
        self.process.stderr.close()
        return code


class Run:
    """A run whose machines come and go, and the world size that took each step of it that was committed."""

    def __init__(self, there: Machines, stage: int, tier: str) -> None:
        self.there, self.stage, self.tier = there, stage, tier
        self.url = f"s3://bucket-{os.urandom(4).hex()}/run"
        self.worlds: dict[int, int] = {}
        self.newest: dict[str, str] = {}
        self.resumed: list[dict[str, Any]] = []
        self.losses: dict[tuple[int, int, int], list[float]] = {}
        self.port = 29500
        self.timeout_s = GUARD_S
        """How long ranks wait for each other: machines may be slow to start."""
        self._say("make")

    def _say(self, name: str, *words: str) -> dict[str, Any]:
        rank = Rank(self.there.start(-1, PROGRAM, name, self.url, *words, json.dumps(self.there.options)))
        assert rank.end() == 0, rank.errors
        return rank.said[-1] if rank.said else {}

    def start(self, world_size: int, steps: int, every: int = 1) -> list[Rank]:
        self.port = 29500 + (self.port + 1 - 29500) % 1000 if self.there.namespaces else free_port()
        words = [PROGRAM, "train", self.url, str(self.stage), self.tier, str(steps), str(every)]
        words.append(json.dumps(self.there.options))
        common = {"WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        common |= {"MASTER_PORT": str(self.port), "TEST_TIMEOUT_S": str(int(self.timeout_s))}
        return [Rank(self.there.start(rank, *words, RANK=str(rank), **common)) for rank in range(world_size)]

    def look(self, ranks: list[Rank]) -> None:
        """Note what the ranks of a start, which have ended, said, and which checkpoints there are now."""
        world_size = len(ranks)
        for number, rank in enumerate(ranks):
            self.resumed += [line for line in rank.said if "resumed" in line]
            self.losses |= {(world_size, number, line["step"]): line["losses"] for line in rank.said if "step" in line}
        found = self._say("look")
        assert found["faults"] == []
        steps = [step for step, _ in found["saved"]]
        assert steps == list(range(steps[0], steps[-1] + 1)) if steps else not self.worlds
        for step, size in found["saved"]:
            assert self.worlds.setdefault(step, size) == size, "a checkpoint was replaced"
        assert max(steps, default=0) == max(self.worlds, default=0), "the newest checkpoint is gone"
        self.newest = found["digests"]

    def check(self) -> None:
        """Compare with a plain loop in one process, whose steps have the same world sizes."""
        plain = Reference(make_net(), 1, stage=self.stage, precision="bf16", clip=1.0, adam=ADAM)
        buffers = plain.buffers[0]
        for step in range(max(self.worlds) + 1):
            if step:
                size = plain.world_size = self.worlds[step]
                plain.accumulation, plain.buffers = BATCH // size, [buffers] * size
                micros = range(plain.accumulation)
                plain.step([[batch(step - 1, m, rank, samples=1) for rank in range(size)] for m in micros])
                for rank in range(size):
                    losses = (
                        [plain.losses[m * size + rank][0] for m in micros] if self.stage > 1 else plain.losses[rank]
                    )
                    assert self.losses.get((size, rank, step), losses) == losses, (step, rank)
            for line in (line for line in self.resumed if line["resumed"] == step):
                expected = reference_digests(plain, line["rows"])
                assert {name: line["digests"][name] for name in expected} == expected, step
        whole = {record: (0, p.numel()) for record, p in plain.model.named_parameters()}
        expected = {name: text for name, text in reference_digests(plain, whole).items() if "/" in name}
        assert {name: self.newest.get(name) for name in expected} == expected


def lose(run: Run, draw: random.Random, world_size: int, *, longest_s: float = 6.0) -> str:
    """Start so many ranks, and kill one or all of them at any moment of what follows; return what was killed."""
    ranks = run.start(world_size, 1_000_000)
    try:
        all_began = all(rank.heard("resumed") for rank in ranks) if draw.random() < 0.9 else False
        time.sleep(draw.uniform(0.0, longest_s))  # anywhere: what is under way then is not known
        all_began = all_began or all(rank.said for rank in ranks)
        victim = draw.randrange(world_size)
        everybody = draw.random() < 0.3 or not all_began  # before they know each other, a launcher ends the others
        for rank in ranks if everybody else [ranks[victim]]:
            rank.process.kill()
        codes = [rank.end() for rank in ranks]
        if not everybody:
            for number, rank in enumerate(ranks):
                if number != victim:
                    assert codes[number] == 1, (codes, rank.errors)
                    # Or rank 0, if that ended first: then nobody can be asked who it was.
                    assert re.search(rf"RankError: rank [\d, ]*\b({victim}|0)\b", rank.errors), rank.errors
        run.look(ranks)
        return "all" if everybody else "one"
    finally:
        for rank in ranks:
            rank.process.kill()


def finish(run: Run, world_size: int, more: int) -> None:
    ranks = run.start(world_size, max(run.worlds, default=0) + more)
    assert [rank.end() for rank in ranks] == [0] * world_size, [rank.errors for rank in ranks]
    run.look(ranks)
    run.check()


def test_killed_on_four_machines_it_goes_on_with_three(tmp_path: Path) -> None:
    why = why_no_namespaces()
    with machines(4, tmp_path, network=not why) as there:
        run = Run(there, 3, "none")
        draw = random.Random(5)
        for world_size in (4, 3):
            lose(run, draw, world_size, longest_s=3.0)
        finish(run, 3, 2)


@pytest.mark.soak
@pytest.mark.timeout(14400)
@pytest.mark.parametrize(("stage", "tier"), [(3, "none"), (1, "nvme")])
def test_a_hundred_kills_on_machines_with_slow_links(stage: int, tier: str, tmp_path: Path) -> None:
    if why := why_no_namespaces():
        pytest.skip(why)
    with machines(4, tmp_path, network=True) as there:
        run, draw = Run(there, stage, tier), random.Random(stage)
        lost: Counter[str] = Counter()
        for number in range(100):
            lost[lose(run, draw, 4 - number % 2)] += 1
            if number % 10 == 9:
                run.check()
                sys.stdout.write(f"{dict(lost)}, {len(run.worlds)} checkpoints, {len(run.resumed)} resumed states\n")
        finish(run, 3, 2)


@pytest.mark.parametrize("every", [1, pytest.param(1_000_000, marks=pytest.mark.soak)], ids=["saving", "computing"])
def test_a_machine_that_is_cut_off_leaves_no_checkpoint(every: int, tmp_path: Path) -> None:
    """Of a cable that is pulled nobody is told: ranks on both sides have to find out."""
    if why := why_no_namespaces():
        pytest.skip(why)
    with machines(3, tmp_path, network=True) as there:
        run = Run(there, 3, "none")
        finish(run, 3, 1)
        run.timeout_s = 60
        ranks = run.start(3, 1_000_000, every)
        assert all(rank.heard("step", 2) for rank in ranks)
        there.tell_switch("cut", 1)
        for rank in (ranks[0], ranks[2]):
            assert rank.end() == 1
            assert "RankError: rank 1 of 3 failed (rank 1 is gone)" in rank.errors
        if every == 1:
            there.tell_switch("join", 1)  # it may wait for the bucket, whose client has its own patience
        assert ranks[1].end() == 1
        assert "RankError: rank 0" in ranks[1].errors
        there.tell_switch("join", 1)
        before = max(run.worlds)
        run.look(ranks)
        assert max(run.worlds) <= max(line["step"] for line in ranks[0].said[1:]), "a checkpoint of a torn step"
        assert every == 1 or max(run.worlds) == before
        finish(run, 2, 1)
