"""Who stands still, and why: each cause moves by the time that passes while somebody waits for it, and no other does.

Time passes when a test says so: when somebody is about to wait for what stands at a gate, is lent out or is pinned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.fake_device import FakeDevice, FakeEvent
from tests.engine.runs import make_config, moved_since, start, step
from zstore.engine.runtime.device import Transfers
from zstore.io.links import LinkCounters, LinkStatistics
from zstore.io.queue import Ticket
from zstore.store import TensorStore
from zstore.store.tiers.memory import MemoryTier
from zstore.testing.faults import GatedFiles

PASSED_S = 5.0
ON_DISK = ["model/embed.weight", "optimizer/exp_avg/embed.weight", "optimizer/exp_avg_sq/embed.weight"]
IN_MEMORY = "model/norm.weight"


class Clock:
    """Stands still, but for what a test lets pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self.on_full: Callable[[], None] | None = None
        """Called once when the test's thread reads the time in the queue, which it does as it finds the queue full."""
        self._thread = threading.current_thread()

    @property
    def is_watched(self) -> bool:
        """Whether this is the test's own thread."""
        return threading.current_thread() is self._thread

    def perf_counter(self) -> float:
        return self.now

    def read_in_queue(self) -> float:
        now, full = self.now, self.on_full
        if full is not None and self.is_watched:
            self.on_full = None
            full()
        return now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the store."""
    found = Clock()
    monkeypatch.setattr("zstore.store.stream.time", found)
    monkeypatch.setattr("zstore.io.queue.time", SimpleNamespace(perf_counter=found.read_in_queue))
    return found


@pytest.fixture
def gate() -> Iterator[GatedFiles]:
    """Files whose reads and writes wait once the gate is closed."""
    files = GatedFiles("read", "write")
    files.open_gate()
    with files.holding():
        yield files


class Stalls:
    """Lets a store of one thread and room for one operation stand still by one cause."""

    def __init__(self, store: TensorStore, files: GatedFiles, clock: Clock, patch: pytest.MonkeyPatch) -> None:
        self._store, self._files, self._clock, self._patch = store, files, clock, patch

    def _go_over(self, names: list[str], mode: Any) -> None:
        for tile in self._store.stream([names], mode):
            for view in tile.views:
                view[:] = 1

    def _end(self) -> None:
        """Let time pass, and what stands at the gate go on."""
        self._clock.now += PASSED_S
        self._files.open_gate()

    def _at_the_gate(self, mode: str) -> None:
        wait = Ticket.wait

        def about_to_wait(ticket: Ticket[Any], timeout_s: float | None = None) -> Any:
            if not ticket.done() and self._clock.is_watched:
                self._patch.setattr(Ticket, "wait", wait)
                self._end()
            return wait(ticket, timeout_s)

        self._patch.setattr(Ticket, "wait", about_to_wait)
        self._files.close_gate()
        self._go_over(ON_DISK[:1], mode)

    def reading(self) -> None:
        self._at_the_gate("read")

    def writing(self) -> None:
        self._at_the_gate("fill")

    def without_a_buffer(self) -> None:
        pool = self._store.resources.pool
        held = pool.acquire(pool.nbytes)

        def relieve() -> None:
            while not pool.num_waiting:
                sleep(0.001)
            self._clock.now += PASSED_S
            held.release()

        relief = threading.Thread(target=relieve, daemon=True)
        relief.start()
        self._go_over(ON_DISK[:1], "read")
        relief.join()

    def pinned(self) -> None:
        snapshot, wait = self._store.snapshot([IN_MEMORY]), MemoryTier._wait_for_unpinning

        def about_to_wait(tier: MemoryTier, name: str) -> None:
            self._clock.now += PASSED_S
            snapshot.release()
            wait(tier, name)

        self._patch.setattr(MemoryTier, "_wait_for_unpinning", about_to_wait)
        self._go_over([IN_MEMORY], "fill")

    def without_room_in_the_queue(self) -> None:
        self._clock.on_full = self._end
        self._files.close_gate()
        self._go_over(ON_DISK, "fill")
        assert self._clock.on_full is None


CAUSES: list[tuple[Callable[[Stalls], None], str, str]] = [
    (Stalls.reading, "disk_read", "not read yet"),
    (Stalls.without_a_buffer, "disk_read", "no free buffer"),
    (Stalls.writing, "disk_write", "not written yet"),
    (Stalls.pinned, "disk_write", "pass not begun"),
    (Stalls.without_room_in_the_queue, "disk_write", "queue full"),
]


@pytest.mark.parametrize(("stall", "link", "cause"), CAUSES, ids=[cause for *_, cause in CAUSES])
def test_an_engine_tells_each_cause_by_its_link(
    stall: Callable[[Stalls], None],
    link: str,
    cause: str,
    tmp_path: Path,
    gate: GatedFiles,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with start(make_config(1, "nvme", tmp_path, aio={"queue_depth": 1, "thread_count": 1}), _files=gate) as engine:
        step(engine)
        engine.training_state.pending.complete()
        before = engine.statistics()
        stall(Stalls(engine.training_state.state.store, gate, clock, monkeypatch))
        moved = moved_since(engine, before)
    found = {(name, why): s for name, one in moved.items() for why, s in one.stall_s.items() if s != 0}
    assert found == {(link, cause): PASSED_S}


class SlowDevice(FakeDevice):
    """A copy ends some time after somebody began to wait for it."""

    clock_of_host: Clock

    def wait(self, event: FakeEvent) -> None:
        if not self.query(event):
            self.clock_of_host.now += PASSED_S
        super().wait(event)


def test_a_copy_that_was_begun_earlier_counts_what_is_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device, links = SlowDevice(), LinkCounters()
    device.clock_of_host = Clock()
    monkeypatch.setattr("zstore.engine.runtime.device.time", device.clock_of_host)
    transfers = Transfers(device, links)
    copy = transfers.begin(device.empty_host(6, torch.bfloat16), torch.ones(6, dtype=torch.bfloat16))
    device.clock_of_host.now += 3.0  # computing
    for _ in range(2):
        assert transfers.finish(copy).tolist() == [1.0] * 6
    assert links.statistics() == {
        "device_to_host": LinkStatistics(operations=1, bytes=12, stall_s={"begun earlier": PASSED_S})
    }
