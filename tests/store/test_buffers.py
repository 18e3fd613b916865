"""Slabs and the pool: lent memory never overlaps, all of it comes back, and waiting is no deadlock."""

import itertools
import logging
import os
import random
import re
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.runs import make_config, start
from tests.waiting import until
from zstore.engine.runtime.device import Streams
from zstore.errors import BudgetError, UsageError
from zstore.format import Bytes
from zstore.io import PinnedSlabs, Workers, run_in_thread
from zstore.io.memory import HUGE_PAGE_BYTES, PAGE_BYTES, Budget, Buffer, Pool, make_slab
from zstore.store import Store, StoreOptions
from zstore.testing.ranks import run_ranks

KIB = 1024
MIB = 1024 * 1024


def extent(data: np.ndarray) -> tuple[int, int]:
    start = data.ctypes.data
    return start, start + data.nbytes


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
    mappings = re.findall(r"(?ms)^(\w+)-(\w+) .*?^VmFlags: (.*?)$", Path("/proc/self/smaps").read_text())
    (flags,) = (flags for low, high, flags in mappings if int(low, 16) <= slab.ctypes.data < int(high, 16))
    assert "hg" in flags.split()


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
        assert self.pool.used_bytes == sum(-(-b.bytes.size // PAGE_BYTES) * PAGE_BYTES for b in self.lent)
        assert self.pool.peak_bytes >= self.pool.used_bytes

    def teardown(self) -> None:
        for buffer in self.lent:
            buffer.release()
        assert self.pool.used_bytes == 0
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
        with pytest.raises(BudgetError, match=r"a buffer of 200704 bytes in addition to the pool of 65536.* 262144"):
            ask(192 * KIB + 1)
    # What the pool itself can hold is never over the limit.
    small = Pool(64 * KIB, budget=Budget(PAGE_BYTES))
    with small.acquire(64 * KIB):
        pass


def test_requests_are_served_in_the_order_they_came() -> None:
    pool = Pool(4 * PAGE_BYTES)
    order, give_back = list[int](), [threading.Event() for _ in range(3)]

    def ask(number: int, pages: int) -> None:
        with pool.acquire(pages * PAGE_BYTES):
            order.append(number)
            give_back[number].wait(200)

    held = pool.acquire(3 * PAGE_BYTES)
    # A large request first: the small ones behind it would fit, but must not overtake it.
    askers = []
    for number, pages in enumerate([4, 1, 1]):
        askers.append(run_in_thread(partial(ask, number, pages), "asker"))
        until(lambda: len(pool._waiting) > number)  # noqa: B023
    assert pool.try_acquire(PAGE_BYTES) is None
    held.release()
    until(lambda: order)
    assert order == [0]
    give_back[0].set()
    until(lambda: len(order) == 3)
    assert order == [0, 1, 2]
    assert len(pool._waiting) == 0
    for number, asker in enumerate(askers):
        give_back[number].set()
        asker.wait(200)
    assert pool.used_bytes == 0


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
    assert len(pool._waiting) == 0
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

    with Workers(6, "contending") as workers:
        workers.run([partial(work, seed) for seed in range(6)])
    assert failures == []
    assert pool.used_bytes == 0
    assert pool.peak_bytes <= 8 * PAGE_BYTES + 9 * PAGE_BYTES


class Runtime:
    def __init__(self, limit_bytes: int = 1 << 40, raises: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.raises = raises
        self.registered: dict[int, int] = {}
        self.calls = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls += 1
        if self.raises:
            raise RuntimeError("no driver")
        if sum(self.registered.values()) + nbytes > self.limit_bytes:
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_slabs_are_registered_until_the_end() -> None:
    runtime = Runtime()
    slabs = PinnedSlabs(runtime)
    first, second = slabs.make(MIB), slabs.make(3 * MIB)
    assert runtime.registered == {first.ctypes.data: MIB, second.ctypes.data: 3 * MIB}
    assert slabs.pinned_bytes == 4 * MIB
    assert slabs.make(0).size == 0
    slabs.close()
    assert runtime.registered == {}
    assert slabs.pinned_bytes == 0
    slabs.close()
    assert slabs.messages == []


@pytest.mark.filterwarnings("ignore:.*is multi-threaded:DeprecationWarning")  # from Python 3.12 on
def test_processes_that_are_forked_have_no_copy_of_registered_memory() -> None:
    """Of pinned pages the kernel makes a copy at once, for each worker of a DataLoader."""

    def child_has(slab: Bytes) -> bool:
        pid = os.fork()
        if pid == 0:
            lines = Path("/proc/self/maps").read_text().splitlines()
            places = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
            os._exit(any(first <= slab.ctypes.data < stop for first, stop in places))
        return bool(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    slabs = PinnedSlabs(Runtime())
    large, small = slabs.make(3 * MIB), slabs.make(MIB)
    large[:], small[:] = 1, 2
    assert (child_has(large), child_has(small)) == (False, True)
    slabs.close()
    assert child_has(large)
    assert large.sum() == large.size


def test_a_slab_is_registered_as_long_as_a_view_of_it_lives() -> None:
    runtime = Runtime()
    slabs = PinnedSlabs(runtime)
    kept = slabs.make(MIB)
    view = slabs.make(2 * MIB)[MIB:].view("float32")[:5]
    assert slabs.pinned_bytes == 3 * MIB
    del view
    assert runtime.registered == {kept.ctypes.data: MIB}
    assert slabs.pinned_bytes == MIB
    slabs.close()
    assert runtime.registered == {}


@pytest.mark.parametrize("runtime", [Runtime(2 * MIB), Runtime(raises=True)])
def test_what_cannot_be_registered_is_ordinary_memory(runtime: Runtime) -> None:
    slabs = PinnedSlabs(runtime)
    for _ in range(4):
        slab = slabs.make(MIB + 4096)
        slab[:] = 1
    assert len(slabs.messages) == 1
    assert "host memory is not pinned" in slabs.messages[0]
    assert runtime.calls < 4  # it is not tried again
    slabs.close()
    assert runtime.registered == {}


def test_a_store_pins_what_it_is_told(tmp_path: Path) -> None:
    for pin_buffers, pin_state in [(True, False), (False, True), (True, True)]:
        runtime = Runtime()
        options = StoreOptions(run_path=tmp_path, pin_buffers=pin_buffers, pin_state=pin_state)
        with Store(options, cuda=runtime) as store:
            store.make_pool(MIB)
            assert (store.statistics().pinned_bytes > 0) == pin_buffers
            assert store.fallbacks == ()
        assert runtime.registered == {}


class HostStreams(Streams):
    """Those of the host, with a runtime to register memory with."""

    def __init__(self, runtime: Runtime) -> None:
        self.cuda_runtime = runtime


@pytest.mark.parametrize("pinned", [True, False])
def test_state_of_a_run_is_pinned(pinned: bool, caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime() if pinned else Runtime(raises=True)
    config = make_config(3, "cpu")
    config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": True}
    with caplog.at_level(logging.WARNING), start(config, _streams=HostStreams(runtime)) as engine:
        found = engine.statistics().store
        assert (found.host_bytes > found.pinned_bytes > 0) == pinned  # masters and moments stay on the host
    assert runtime.registered == {}
    assert sum("host memory is not pinned" in record.message for record in caplog.records) == int(not pinned)


def _warned(rank: int) -> list[str]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zstore").addHandler(handler)
    config = make_config(1, "cpu")
    config["zero_optimization"]["offload_optimizer"]["pin_memory"] = True
    start(config, _streams=_Away()).close()
    return [message for message in found if "not pinned" in message]


class _Away(Streams):
    """Says that the device is not the host, so that memory is to be pinned."""

    device_is_host = False


def test_ranks_that_cannot_pin_say_so_once() -> None:
    (said, *others) = run_ranks(_warned, 2)
    assert others == [[]]
    assert len(said) == 1
    assert said[0].startswith("every rank: host memory is not pinned")
