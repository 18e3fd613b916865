"""Store: what is written is read, on every tier, at any size, with await and without."""

import errno
import sys
import threading
import weakref
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from tests.store.stores import LARGE, create, other_than
from tests.waiting import until
from zstore.errors import BudgetError, DiskFullError, UsageError
from zstore.format import ArraySpec, make_grid
from zstore.store import SMALL_SHARD_BYTES, Store, StoreOptions, TierName
from zstore.testing.faults import Fault, FaultyFiles, GatedFiles
from zstore.testing.oracle import same_bits

TIERS = ("device", "host", "disk")
MIB = 1024 * 1024


def test_a_part_is_read_without_the_rest(store: Store) -> None:
    values = create(store, "disk", (4_000_000,))
    store.write("model/w", values).wait()
    before = store.statistics().disk_read_bytes
    assert same_bits(store.read("model/w", 2_000_000, 2_000_010).wait(), values[2_000_000:2_000_010])
    read_bytes = store.statistics().disk_read_bytes - before
    assert 0 < read_bytes <= 2 * MIB
    out = np.zeros(1000, np.float32)
    assert store.read("model/w", 99_500, 100_500, out).wait() is out
    assert same_bits(out, values[99_500:100_500])


def test_what_was_read_is_its_readers_alone(store: Store) -> None:
    create(store, "disk")
    found = weakref.ref(store.read("model/w").wait())
    until(lambda: found() is None)  # the thread that read may be about to let go


@pytest.mark.timeout(60)
def test_transfers_may_finish_in_any_order(tmp_path: Path) -> None:
    """Several reads, then several writes, stand at a gate and go through it last come, first served."""
    files = GatedFiles("read", "write", pattern="*.shard")
    files.open_gate()
    with Store(StoreOptions(run_path=tmp_path, num_threads=4, block_bytes=256 * 1024), files=files) as store:
        values = create(store, "disk", (1000, 1000), "int32")
        store.write("model/w", values).wait()

        def update() -> None:
            for tile in store.tiles([["model/w"]]):
                tile.views[0][:] += 1

        with files.backwards():
            update()
        assert same_bits(store.read("model/w").wait(), values + 1)


@pytest.mark.timeout(60)
def test_other_arrays_are_read_in_the_middle_of_a_pass(tmp_path: Path) -> None:
    with Store(StoreOptions(run_path=tmp_path, host_budget_bytes=4 * MIB)) as store:
        a, b = create(store, "disk", (2_000_000,), name="model/a"), create(store, "disk", (2_000_000,), name="model/b")
        store.write("model/a", a)
        store.write("model/b", b).wait()
        for tile in store.tiles([["model/a"]]):
            other = store.read("model/b", tile.first, tile.stop).wait(200)
            assert same_bits(other, b[tile.first : tile.stop])
            tile.views[0][:] = other
        assert same_bits(store.read("model/a").wait(), b)


def test_small_shards_rest_in_memory_even_where_the_disk_was_asked_for(store: Store) -> None:
    create(store, "disk", (SMALL_SHARD_BYTES // 4 - 1,), name="model/small")
    create(store, "disk", (SMALL_SHARD_BYTES // 4,), name="model/large")
    assert (store.tier("model/small").name, store.tier("model/large").name) == ("host", "disk")


@pytest.mark.parametrize(
    ("budget", "pool"),
    [
        (64 * 1024, 32 * 1024),
        (10 * MIB, 5 * MIB),
        (400 * MIB, 64 * MIB),
        (800 * MIB, 100 * MIB),
        (2000 * MIB, 128 * MIB),
    ],
)
def test_the_pool_is_half_of_a_small_budget_an_eighth_of_a_larger_one(tmp_path: Path, budget: int, pool: int) -> None:
    with Store(StoreOptions(run_path=tmp_path, host_budget_bytes=budget)) as store:
        assert store.statistics().pool_bytes == pool
    assert StoreOptions(host_budget_bytes=budget, max_pool_bytes=96 * MIB).pool_bytes == min(budget // 2, 96 * MIB)


def test_state_and_buffers_stay_within_the_budget_together(tmp_path: Path) -> None:
    with Store(StoreOptions(run_path=tmp_path, host_budget_bytes=8 * MIB)) as store:
        create(store, "host", (MIB // 4 * 3,), name="model/a")
        with pytest.raises(BudgetError, match=r"'model/b' needs 2097152 bytes of host memory, but .*host_budget_bytes"):
            create(store, "host", (MIB // 4 * 2,), name="model/b")
        assert store.names() == ["model/a"]
        create(store, "disk", (MIB // 4 * 2,), name="model/b")
        create(store, "host", (MIB // 4,), name="model/c")
        found = store.statistics()
        assert found.pool_bytes + found.host_bytes == 8 * MIB
        # A chunk that no buffer holds would need memory beside them, and there is none left.
        spec = ArraySpec(name="model/long", shape=(20, 300_001), dtype="float32")
        store.create(spec, grid=make_grid(spec.stored_shape, 1), shard=0, tier="disk")
        with pytest.raises(BudgetError, match="one request needs a buffer of"):
            store.write("model/long", np.zeros(spec.numel, np.float32)).wait()


def test_a_snapshot_that_fails_releases_what_it_pinned(store: Store) -> None:
    values = create(store, "host")
    with pytest.raises(KeyError, match="no array 'model/nowhere'"):
        store.snapshot(["model/w", "model/nowhere"])
    store.write("model/w", values).wait(200)


def test_a_failed_write_whose_ticket_was_dropped_fails_the_commit_once(store: Store, files: FaultyFiles) -> None:
    values = create(store, "disk")
    store.write("model/w", values).wait()
    snapshot = store.snapshot()
    for act in (lambda: store.flush().wait(), store.snapshot):
        files.inject(Fault(kind="allocate", error_number=errno.ENOSPC))
        store.write("model/w", other_than(values))
        store.read("model/w")
        with pytest.raises(DiskFullError):
            act()
        assert same_bits(store.read("model/w").wait(), values)
        store.flush().wait()
    files.inject(Fault(kind="allocate", error_number=errno.ENOSPC))
    assert isinstance(store.write("model/w", other_than(values)).error(), DiskFullError)
    store.write("model/w", values[::-1].copy()).wait()
    store.flush().wait()
    snapshot.release()


def test_values_are_of_whole_arrays(store: Store) -> None:
    create(store, "host", world_size=2, shard=1)
    for act in (store.get, lambda name: store.update(name, 0), lambda name: store.stream([name]), store.checkpoint):
        with pytest.raises(UsageError, match="is sharded 2 ways: use `read`, `write` and `tiles`"):
            act("model/w")


@pytest.mark.parametrize("tier", TIERS)
def test_an_array_in_use_stays(store: Store, tier: str) -> None:
    values = create(store, tier)
    store.write("model/w", values).wait()
    with store.snapshot(), pytest.raises(UsageError):
        store.remove("model/w")
    passing = store.tiles([["model/w"]])
    next(passing)
    with pytest.raises(UsageError, match="being changed"):
        store.remove("model/w")
    passing.close()
    store.remove("model/w")


def test_an_array_that_would_rest_otherwise_is_not_renamed(store: Store) -> None:
    create(store, "host")
    for dtype, tier in (("bfloat16", "host"), ("float32", "disk")):
        spec = ArraySpec(name="other/v", shape=LARGE, dtype=dtype)
        assert not store.rename("model/w", spec, tier=cast("TierName", tier))
    with pytest.raises(UsageError, match="already exists"):
        store.rename("model/w", ArraySpec(name="model/w", shape=LARGE, dtype="float32"), tier="host")
    passing = store.tiles([["model/w"]])
    next(passing)
    with pytest.raises(UsageError, match="being changed"):
        store.rename("model/w", ArraySpec(name="other/v", shape=LARGE, dtype="float32"), tier="host")
    passing.close()
    assert store.names() == ["model/w"]


@pytest.mark.parametrize("packs", [False, True])
def test_threads_work_on_different_arrays_at_once(tmp_path: Path, packs: bool) -> None:
    interval = sys.getswitchinterval()
    errors: list[BaseException] = []
    with Store(StoreOptions(run_path=tmp_path, max_pool_bytes=8 * 2**20)) as store:
        if packs:
            store.share_files()

        def work(number: int) -> None:
            try:
                for turn in range(12):
                    name, numel = f"model/{number}.{turn}", 32 * 1024 + 16 * number
                    spec = ArraySpec(name=name, shape=(numel,), dtype="float32")
                    tier = ("disk", "host")[turn % 2]
                    store.create(spec, grid=make_grid(spec.stored_shape, 1), shard=0, tier=tier)  # type: ignore[arg-type]
                    values = np.full(numel, 100 * number + turn, np.float32)
                    store._write(name, values, 0)
                    assert (store._read(name, 0, numel, None) == values).all()
                    assert name in store
                    store.statistics()
                    if turn % 3:
                        store.remove(name)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        sys.setswitchinterval(1e-5)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(200)
        finally:
            sys.setswitchinterval(interval)
        assert not errors
        held = {name: store.local(name).nbytes for name in store.names()}
        assert len(held) == 8 * 4
        statistics = store.statistics()
        assert statistics.disk_bytes + statistics.host_bytes == sum(held.values())
        for name in held:
            number, _, turn = name.removeprefix("model/").partition(".")
            assert (store.read(name).wait() == 100 * int(number) + int(turn)).all()
        disk = store.tier("model/0.0")
        for name in held:
            store.remove(name)
        assert sum(disk._drives.assigned_bytes.values()) == 0
        assert store.budget.used_bytes == 8 * 2**20
