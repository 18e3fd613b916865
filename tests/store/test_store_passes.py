"""A pass over several kinds of arrays at once: some read, some updated, some filled, each group ended by itself."""

import errno
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from tests.store.stores import LARGE, Array, create, flip, other_than
from zstore.errors import BudgetError, CorruptionError, StorageError, UsageError
from zstore.format import Bytes
from zstore.format.shardfile import ScatteredMemory
from zstore.io import Priority, ShardReader
from zstore.io.files import OpenFile
from zstore.store import Snapshot, Store, StoreOptions
from zstore.testing.contract import as_array
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.oracle import same_bits

TIERS = ("device", "host", "disk")
NAMES = [f"model/{i}" for i in range(3)]


def filled(store: Store, tier: str = "disk", names: list[str] = NAMES) -> list[Array]:
    values = [create(store, tier, name=name) for name in names]
    for name, array in zip(names, values, strict=True):
        store.write(name, array).wait()
    return values


@pytest.mark.parametrize("tier", TIERS)
def test_one_pass_reads_updates_and_fills(store: Store, tier: str) -> None:
    master = create(store, tier, name="model/w")
    gradient = create(store, tier, dtype="bfloat16", name="gradient/w")
    create(store, tier, dtype="bfloat16", name="parameter/w")
    store.write("model/w", master).wait()
    store.write("gradient/w", gradient).wait()
    before = store.statistics()
    for tile in store.tiles(
        [["model/w", "gradient/w", "parameter/w"]], modes={"gradient/w": "read", "parameter/w": "fill"}
    ):
        w, g, p = map(as_array, tile.views)
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
def test_views_that_are_read_last_as_long_as_their_buffer(store: Store, small: bool) -> None:
    names, held, ends = [f"model/{number}" for number in range(6)], [], 0
    shape = (30, 1000) if small else LARGE
    if small:
        store.share_files()  # and buffers
    values = {name: create(store, "disk", shape, name=name) for name in names}
    for name in names:
        store.write(name, values[name]).wait()
    for tile in store.tiles([[name] for name in names], "read"):
        held.append((values[names[tile.group]].ravel()[tile.first : tile.stop], tile.views[0]))
        if tile.ends_buffer:
            assert all(same_bits(np.asarray(view), wanted) for wanted, view in held)
            held.clear()
            ends += 1
    assert not held
    assert 0 < ends < (len(names) if small else 2 * len(names) + 1)


def test_each_group_ends_by_itself_and_can_be_read_at_once(store: Store) -> None:
    names = [f"model/{i}" for i in range(4)]
    filled(store, names=names)
    seen: list[int] = []

    def ended(group: int) -> None:
        seen.append(group)
        assert (store.read(names[group]).wait() == group + 10).all()

    for tile in store.tiles([[name] for name in names], on_end=ended):
        tile.views[0][:] = tile.group + 10
    assert seen == [0, 1, 2, 3]


def test_a_failed_pass_keeps_the_groups_that_ended(store: Store, files: FaultyFiles) -> None:
    names = [f"model/{i}" for i in range(3)]
    filled(store, names=names)
    files.inject(Fault(kind="write", pattern="*model%2F2*", times=None, error_number=errno.EIO))
    ended: list[int] = []
    tiles = store.tiles([[name] for name in names], on_end=ended.append)

    def change() -> None:
        for tile in tiles:
            tile.views[0][:] = 7

    with pytest.raises(StorageError):
        change()
    files.heal()
    assert ended == [0, 1][: len(ended)]
    assert all((store.read(names[group]).wait() == 7).all() for group in ended)


def test_a_pass_with_a_pool_of_its_own_does_not_wait_for_the_other(store: Store) -> None:
    values = create(store, "disk", name="model/w")
    store.write("model/w", values).wait()
    pool = store.make_pool(1024 * 1024)
    with store.resources.pool.acquire(store.resources.pool.nbytes):
        total = sum(tile.views[0].size for tile in store.tiles([["model/w"]], "read", pool=pool, ahead=True))
    assert total == values.size
    assert store.statistics().pool_bytes == store.resources.pool.nbytes + pool.nbytes
    assert store.statistics().queue.of(Priority.PREFETCH).operations > 0


def test_pools_count_against_the_budget(tmp_path: Path) -> None:
    budget = 8 * 1024 * 1024
    with Store(StoreOptions(run_path=tmp_path, host_budget_bytes=budget)) as store:
        store.make_pool(budget // 4)
        with pytest.raises(BudgetError, match="raise the budget"):
            store.make_pool(budget // 2)
        with pytest.raises(BudgetError):
            create(store, "host", (1100, 1000))


def test_groups_are_begun_when_they_are_admitted_and_left_out_otherwise(store: Store) -> None:
    names = [f"model/{i}" for i in range(4)]
    filled(store, names=names)
    asked: list[tuple[int, bool]] = []

    def admit(group: int, wait: bool) -> bool:
        asked.append((group, wait))
        return group == 1 or (wait and group != 2)

    seen = {}
    for tile in store.tiles([[name] for name in names], admit=admit):
        tile.views[0][:] = seen.setdefault(tile.group, tile.group)
    assert list(seen) == [0, 1, 3]
    assert (0, True) in asked
    assert (1, True) not in asked
    assert (2, True) in asked
    assert all((store.read(names[group]).wait() == group).all() for group in seen)
    assert not (store.read(names[2]).wait() == 2).all()


@pytest.mark.parametrize("tier", ["device", "host"])
def test_memory_is_changed_in_place(store: Store, tier: str) -> None:
    values = create(store, tier, name="model/w")
    version = store.tier("model/w").version("model/w")
    with store.changing(["model/w"]):
        memory = store.memory("model/w")
        assert len(memory) == store.local("model/w").valid_numel
        with pytest.raises(UsageError, match="being changed"):
            store.snapshot()
        as_array(memory)[:] = values
    assert same_bits(store.read("model/w").wait(), values)
    assert store.tier("model/w").version("model/w") != version
    store.snapshot().release()


def test_what_is_on_disk_cannot_be_changed_in_memory(store: Store) -> None:
    create(store, "disk", name="model/w")
    with pytest.raises(UsageError, match="array 'model/w' is on tier 'disk'"), store.changing(["model/w"]):
        pass


def test_arrays_are_changed_together_or_not_at_all(store: Store) -> None:
    """One that somebody changes already leaves the others as they were; what is pinned is copied out or waited for."""
    for name in ("model/v", "model/w"):
        create(store, "host", name=name)
    versions = [store.tier(name).version(name) for name in ("model/v", "model/w")]
    with store.changing(["model/w"]):
        with pytest.raises(UsageError, match="being changed"), store.changing(["model/v", "model/w"]):
            pass
        with store.changing(["model/v"]):
            pass
    assert all(store.tier(n).version(n) != before for n, before in zip(("model/v", "model/w"), versions, strict=True))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_was_read_ahead_serves_the_pass_and_is_read_once(store: Store, tier: str) -> None:
    values = filled(store, tier)
    before = store.statistics().disk_read_bytes
    begun = store.read_ahead([[name] for name in NAMES])
    assert (store.statistics().disk_read_bytes > before or store.resources.pool.used_bytes > 0) == (tier == "disk")
    ended: list[int] = []
    assert begun.resume(on_end=ended.append)
    flip(begun.tiles())
    assert ended == [0, 1, 2]
    read_bytes = store.statistics().disk_read_bytes - before
    assert read_bytes == pytest.approx(sum(array.nbytes for array in values), rel=0.03) or tier == "host"
    for name, array in zip(NAMES, values, strict=True):
        assert same_bits(store.read(name).wait(), other_than(array))
    assert store.resources.pool.used_bytes == 0


def test_what_is_dropped_leaves_no_trace(store: Store) -> None:
    values = filled(store)
    versions = [store.tier(name).version(name) for name in NAMES]
    begun = store.read_ahead([[name] for name in NAMES])
    begun.drop()
    assert [store.tier(name).version(name) for name in NAMES] == versions
    store.snapshot().release()  # nothing is being changed
    for name, array in zip(NAMES, values, strict=True):
        assert same_bits(store.read(name).wait(), array)
    store.resources.pool.acquire(store.resources.pool.nbytes).release()  # would hang if anything were still held


@pytest.mark.parametrize("pinned", [False, True])
def test_a_shard_that_changed_meanwhile_is_read_anew(store: Store, *, pinned: bool) -> None:
    values = filled(store)
    snapshot = store.snapshot() if pinned else None
    begun = store.read_ahead([[name] for name in NAMES])
    store.write(NAMES[1], other_than(values[1])).wait()
    assert not begun.resume()
    flip(store.tiles([[name] for name in NAMES]))
    assert same_bits(store.read(NAMES[1]).wait(), values[1])
    assert same_bits(store.read(NAMES[0]).wait(), other_than(values[0]))
    if snapshot is not None:
        snapshot.release()


def test_a_pin_of_memory_that_comes_after_it_is_waited_for_with_no_buffer_held(tmp_path: Path) -> None:
    with Store(StoreOptions(run_path=tmp_path, num_threads=2)) as store:
        disk = filled(store, "disk", ["model/a"])[0]
        host = filled(store, "host", ["model/b"])[0]
        begun = store.read_ahead([["model/a", "model/b"]])
        snapshot = store.snapshot(["model/b"])
        assert begun.resume()
        # As a save that needs buffers would: this would hang if the pin were waited for with some in hand.
        saving = Thread(target=partial(_release_once_all_is_free, store, snapshot))
        saving.start()
        flip(begun.tiles())
        saving.join()
        assert same_bits(store.read("model/a").wait(), other_than(disk))
        assert same_bits(store.read("model/b").wait(), other_than(host))


def _release_once_all_is_free(store: Store, snapshot: Snapshot) -> None:
    with store.resources.pool.acquire(store.resources.pool.nbytes):
        snapshot.release()


def test_an_error_of_a_read_ahead_is_the_passes(store: Store, files: FaultyFiles) -> None:
    filled(store)
    files.inject(Fault(kind="read", times=1, error_number=errno.EIO))
    begun = store.read_ahead([[name] for name in NAMES])
    assert begun.resume()
    with pytest.raises(StorageError):
        flip(begun.tiles())
    assert store.resources.pool.used_bytes == 0


def test_what_was_read_of_a_former_version_is_right_once_there_is_another(store: Store) -> None:
    values = filled(store)
    kept = store.snapshot(NAMES)
    reading = store.tiles([[name] for name in NAMES], "read")
    first = next(reading)  # the others are on their way
    found = [np.array(first.views[0])]
    flip(store.tiles([[name] for name in NAMES], "update"))
    groups = [first.group]
    for tile in reading:
        groups.append(tile.group)
        found.append(np.array(tile.views[0]))
    for number, array in enumerate(values):
        parts = [part for group, part in zip(groups, found, strict=True) if group == number]
        flat = np.concatenate(parts)
        assert same_bits(flat, array.reshape(-1)) or same_bits(flat, other_than(array).reshape(-1))
    kept.release()


SMALL = (25, 1000)
"""100 KB in fp32."""


class CountedFiles(FaultyFiles):
    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[str, int]] = []

    def _preadv(self, file: OpenFile, out: Bytes | ScatteredMemory, offset: int) -> int:
        self.requests.append(("read", out.size))
        return super()._preadv(file, out, offset)

    def _pwritev(self, file: OpenFile, data: Bytes | ScatteredMemory, offset: int) -> int:
        self.requests.append(("write", data.size))
        return super()._pwritev(file, data, offset)


def names_of(number: int) -> list[str]:
    return [f"model/{number}", f"optimizer/exp_avg/{number}", f"optimizer/exp_avg_sq/{number}"]


def make(store: Store, count: int, shape: tuple[int, ...] = SMALL) -> dict[str, Array]:
    store.share_files()
    values = {name: create(store, "disk", shape, name=name) for n in range(count) for name in names_of(n)}
    for name, array in values.items():
        store.write(name, array).wait()
    return values


def flip_all(store: Store, numbers: list[int]) -> None:
    flip(store.tiles([names_of(number) for number in numbers]))


@pytest.mark.parametrize("count", [2, 100])
def test_no_request_of_a_pass_is_under_256_kib_where_there_is_more(count: int, tmp_path: Path) -> None:
    files = CountedFiles()
    with Store(StoreOptions(run_path=tmp_path), files=files) as store:
        values = make(store, count)
        operations = store.statistics().queue.of(*Priority).operations
        for pinned in (False, True, False):
            snapshot = store.snapshot() if pinned else None
            files.requests.clear()
            flip_all(store, list(range(count)))
            total = sum(array.nbytes for array in values.values())
            assert sum(nbytes for _, nbytes in files.requests) == pytest.approx(2 * total, rel=0.1)
            assert min(nbytes for _, nbytes in files.requests) >= min(256 * 1024, total // 3)
            if snapshot is not None:
                snapshot.release()
        num_operations = store.statistics().queue.of(*Priority).operations - operations
        assert num_operations <= max(3 * 2 * total // (1024 * 1024), 12)  # a thread is woken for a megabyte or more
        for name, array in values.items():
            assert same_bits(store.read(name).wait(), other_than(array))


def test_a_pinned_version_is_published_as_it_was_while_others_are_made(tmp_path: Path) -> None:
    with Store(StoreOptions(run_path=tmp_path)) as store:
        values = make(store, 5)
        first = store.snapshot()
        flip_all(store, list(range(5)))
        second = store.snapshot(names_of(2))
        flip_all(store, [1, 2, 3])
        folder = tmp_path / "published"
        folder.mkdir()
        res = store.resources
        for number, (name, pin) in enumerate([*first.pins.items(), *second.pins.items()]):
            local, path = store.local(name), folder / str(number)
            summary = pin.publish(res, path, local.grid, local.shard, Priority.CHECKPOINT)
            assert not summary.linked
            assert not pin.has_file
            out = np.empty(local.nbytes, dtype=np.uint8)
            reader = ShardReader(res, path, local.spec, local.grid, local.shard)
            assert tuple(reader.verify()) == summary.crcs == pin.checksums(res, local.grid, local.shard)
            reader.read(0, local.valid_numel, out)
            was = values[name] if number < 15 else other_than(values[name])
            assert same_bits(out.view(was.dtype), was)
        first.release()
        second.release()
        for name, array in values.items():
            changed_twice = int(name.rsplit("/", 1)[1]) in (1, 2, 3)
            assert same_bits(store.read(name).wait(), array if changed_twice else other_than(array))
        flip_all(store, [0, 4])


def test_two_generations_serve_any_number_of_snapshots(tmp_path: Path) -> None:
    with Store(StoreOptions(run_path=tmp_path)) as store:
        make(store, 3)
        needed = store.require_room(store.names())
        for _ in range(4):
            snapshot = store.snapshot()
            flip_all(store, [0, 1, 2])
            snapshot.release()
        assert len(list(tmp_path.rglob("*-pack.*.shard"))) == 4  # two kinds
        assert sum(path.stat().st_size for path in tmp_path.rglob("*-pack.1.shard")) == needed
        assert store.require_room(store.names()) == 0
    assert not list(tmp_path.rglob("*.shard"))


def test_the_room_of_a_removed_shard_is_used_again(tmp_path: Path) -> None:
    with Store(StoreOptions(run_path=tmp_path)) as store:
        values = make(store, 3)
        before = sum(path.stat().st_size for path in tmp_path.rglob("*.shard"))
        store.remove("model/1")
        again = create(store, "disk", SMALL, name="model/new")
        assert not store.read("model/new").wait().any()
        store.write("model/new", again).wait()
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.shard")) == before
        assert same_bits(store.read("model/0").wait(), values["model/0"])
        assert same_bits(store.read("model/new").wait(), again)
        store.rename("model/new", replace(store.spec("model/new"), name="model/other"), tier="disk")
        assert same_bits(store.read("model/other").wait(), again)


def test_damage_names_file_and_offset(tmp_path: Path) -> None:
    with Store(StoreOptions(run_path=tmp_path)) as store:
        make(store, 3)
        [path] = tmp_path.rglob("model-pack.0.shard")
        data = bytearray(path.read_bytes())
        data[2 * len(data) // 3] ^= 1
        path.write_bytes(data)
        with pytest.raises(CorruptionError, match=f"offset {2 * len(data) // 3}"):
            flip_all(store, [0, 1, 2])
