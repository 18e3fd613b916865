"""Slabs and the pool: lent memory never overlaps, all of it comes back, and waiting is no deadlock."""

import itertools
import random
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.waiting import until
from zstore.errors import BudgetError, UsageError
from zstore.io.buffers import HUGE_PAGE_BYTES, PAGE_BYTES, Budget, Buffer, Pool, make_slab

KIB = 1024
MIB = 1024 * 1024


def extent(data: np.ndarray) -> tuple[int, int]:
    start = data.ctypes.data
    return start, start + data.nbytes


# -- slabs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 4096, MIB, 3 * MIB + 17])
def test_a_slab_is_zeroed_aligned_and_writable(nbytes: int) -> None:
    slab = make_slab(nbytes)
    assert slab.shape == (nbytes,)
    assert slab.dtype == np.uint8
    assert slab.ctypes.data % (HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else PAGE_BYTES) == 0
    assert not slab.any()
    slab[:] = 7


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="no transparent huge pages here")
def test_a_slab_asks_for_huge_pages() -> None:
    slab = make_slab(4 * MIB)
    flags: list[str] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            low, high = (int(x, 16) for x in first.split("-"))
            inside = low <= slab.ctypes.data < high
        elif inside and first == "VmFlags:":
            flags = rest
    assert "hg" in flags


# -- the pool, one thread -------------------------------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """What is lent is apart, aligned and of the size asked for; what is free again can be had again."""

    @initialize(pages=st.integers(1, 12))
    def make(self, pages: int) -> None:
        self.pool = Pool(pages * PAGE_BYTES)
        self.lent: list[Buffer] = []
        assert self.pool.nbytes == pages * PAGE_BYTES

    @rule(nbytes=st.integers(1, 14 * PAGE_BYTES))
    def lend(self, nbytes: int) -> None:
        pages = -(-nbytes // PAGE_BYTES)
        buffer = self.pool.try_acquire(nbytes)
        if buffer is None:
            # Only where it cannot be had: no gap is long enough, or one oversized request is out already.
            assert pages > self.longest_gap() if pages * PAGE_BYTES <= self.pool.nbytes else self.oversized()
            return
        assert buffer.bytes.size == nbytes
        assert buffer.bytes.ctypes.data % PAGE_BYTES == 0
        buffer.bytes[:] = len(self.lent) + 1
        self.lent.append(buffer)

    def extents(self) -> list[tuple[int, int]]:
        return sorted(extent(b.bytes) for b in self.lent)

    def oversized(self) -> bool:
        return any(-(-b.bytes.size // PAGE_BYTES) * PAGE_BYTES > self.pool.nbytes for b in self.lent)

    def longest_gap(self) -> int:
        """Pages of the longest run of the slab that no lent buffer touches."""
        start = self.pool._slab.ctypes.data
        used = np.zeros(self.pool.nbytes // PAGE_BYTES, bool)
        for low, high in self.extents():
            if start <= low < start + self.pool.nbytes:
                used[(low - start) // PAGE_BYTES : -(-(high - start) // PAGE_BYTES)] = True
        return max(map(len, "".join("x" if u else "." for u in used).split("x")), default=0)

    @precondition(lambda self: self.lent)
    @rule(data=st.data(), twice=st.booleans())
    def give_back(self, data: st.DataObject, twice: bool) -> None:
        buffer = self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))
        buffer.release()
        if twice:
            buffer.release()

    @invariant()
    def nothing_overlaps(self) -> None:
        extents = self.extents()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(extents))
        assert self.pool.held_bytes == sum(-(-b.bytes.size // PAGE_BYTES) * PAGE_BYTES for b in self.lent)
        assert self.pool.peak_bytes >= self.pool.held_bytes

    def teardown(self) -> None:
        for buffer in self.lent:
            buffer.release()
        assert self.pool.held_bytes == 0
        with self.pool.acquire(self.pool.nbytes) as whole:
            assert whole.bytes.size == self.pool.nbytes


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_slab_and_oversized_request_stay_within_the_limit_together() -> None:
    pool = Pool(64 * KIB, budget=Budget(256 * KIB))
    for ask in (pool.acquire, pool.try_acquire):
        with pytest.raises(UsageError, match="at least one byte"):
            ask(0)
    with pool.acquire(192 * KIB):
        pass
    for ask in (pool.acquire, pool.try_acquire):
        with pytest.raises(
            BudgetError, match=r"needs a buffer of 200704 bytes beside the pool of 65536.* 262144 for both"
        ):
            ask(192 * KIB + 1)
    # What the pool itself can hold is never over the limit.
    small = Pool(64 * KIB, budget=Budget(PAGE_BYTES))
    with small.acquire(64 * KIB):
        pass


# -- the pool, several threads --------------------------------------------------------------------------------------


class Asker(threading.Thread):
    """A thread that asks for one buffer, notes when it got it, and keeps it until told."""

    def __init__(self, pool: Pool, nbytes: int, order: list[int], number: int) -> None:
        super().__init__(daemon=True)
        self.pool, self.nbytes, self.order, self.number = pool, nbytes, order, number
        self.got, self.give_back = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with self.pool.acquire(self.nbytes):
            self.order.append(self.number)
            self.got.set()
            self.give_back.wait(200)


def wait_for_waiting(pool: Pool, count: int) -> None:
    """Return once `count` requests wait."""
    until(lambda: pool.num_waiting >= count)


def test_requests_are_served_in_the_order_they_came() -> None:
    pool = Pool(4 * PAGE_BYTES)
    order: list[int] = []
    held = pool.acquire(3 * PAGE_BYTES)
    # A large request first: the small ones behind it would fit, but must not overtake it.
    askers = []
    for number, pages in enumerate([4, 1, 1]):
        askers.append(Asker(pool, pages * PAGE_BYTES, order, number))
        wait_for_waiting(pool, number + 1)
    assert pool.try_acquire(PAGE_BYTES) is None
    held.release()
    assert askers[0].got.wait(200)
    assert order == [0]
    askers[0].give_back.set()
    for asker in askers[1:]:
        assert asker.got.wait(200)
    assert order == [0, 1, 2]
    assert pool.num_waiting == 0
    for asker in askers:
        asker.give_back.set()
        asker.join(200)
    assert pool.held_bytes == 0


def test_a_request_that_is_interrupted_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(PAGE_BYTES)

    class Interrupted(BaseException):
        pass

    def interrupt(condition: threading.Condition) -> None:
        raise Interrupted

    held = pool.acquire(PAGE_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "wait", interrupt)
        with pytest.raises(Interrupted):
            pool.acquire(PAGE_BYTES)
    assert pool.num_waiting == 0
    held.release()
    with pool.acquire(PAGE_BYTES):
        pass


def test_threads_that_contend_all_get_their_turn_and_nobody_shares() -> None:
    pool = Pool(8 * PAGE_BYTES)
    rounds, failures = 150, []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(rounds):
            pages = rng.choice([1, 1, 2, 3, 8, 9])
            with pool.acquire(pages * PAGE_BYTES) as buffer:
                buffer.bytes[:] = seed
                if rng.random() < 0.3 and (more := pool.try_acquire(PAGE_BYTES)) is not None:
                    more.bytes[:] = seed
                    more.release()
                if not (buffer.bytes == seed).all():
                    failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert pool.held_bytes == 0
    assert pool.peak_bytes <= 8 * PAGE_BYTES + 9 * PAGE_BYTES
