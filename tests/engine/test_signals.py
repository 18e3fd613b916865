"""A signal to any rank: agreed at the next step, saved, exit code 75. Real processes, as a scheduler ends them."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.process import free_port
from tests import warm
from tests.engine.runs import start, step
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.engine.runtime.process import STOP_SIGNALS, StopSignals
from zstore.errors import UsageError
from zstore.journal import run_of
from zstore.ranks.world import World
from zstore.testing.ranks import run_ranks

ROOT = Path(__file__).parents[2]
LIMIT_S = 60

SCRIPT = """
import errno, functools, os, select, sys, torch, zstore
from tests.engine.runs import make_config, step
from tests.engine.models import make_net
from zstore.store import Store
from zstore.testing.faults import Fault, FaultyFiles
folder, stage, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
keys, factor, files = {}, 1.0, None
if how == "every step is skipped":
    keys, factor = {"bf16": {"enabled": False}, "fp16": {"enabled": True}}, float("inf")
if os.environ.get("RANK") == "1":
    # Of arrays, in a save of that tag.
    files = FaultyFiles(faults=(Fault(kind="write", pattern="*/lost.*/model/*", times=None, error_number=errno.EIO),))
zstore.init_distributed("gloo")
engine, *_ = zstore.initialize(model=make_net(), config=make_config(stage, **keys), _files=files)
seen = 0
with engine:
    if how == "own loop":
        engine.watch_signals()
    else:
        engine.save_on_signal(folder, client_state=lambda: {"seen": seen})
    print("ready", flush=True)
    while True:
        # The test says when to take a step. Python handles a signal that comes just before a blocking read after it.
        while not select.select([0], [], [], 0.05)[0]:
            pass
        os.read(0, 1)
        step(engine, factor)
        seen += 1
        if how == "a save failed":
            engine.save_checkpoint(folder, "lost", wait=False)
        print("step", engine.global_steps, engine.skipped_steps, flush=True)
        if how == "own loop" and engine.stop_requested:
            engine.save_and_stop(folder, "mine", {"seen": seen, "why": engine.stop_requested.name})
"""


class Rank:
    """A process that takes a step for each line it is given, and says so."""

    def __init__(self, arguments: Sequence[str], rank: int, world_size: int, port: int) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if world_size > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
            environment |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), warm.PIPE)
        self.process = warm.Popen([sys.executable, "-c", SCRIPT, *arguments], env=environment, **pipes)

    def expect(self, word: str) -> None:
        line = next(warm.without_gloo(map(bytes.decode, iter(self.process.stdout.readline, b""))), "")
        assert line.startswith(word), (line, self.end())

    def go(self) -> None:
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def heard(self, number: signal.Signals) -> None:
        deadline = time.monotonic() + LIMIT_S
        text = b""
        while number.name.encode() not in text:
            ready, _, _ = select.select([self.process.stderr], [], [], deadline - time.monotonic())
            assert ready, text
            text += os.read(self.process.stderr.fileno(), 4096)

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, errors.decode()


@contextmanager
def running(folder: Path, world_size: int, stage: int, how: str = "save_on_signal") -> Iterator[list[Rank]]:
    port = free_port()
    ranks = [Rank([str(folder), str(stage), how], rank, world_size, port) for rank in range(world_size)]
    try:
        for rank in ranks:
            rank.expect("ready")
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.communicate()


def take_step(ranks: Sequence[Rank], number: int, *, skipped: int = 0) -> None:
    for rank in ranks:
        rank.go()
    for rank in ranks:
        rank.expect(f"step {number} {skipped}\n")


def whole(folder: Path) -> tuple[str, int, object]:
    assert len(tags(folder)) == 1
    with open_checkpoint(folder) as reader:
        assert verify_checkpoint(reader) == []
        return reader.tag, reader.record.step, reader.record.state["client_state"]


@pytest.mark.parametrize(
    ("world_size", "stage", "signalled", "number", "how"),
    [
        (1, 1, 0, signal.SIGTERM, "save_on_signal"),
        pytest.param(2, 0, 1, signal.SIGUSR1, "save_on_signal", marks=pytest.mark.soak),
        (2, 3, 0, signal.SIGTERM, "save_on_signal"),
        (2, 1, 1, signal.SIGTERM, "every step is skipped"),
        (2, 1, 0, signal.SIGTERM, "a save failed"),
    ],
)
def test_one_signal_saves_and_stops_all(
    tmp_path: Path, world_size: int, stage: int, signalled: int, number: signal.Signals, how: str
) -> None:
    with running(tmp_path, world_size, stage, how) as ranks:
        take_step(ranks, 1, skipped=int(how.startswith("every")))
        ranks[signalled].process.send_signal(number)
        ranks[signalled].heard(number)
        for rank in ranks:
            rank.go()
        ends = [rank.end() for rank in ranks]
    assert [code for code, _ in ends] == [75] * world_size, ends
    if how == "a save failed":  # which does not keep this one from being made, and is said, at least
        assert all("Input/output error" in text for _, text in ends), ends
    else:
        assert not any("Error" in text or "Traceback" in text for _, text in ends), ends
    # In the second step, whose own counting had not gone on yet.
    assert whole(tmp_path) == ("step-00000002", 2, {"seen": 1})


def test_a_loop_of_its_own_finds_the_same_on_both_ranks(tmp_path: Path) -> None:
    with running(tmp_path, 2, 2, "own loop") as ranks:
        take_step(ranks, 1)
        ranks[0].process.send_signal(signal.SIGUSR1)
        ranks[0].heard(signal.SIGUSR1)
        take_step(ranks, 2)
        ends = [rank.end() for rank in ranks]
    assert [code for code, _ in ends] == [75, 75], ends
    assert whole(tmp_path) == ("mine", 2, {"seen": 2, "why": "SIGUSR1"})


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with running(tmp_path, 1, 1) as ranks:
        take_step(ranks, 1)
        ranks[0].process.send_signal(signal.SIGUSR1)
        ranks[0].heard(signal.SIGUSR1)
        ranks[0].process.send_signal(signal.SIGTERM)
        assert ranks[0].end()[0] == -signal.SIGTERM
    assert all(run_of(path.name) for path in tmp_path.iterdir())  # journals


def test_a_forked_child_ends_as_if_nobody_watched(tmp_path: Path) -> None:
    world = World()
    watched = StopSignals(world)
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    watched.watch()
    try:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        os.kill(os.getpid(), signal.SIGUSR1)
        assert watched.requested is signal.SIGUSR1
    finally:
        watched.close()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_closing_the_engine_gives_the_signals_back() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with start() as engine:
        engine.watch_signals()
        step(engine)
        assert engine.stop_requested is None
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_only_the_main_thread_may_watch() -> None:
    errors: list[Exception] = []

    def watch() -> None:
        try:
            StopSignals(World()).watch()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert isinstance(errors[0], UsageError)


def _count(rank: int) -> list[tuple[int, int]]:
    """Messages and bytes of control in a step, of a loop that watches for signals and of one that does not."""
    found = []
    for watching in (True, False):
        with start() as engine:
            if watching:
                engine.watch_signals()
            step(engine)
            before = engine.world.links.statistics()["control"]
            step(engine)
            after = engine.world.links.statistics()["control"]
            found.append((after.operations - before.operations, after.bytes - before.bytes))
    return found


def test_the_agreement_needs_no_message_of_its_own() -> None:
    for watching, plain in run_ranks(_count, 2):
        assert watching == plain
