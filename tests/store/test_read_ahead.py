"""Spans that are read before it is known whether the pass over them will be."""

import errno
from functools import partial
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from tests.store.stores import Array, create, flip, other_than
from zstore.errors import StorageError
from zstore.store import Snapshot, StoreOptions, TensorStore
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.oracle import same_bits

NAMES = [f"model/{i}" for i in range(3)]


def filled(store: TensorStore, tier: str = "disk", names: list[str] = NAMES) -> list[Array]:
    values = [create(store, tier, name=name) for name in names]
    for name, array in zip(names, values, strict=True):
        store.write(name, array).wait()
    return values


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_was_read_ahead_serves_the_pass_and_is_read_once(store: TensorStore, tier: str) -> None:
    values = filled(store, tier)
    before = store.statistics().disk_read_bytes
    begun = store.read_ahead([[name] for name in NAMES])
    assert (store.statistics().disk_read_bytes > before or store.resources.pool.held_bytes > 0) == (tier == "disk")
    ended: list[int] = []
    assert begun.go_on(on_end=ended.append)
    flip(begun.tiles())
    assert ended == [0, 1, 2]
    read_bytes = store.statistics().disk_read_bytes - before
    assert read_bytes == pytest.approx(sum(array.nbytes for array in values), rel=0.03) or tier == "host"
    for name, array in zip(NAMES, values, strict=True):
        assert same_bits(store.read(name).wait(), other_than(array))
    assert store.resources.pool.held_bytes == 0


def test_what_is_dropped_leaves_no_trace(store: TensorStore) -> None:
    values = filled(store)
    versions = [store.version(name) for name in NAMES]
    begun = store.read_ahead([[name] for name in NAMES])
    begun.drop()
    assert [store.version(name) for name in NAMES] == versions
    store.snapshot().release()  # nothing is being changed
    for name, array in zip(NAMES, values, strict=True):
        assert same_bits(store.read(name).wait(), array)
    store.resources.pool.acquire(store.resources.pool.nbytes).release()  # would hang if anything were still held


@pytest.mark.parametrize("pinned", [False, True])
def test_a_shard_that_changed_meanwhile_is_read_anew(store: TensorStore, *, pinned: bool) -> None:
    values = filled(store)
    snapshot = store.snapshot() if pinned else None
    begun = store.read_ahead([[name] for name in NAMES])
    store.write(NAMES[1], other_than(values[1])).wait()
    assert not begun.go_on()
    flip(store.stream([[name] for name in NAMES]))
    assert same_bits(store.read(NAMES[1]).wait(), values[1])
    assert same_bits(store.read(NAMES[0]).wait(), other_than(values[0]))
    if snapshot is not None:
        snapshot.release()


def test_a_pin_of_memory_that_comes_after_it_is_waited_for_with_no_buffer_held(tmp_path: Path) -> None:
    with TensorStore(StoreOptions(run_path=tmp_path, num_threads=2)) as store:
        disk = filled(store, "disk", ["model/a"])[0]
        host = filled(store, "host", ["model/b"])[0]
        begun = store.read_ahead([["model/a", "model/b"]])
        snapshot = store.snapshot(["model/b"])
        assert begun.go_on()
        # As a save that needs buffers would: this would hang if the pin were waited for with some in hand.
        saving = Thread(target=partial(_release_once_all_is_free, store, snapshot))
        saving.start()
        flip(begun.tiles())
        saving.join()
        assert same_bits(store.read("model/a").wait(), other_than(disk))
        assert same_bits(store.read("model/b").wait(), other_than(host))


def _release_once_all_is_free(store: TensorStore, snapshot: Snapshot) -> None:
    with store.resources.pool.acquire(store.resources.pool.nbytes):
        snapshot.release()


def test_an_error_of_a_read_ahead_is_the_passes(store: TensorStore, files: FaultyFiles) -> None:
    filled(store)
    files.inject(Fault(kind="read", times=1, error_number=errno.EIO))
    begun = store.read_ahead([[name] for name in NAMES])
    assert begun.go_on()
    with pytest.raises(StorageError):
        flip(begun.tiles())
    assert store.resources.pool.held_bytes == 0


def test_what_was_read_of_a_former_version_is_right_once_there_is_another(store: TensorStore) -> None:
    values = filled(store)
    kept = store.snapshot(NAMES)
    reading = store.stream([[name] for name in NAMES], "read")
    first = next(reading)  # the others are on their way
    found = [np.array(first.views[0])]
    flip(store.stream([[name] for name in NAMES], "update"))
    groups = [first.group]
    for tile in reading:
        groups.append(tile.group)
        found.append(np.array(tile.views[0]))
    for number, array in enumerate(values):
        parts = [part for group, part in zip(groups, found, strict=True) if group == number]
        flat = np.concatenate(parts)
        assert same_bits(flat, array.reshape(-1)) or same_bits(flat, other_than(array).reshape(-1))
    kept.release()
