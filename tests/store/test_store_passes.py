"""A pass over several kinds of arrays at once: some read, some updated, some filled, each group ended by itself."""

import errno
from pathlib import Path

import numpy as np
import pytest

from tests.store.stores import LARGE, create, other_than
from zstore.errors import BudgetError, StorageError, UsageError
from zstore.store import StoreOptions, TensorStore
from zstore.testing.contract import as_array
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.oracle import same_bits

TIERS = ("device", "host", "disk")


@pytest.mark.parametrize("tier", TIERS)
def test_one_pass_reads_updates_and_fills(store: TensorStore, tier: str) -> None:
    master = create(store, tier, name="model/w")
    gradient = create(store, tier, dtype="bfloat16", name="gradient/w")
    create(store, tier, dtype="bfloat16", name="parameter/w")
    store.write("model/w", master).wait()
    store.write("gradient/w", gradient).wait()
    before = store.statistics()
    for tile in store.stream(
        [["model/w", "gradient/w", "parameter/w"]], modes={"gradient/w": "read", "parameter/w": "fill"}
    ):
        w, g, p = (as_array(v, d) for v, d in zip(tile.views, ("float32", "bfloat16", "bfloat16"), strict=True))
        w.view(np.uint8)[:] = ~w.view(np.uint8)
        p[:] = g
        g[:] = 0
    after = store.statistics()
    assert same_bits(store.read("model/w").wait(), other_than(master))
    assert same_bits(store.read("parameter/w").wait(), gradient)
    if tier == "disk":  # what is only read is not written back; in memory views are the array itself
        assert same_bits(store.read("gradient/w").wait(), gradient)
        wide, narrow = master.nbytes, gradient.nbytes
        assert after.disk_read_bytes - before.disk_read_bytes == pytest.approx(wide + narrow, rel=0.03)
        assert after.disk_write_bytes - before.disk_write_bytes == pytest.approx(wide + narrow, rel=0.03)


@pytest.mark.parametrize("small", [False, True])
def test_views_that_are_read_last_as_long_as_their_buffer(store: TensorStore, small: bool) -> None:
    names, held, ends = [f"model/{number}" for number in range(6)], [], 0
    shape = (30, 1000) if small else LARGE
    if small:
        store.share_files()  # and buffers
    values = {name: create(store, "disk", shape, name=name) for name in names}
    for name in names:
        store.write(name, values[name]).wait()
    for tile in store.stream([[name] for name in names], "read"):
        held.append((values[names[tile.group]].ravel()[tile.first : tile.stop], tile.views[0]))
        if tile.ends_buffer:
            assert all(same_bits(np.asarray(view), wanted) for wanted, view in held)
            held.clear()
            ends += 1
    assert not held
    assert 0 < ends < (len(names) if small else 2 * len(names) + 1)


def test_each_group_ends_by_itself_and_can_be_read_at_once(store: TensorStore) -> None:
    names = [f"model/{i}" for i in range(4)]
    for name in names:
        store.write(name, create(store, "disk", name=name)).wait()
    seen: list[int] = []

    def ended(group: int) -> None:
        seen.append(group)
        assert (store.read(names[group]).wait() == group + 10).all()

    for tile in store.stream([[name] for name in names], on_end=ended):
        tile.views[0][:] = tile.group + 10
    assert seen == [0, 1, 2, 3]


def test_a_failed_pass_keeps_the_groups_that_ended(store: TensorStore, files: FaultyFiles) -> None:
    names = [f"model/{i}" for i in range(3)]
    for name in names:
        store.write(name, create(store, "disk", name=name)).wait()
    files.inject(Fault(kind="write", pattern="*model%2F2*", times=None, error_number=errno.EIO))
    ended: list[int] = []
    tiles = store.stream([[name] for name in names], on_end=ended.append)

    def change() -> None:
        for tile in tiles:
            tile.views[0][:] = 7

    with pytest.raises(StorageError):
        change()
    files.heal()
    assert ended == [0, 1][: len(ended)]
    assert all((store.read(names[group]).wait() == 7).all() for group in ended)


def test_a_pass_with_a_pool_of_its_own_does_not_wait_for_the_other(store: TensorStore) -> None:
    values = create(store, "disk", name="model/w")
    store.write("model/w", values).wait()
    pool = store.make_pool(1024 * 1024)
    with store.resources.pool.acquire(store.resources.pool.nbytes):
        total = sum(tile.views[0].size for tile in store.stream([["model/w"]], "read", pool=pool, ahead=True))
    assert total == values.size
    assert store.statistics().pool_bytes == store.resources.pool.nbytes + pool.nbytes
    assert store.statistics().queue.operations["prefetch"] > 0


def test_pools_count_against_the_budget(tmp_path: Path) -> None:
    budget = 8 * 1024 * 1024
    with TensorStore(StoreOptions(run_path=tmp_path, host_budget_bytes=budget)) as store:
        store.make_pool(budget // 4)
        with pytest.raises(BudgetError, match="raise the budget"):
            store.make_pool(budget // 2)
        with pytest.raises(BudgetError):
            create(store, "host", (1100, 1000))


def test_groups_are_begun_when_they_are_admitted_and_left_out_otherwise(store: TensorStore) -> None:
    names = [f"model/{i}" for i in range(4)]
    for name in names:
        store.write(name, create(store, "disk", name=name)).wait()
    asked: list[tuple[int, bool]] = []

    def admit(group: int, wait: bool) -> bool:
        asked.append((group, wait))
        return group == 1 or (wait and group != 2)

    seen = {}
    for tile in store.stream([[name] for name in names], admit=admit):
        tile.views[0][:] = seen.setdefault(tile.group, tile.group)
    assert list(seen) == [0, 1, 3]
    assert (0, True) in asked
    assert (1, True) not in asked
    assert (2, True) in asked
    assert all((store.read(names[group]).wait() == group).all() for group in seen)
    assert not (store.read(names[2]).wait() == 2).all()


@pytest.mark.parametrize("tier", ["device", "host"])
def test_memory_is_changed_in_place(store: TensorStore, tier: str) -> None:
    values = create(store, tier, name="model/w")
    version = store.version("model/w")
    with store.changing(["model/w"]):
        memory = store.memory("model/w")
        assert len(memory) == store.local("model/w").valid_numel
        with pytest.raises(UsageError, match="being changed"):
            store.snapshot()
        as_array(memory, "float32")[:] = values
    assert same_bits(store.read("model/w").wait(), values)
    assert store.version("model/w") != version
    store.snapshot().release()


def test_what_is_on_disk_cannot_be_changed_in_memory(store: TensorStore) -> None:
    create(store, "disk", name="model/w")
    with pytest.raises(UsageError, match="array 'model/w' is on tier 'disk'"), store.changing(["model/w"]):
        pass


def test_arrays_are_changed_together_or_not_at_all(store: TensorStore) -> None:
    """One that somebody changes already leaves the others as they were; what is pinned is copied out or waited for."""
    for name in ("model/v", "model/w"):
        create(store, "host", name=name)
    versions = [store.version(name) for name in ("model/v", "model/w")]
    with store.changing(["model/w"]):
        with pytest.raises(UsageError, match="being changed"), store.changing(["model/v", "model/w"]):
            pass
        with store.changing(["model/v"]):
            pass
    assert all(store.version(name) != before for name, before in zip(("model/v", "model/w"), versions, strict=True))
