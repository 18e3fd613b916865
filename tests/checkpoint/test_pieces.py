"""Small arrays that rank 0 stores whole: fewer files, the same values, and no trace of how they came together."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr

from tests.checkpoint.checkpoints import open_world, save_arrays, wait_all
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import CorruptionError, RankError, StorageError, UsageError
from zstore.format.arrays import WHOLE_BYTES, grid_in_checkpoint, make_grid
from zstore.io.files import OpenFile
from zstore.testing.faults import Fault, FaultyFiles

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
WORLDS = [2, 5]


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


def test_the_cut_is_whole_below_64_kib_and_that_of_the_ranks_from_there_on() -> None:
    for numel, itemsize in ((WHOLE_BYTES // 4, 4), (WHOLE_BYTES // 2, 2)):
        for world_size in (1, 2, 7):
            grid = make_grid((numel,), world_size)
            assert grid_in_checkpoint((numel,), itemsize, grid) == grid
            below = make_grid((numel - 1,), world_size)
            assert grid_in_checkpoint((numel - 1,), itemsize, below) == make_grid((numel - 1,), 1)


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
