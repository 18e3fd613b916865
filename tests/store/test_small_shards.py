"""Shards of 64 to 256 KiB share files: neighbours go in one request, and each has versions of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.store.stores import Array, create, flip, other_than
from zstore.errors import CorruptionError
from zstore.format.arrays import Bytes
from zstore.io.files import OpenFile, ScatteredMemory
from zstore.io.queue import Priority
from zstore.io.shards import ShardReader
from zstore.store import StoreOptions, TensorStore
from zstore.testing.faults import FaultyFiles
from zstore.testing.oracle import same_bits

SMALL = (25, 1000)
"""100 KB in fp32."""
LEAST_BYTES = 256 * 1024


class CountedFiles(FaultyFiles):
    """Files that note the bytes of each request."""

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


def make(store: TensorStore, count: int, shape: tuple[int, ...] = SMALL) -> dict[str, Array]:
    store.share_files()
    values = {name: create(store, "disk", shape, name=name) for n in range(count) for name in names_of(n)}
    for name, array in values.items():
        store.write(name, array).wait()
    return values


def flip_all(store: TensorStore, numbers: list[int]) -> None:
    flip(store.stream([names_of(number) for number in numbers]))


@pytest.mark.parametrize("count", [2, 100])
def test_no_request_of_a_pass_is_under_256_kib_where_there_is_more(count: int, tmp_path: Path) -> None:
    files = CountedFiles()
    with TensorStore(StoreOptions(run_path=tmp_path), files=files) as store:
        values = make(store, count)
        operations = store.statistics().queue.operations
        for pinned in (False, True, False):
            snapshot = store.snapshot() if pinned else None
            files.requests.clear()
            flip_all(store, list(range(count)))
            total = sum(array.nbytes for array in values.values())
            assert sum(nbytes for _, nbytes in files.requests) == pytest.approx(2 * total, rel=0.1)
            assert min(nbytes for _, nbytes in files.requests) >= min(LEAST_BYTES, total // 3)
            if snapshot is not None:
                snapshot.release()
        num_operations = sum(store.statistics().queue.operations.values()) - sum(operations.values())
        assert num_operations <= max(3 * 2 * total // (1024 * 1024), 12)  # a thread is woken for a megabyte or more
        for name, array in values.items():
            assert same_bits(store.read(name).wait(), other_than(array))


def test_a_pinned_version_is_published_as_it_was_while_others_are_made(tmp_path: Path) -> None:
    with TensorStore(StoreOptions(run_path=tmp_path)) as store:
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
    with TensorStore(StoreOptions(run_path=tmp_path)) as store:
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
    with TensorStore(StoreOptions(run_path=tmp_path)) as store:
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
    with TensorStore(StoreOptions(run_path=tmp_path)) as store:
        make(store, 3)
        [path] = tmp_path.rglob("model-pack.0.shard")
        data = bytearray(path.read_bytes())
        data[2 * len(data) // 3] ^= 1
        path.write_bytes(data)
        with pytest.raises(CorruptionError, match=f"offset {2 * len(data) // 3}"):
            flip_all(store, [0, 1, 2])
