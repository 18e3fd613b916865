"""Small arrays that rank 0 stores whole: fewer files, the same values, and no trace of how they came together."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.checkpoints import open_world, save_arrays, wait_all
from zstore.checkpoint import pieces as pieces_module
from zstore.checkpoint import publish
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.save import save_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import CorruptionError, RankError, StorageError, UsageError
from zstore.format import partition
from zstore.format.partition import WHOLE_BYTES, grid_in_checkpoint, make_grid
from zstore.io.files import OpenFile
from zstore.testing.faults import Fault, FaultyFiles
from zstore.tools.inspect import inspect_command

NOISE = np.random.default_rng(0)
ARRAYS = {
    "model/bias": NOISE.standard_normal(77).astype(np.float32),
    "model/weight": NOISE.standard_normal((300, 100)).astype(np.float32),
    "model/short": NOISE.standard_normal(5).astype(np.float32),
    "model/none": np.zeros((0, 5), np.float32),
    "model/half": NOISE.standard_normal((96, 40)).astype(np.float16),
    "optimizer/exp_avg/bias": NOISE.standard_normal(77).astype(np.float32),
    "optimizer/step/bias": NOISE.integers(0, 9, (7, 3, 5)).astype(np.int64),
}
WORLDS = [2, 3, 5]


def save(folder: Path, world_size: int, **options: Any) -> Path:
    return save_arrays(folder, ARRAYS, world_size=world_size, few_files=True, **options)


def files_of(tag: Path) -> list[str]:
    return sorted(str(path.relative_to(tag)) for path in tag.rglob("*") if path.is_file() and path.name != "zarr.json")


@pytest.mark.parametrize("world_size", WORLDS)
def test_small_arrays_have_one_file_and_large_ones_one_for_each_rank(world_size: int, tmp_path: Path) -> None:
    tag = save(tmp_path, world_size)
    assert files_of(tag) == sorted(
        [
            *(f"manifest/rank-{rank:05d}.json" for rank in range(world_size)),
            "zstore.json",
            *(f"model/weight/c.{rank}.0" for rank in range(world_size)),
            *(f"model/{name}" for name in ("bias/c.0", "short/c.0", "half/c.0.0")),
            *(f"optimizer/{name}" for name in ("exp_avg/bias/c.0", "step/bias/c.0.0")),
        ]
    )


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_reader_finds_the_same_values(world_size: int, tmp_path: Path) -> None:
    tag = save(tmp_path, world_size)
    root = zarr.open_group(tag, mode="r")
    with open_checkpoint(tmp_path) as reader:
        assert verify_checkpoint(reader) == []
        for name, array in ARRAYS.items():
            assert np.array_equal(reader.read_array(name), array)
            stored = array.reshape(reader.arrays[name].spec.stored_shape)
            assert np.array_equal(np.asarray(root[name]), stored)
            assert np.array_equal(np.asarray(zarr.open_array(tag / name, mode="r")), stored)
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tag / name)}}
            assert np.array_equal(tensorstore.open(spec, read=True).result().read().result(), stored)


@pytest.mark.parametrize("world_size", WORLDS)
def test_manifests_name_each_file_once_and_rank_0_the_whole_ones(world_size: int, tmp_path: Path) -> None:
    tag = save(tmp_path, world_size)
    listed = []
    for rank in range(world_size):
        manifest = json.loads((tag / f"manifest/rank-{rank:05d}.json").read_text())
        listed += [(entry["array"], entry["shard"]) for entry in manifest["shards"]]
        assert {entry["shard"] for entry in manifest["shards"]} == {rank}
    assert len(listed) == len(set(listed)) == len(list(tag.rglob("c.*")))


def test_values_are_those_of_the_moment_of_the_save(tmp_path: Path) -> None:
    with open_world(ARRAYS, world_size=3) as world:
        handles = world.begin_save(tmp_path, few_files=True)
        # A change waits until its shard was copied, and no longer: not until rank 0 has put it together.
        for rank, store in enumerate(world.stores):
            grid = world.grids["model/bias"]
            if numel := grid.shard_valid_numel(rank):
                store.write("model/bias", np.zeros(numel, np.float32)).wait()
        wait_all(handles)
    with open_checkpoint(tmp_path) as reader:
        assert np.array_equal(reader.read_array("model/bias"), ARRAYS["model/bias"])


def test_many_groups_are_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "one", 3)
    monkeypatch.setattr(pieces_module, "_GROUP_BYTES", 1)
    save(tmp_path / "many", 3)
    one, many = (tmp_path / name / "step-00000001" for name in ("one", "many"))
    assert files_of(one) == files_of(many)
    for file in (path.relative_to(one) for path in one.rglob("c.*")):
        assert (one / file).read_bytes() == (many / file).read_bytes()


def test_the_cut_is_whole_below_64_kib_and_that_of_the_ranks_from_there_on() -> None:
    for numel, itemsize in ((WHOLE_BYTES // 4, 4), (WHOLE_BYTES // 2, 2)):
        for world_size in (1, 2, 7):
            grid = make_grid((numel,), world_size)
            assert grid_in_checkpoint((numel,), itemsize, grid, world_size) == grid
            below = make_grid((numel - 1,), world_size)
            assert grid_in_checkpoint((numel - 1,), itemsize, below, world_size) == make_grid((numel - 1,), 1)


# -- links --------------------------------------------------------------------------------------------------------------


def test_what_did_not_change_is_linked(tmp_path: Path) -> None:
    with open_world(ARRAYS, world_size=3) as world:
        first = world.save(tmp_path, step=1, few_files=True)
        known = {rank: summary.known for rank, summary in enumerate(first)}
        world.stores[0].write("model/bias", np.zeros(world.grids["model/bias"].shard_valid_numel(0), np.float32)).wait()
        requests = [
            world.request(tmp_path, rank, "0" * 31 + "1", step=2, few_files=True, known=known[rank])
            for rank in range(3)
        ]
        wait_all([save_checkpoint(request) for request in requests])
    one, two = (tmp_path / f"step-0000000{step}" for step in (1, 2))
    same = {str(p.relative_to(one)): os.path.samefile(p, two / p.relative_to(one)) for p in one.rglob("c.*")}
    assert not same.pop("model/bias/c.0")
    assert all(same.values())
    with open_checkpoint(two) as reader:
        assert verify_checkpoint(reader) == []
        assert not np.array_equal(reader.read_array("model/bias"), ARRAYS["model/bias"])


def test_a_file_of_the_same_checksums_and_other_bytes_is_not_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_world(ARRAYS, world_size=2) as world:
        known = world.save(tmp_path, step=1, few_files=True)[0].known
        world.stores[0].write("model/bias", np.zeros(world.grids["model/bias"].shard_valid_numel(0), np.float32)).wait()
        # One chunk in four billion would have such a checksum by chance.
        monkeypatch.setattr(publish, "checksum_shard", lambda res, spec, *rest: known[spec.name].crcs)
        world.save(tmp_path, step=2, few_files=True, known=known)
    one, two = (tmp_path / f"step-0000000{step}/model/bias/c.0" for step in (1, 2))
    assert not os.path.samefile(one, two)
    with open_checkpoint(tmp_path) as reader:
        assert verify_checkpoint(reader) == []
        assert not reader.read_array("model/bias")[:16].any()


def assert_the_next_save_sweeps(folder: Path) -> None:
    """No checkpoint, and after the next save no trace: a rank may have been about to write when another one failed."""
    assert tags(folder) == []
    save(folder, 2)
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000001"]
    assert not list(folder.rglob("*.pieces-*"))


# -- what goes wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "kind", "pattern"),
    [
        (0, "write_small", "*.pieces-*"),
        (1, "write_small", "*.pieces-*"),
        (0, "unlink", "*.pieces-*"),  # rank 0 alone removes them, and stores the whole
        (0, "open", "*/model/bias/c.0"),
        (0, "write", "*/model/bias/c.0"),
    ],
)
def test_a_fault_with_a_piece_fails_the_save_and_leaves_nothing(
    rank: int, kind: Any, pattern: str, tmp_path: Path
) -> None:
    files = [FaultyFiles(), FaultyFiles()]
    files[rank] = FaultyFiles(faults=(Fault(kind=kind, pattern=pattern, error_number=errno.EIO),))
    with open_world(ARRAYS, world_size=2, files=files) as world, pytest.raises((StorageError, RankError)):
        world.save(tmp_path, few_files=True)
    assert_the_next_save_sweeps(tmp_path)


class _Flipping(FaultyFiles):
    """Files that change a bit of each piece."""

    def _pwritev(self, file: OpenFile, data: Any, offset: int) -> int:
        if ".pieces-" in file.path:
            data = data.copy()
            data[0] ^= 1
        return super()._pwritev(file, data, offset)


@pytest.mark.parametrize("damage", ["lost", "flipped"])
def test_a_damaged_piece_is_refused(damage: str, tmp_path: Path) -> None:
    lost = FaultyFiles(faults=(Fault(kind="write", pattern="*.pieces-*", lost=True),))
    files = [FaultyFiles(), _Flipping() if damage == "flipped" else lost]
    with (
        open_world(ARRAYS, world_size=2, files=files) as world,
        pytest.raises(CorruptionError, match="is not what rank 1 wrote"),
    ):
        world.save(tmp_path, few_files=True)
    assert_the_next_save_sweeps(tmp_path)


def test_pieces_are_of_arrays_that_are_stored_as_one_shard(tmp_path: Path) -> None:
    with open_world(ARRAYS, world_size=2) as world, pytest.raises(UsageError, match="expected one shard"):
        world.save(tmp_path, pieces=dict(world.grids))


# -- huge worlds ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def five_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worlds of five ranks and more store small shards of two together."""
    monkeypatch.setattr(partition, "GROUPED_WORLD", 5)
    monkeypatch.setattr(partition, "RANKS_PER_FILE", 2)


@pytest.mark.usefixtures("five_are_many")
@pytest.mark.parametrize("world_size", [5, 6, 7])
def test_small_shards_of_neighbours_are_one_file_in_a_huge_world(world_size: int, tmp_path: Path) -> None:
    tag = save(tmp_path, world_size)
    held = make_grid((300, 100), world_size)
    files = sorted(path.name for path in (tag / "model/weight").glob("c.*"))
    assert files == [f"c.{shard}.0" for shard in range(-(-held.num_shards // 2))]
    assert not list(tag.rglob("*.pieces-*"))
    with open_checkpoint(tmp_path) as reader:
        grid = reader.arrays["model/weight"].grid
        # What a rank loads is as before: whole chunks of its own.
        assert (grid.shard_rows, grid.chunk_rows) == (2 * held.shard_rows, held.chunk_rows)
    test_every_reader_finds_the_same_values(world_size, tmp_path / "again")
    listed = [
        (entry["array"], entry["shard"], rank)
        for rank in range(world_size)
        for entry in json.loads((tag / f"manifest/rank-{rank:05d}.json").read_text())["shards"]
    ]
    assert all(shard == rank for _, shard, rank in listed)
    assert len(listed) == len(set(listed)) == len(list(tag.rglob("c.*")))


@pytest.mark.usefixtures("five_are_many")
def test_joined_shards_are_linked_where_nothing_changed_and_hold_what_did(tmp_path: Path) -> None:
    with open_world(ARRAYS, world_size=5) as world:
        known = {rank: one.known for rank, one in enumerate(world.save(tmp_path, step=1, few_files=True))}
        changed = world.grids["model/weight"].shard_valid_numel(3)
        world.stores[3].write("model/weight", np.zeros(changed, np.float32)).wait()
        requests = [
            world.request(tmp_path, rank, "0" * 31 + "1", step=2, few_files=True, known=known[rank])
            for rank in range(5)
        ]
        wait_all([save_checkpoint(request) for request in requests])
    one, two = (tmp_path / f"step-0000000{step}/model/weight" for step in (1, 2))
    assert [os.path.samefile(one / f"c.{n}.0", two / f"c.{n}.0") for n in range(3)] == [True, False, True]
    with open_checkpoint(tmp_path) as reader:
        assert verify_checkpoint(reader) == []
        assert (reader.read_array("model/weight") == 0).sum() == changed


@pytest.mark.usefixtures("five_are_many")
@pytest.mark.parametrize(
    ("rank", "kind", "pattern"),
    [(4, "write_small", "*00004.pieces-*"), (2, "rename", "*00002.pieces-*"), (1, "write", "*/model/weight/c.1.0")],
)
def test_a_fault_with_a_joined_shard_fails_the_save_and_leaves_nothing(
    rank: int, kind: Any, pattern: str, tmp_path: Path
) -> None:
    files = [FaultyFiles() for _ in range(5)]
    files[rank] = FaultyFiles(faults=(Fault(kind=kind, pattern=pattern, error_number=errno.EIO),))
    with open_world(ARRAYS, world_size=5, files=files) as world, pytest.raises((StorageError, RankError)):
        world.save(tmp_path, few_files=True)
    assert_the_next_save_sweeps(tmp_path)


@given(rows=st.integers(1, 40_000), columns=st.integers(1, 600), world_size=st.sampled_from([64, 511, 512, 1000, 4096]))
def test_the_cut_of_a_huge_world_joins_small_shards_alone(rows: int, columns: int, world_size: int) -> None:
    held = make_grid((rows, columns), world_size)
    grid = grid_in_checkpoint((rows, columns), 4, held, world_size)
    nbytes = held.shard_numel * 4
    if held.num_shards <= 1 or rows * columns * 4 < WHOLE_BYTES:
        assert grid.num_shards == 1
    elif world_size < 512 or nbytes >= WHOLE_BYTES:
        assert grid == held
    else:
        assert grid.num_shards == -(-held.num_shards // 64)
        assert grid.shard_rows == 64 * held.shard_rows
        assert grid.shard_numel * 4 <= 4 * 2**20
        assert (grid.chunk_rows, grid.chunk_cols) == (held.chunk_rows, held.chunk_cols)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_512_ranks_save_few_files(tmp_path: Path) -> None:
    arrays = {f"model/h.{number}.w": NOISE.standard_normal((768, 512)).astype(np.float32) for number in range(3)}
    tag = save_arrays(tmp_path, arrays, world_size=512, few_files=True)
    assert len(list(tag.rglob("c.*"))) == 3 * -(-make_grid((768, 512), 512).num_shards // 64)
    with open_checkpoint(tmp_path) as reader:
        assert verify_checkpoint(reader) == []
        for name, array in arrays.items():
            assert np.array_equal(reader.read_array(name), array)


def test_inspect_counts_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tag = save(tmp_path, 5)
    inspect_command(tmp_path)
    shard_files = len(list(tag.rglob("c.*")))
    assert f" in {shard_files} files, with checksums" in capsys.readouterr().out
