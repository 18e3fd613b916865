"""Shards that did not change since the last checkpoint are linked from it; small arrays are few files, which rank 0 stores."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.checkpoint.checkpoints import World, open_world, save_arrays, wait_all
from zstore.checkpoint.commit import discard
from zstore.checkpoint.part import SaveSummary
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import CorruptionError, RankError, StorageError, UsageError
from zstore.format.arrays import WHOLE_BYTES, grid_in_checkpoint, make_grid
from zstore.io.files import Files, OpenFile
from zstore.store import TierName
from zstore.testing.faults import Fault, FaultyFiles

Array = npt.NDArray[Any]
FROZEN, TRAINED = "model/frozen", "model/trained"


def make_arrays() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {
        FROZEN: rng.standard_normal((700, 60)).astype(np.float32),
        TRAINED: rng.standard_normal((300, 60)).astype(np.float32),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    path = tmp_path / "nvme"
    path.mkdir()
    return path


@pytest.fixture(params=["device", "host"])
def in_memory(request: pytest.FixtureRequest) -> Iterator[World]:
    tier: TierName = request.param
    with open_world(make_arrays(), tier=tier) as world:
        yield world


def save(world: World, folder: Path, step: int, before: SaveSummary | None = None) -> SaveSummary:
    return world.save(folder, step=step, known={} if before is None else before.known)[0]


def train(world: World) -> None:
    world.arrays[TRAINED][...] += 1
    world.stores[0].write(TRAINED, world.arrays[TRAINED].reshape(-1)).wait()


def inode(folder: Path, step: int, name: str) -> int:
    return (folder / f"step-{step:08d}" / name / "c.0.0").stat().st_ino


def check(world: World, folder: Path, step: int) -> list[str]:
    """The checkpoint is whole and holds what the arrays hold; returns which of them its manifest says are linked."""
    with open_checkpoint(folder, f"step-{step:08d}") as reader:
        assert verify_checkpoint(reader) == []
        for name, array in world.arrays.items():
            np.testing.assert_array_equal(reader.read_array(name), array)
        return [entry.array for entry in reader.manifest(0).shards if entry.linked]


def test_what_no_pass_changed_is_linked_and_the_rest_written(in_memory: World, folder: Path) -> None:
    first = save(in_memory, folder, 1)
    assert (first.num_linked, check(in_memory, folder, 1)) == (0, [])
    train(in_memory)
    second = save(in_memory, folder, 2, first)
    assert check(in_memory, folder, 2) == [FROZEN]
    assert inode(folder, 1, FROZEN) == inode(folder, 2, FROZEN)
    assert inode(folder, 1, TRAINED) != inode(folder, 2, TRAINED)
    assert second.linked_bytes == (folder / "step-00000002" / FROZEN / "c.0.0").stat().st_size
    assert second.written_bytes == first.written_bytes - second.linked_bytes
    # Through several checkpoints, of which the first may go.
    discard(Files(), folder / "step-00000001")
    third = save(in_memory, folder, 3, second)
    assert check(in_memory, folder, 3) == [FROZEN, TRAINED]
    assert third.written_bytes == 0


def test_a_write_that_was_no_pass_is_noticed(in_memory: World, folder: Path) -> None:
    first = save(in_memory, folder, 1)
    store = in_memory.stores[0]
    memory = store._tiers[FROZEN]._memory[FROZEN]  # type: ignore[attr-defined]
    memory[-1] = 7
    in_memory.arrays[FROZEN].reshape(-1)[-1] = 7
    save(in_memory, folder, 2, first)
    assert check(in_memory, folder, 2) == [TRAINED]
    assert os.stat(folder / "step-00000001" / FROZEN / "c.0.0").st_nlink == 1


def _change(file: Path, data: bytes) -> None:
    file.chmod(0o644)
    file.write_bytes(data)


def _replace(file: Path, data: bytes) -> None:
    file.unlink()
    file.write_bytes(data)


HARMS: dict[str, Callable[[Path, bytes], object]] = {
    "removed": lambda file, _: file.unlink(),
    "cut": lambda file, data: _change(file, data[:4096]),
    "rewritten": lambda file, data: _change(file, data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]),
    "replaced": _replace,
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_file_that_is_not_what_was_written_is_written_anew(in_memory: World, folder: Path, harm: str) -> None:
    first = save(in_memory, folder, 1)
    file = folder / "step-00000001" / FROZEN / "c.0.0"
    HARMS[harm](file, file.read_bytes())
    save(in_memory, folder, 2, first)
    assert check(in_memory, folder, 2) == [TRAINED]


def test_where_links_are_not_to_be_had_it_is_written(folder: Path) -> None:
    files = FaultyFiles(faults=(Fault(kind="link", times=None, error_number=95),))
    with open_world(make_arrays(), files=[files]) as world:
        second = save(world, folder, 2, save(world, folder, 1))
        assert check(world, folder, 2) == []
        assert second.num_linked == 0


def test_documents_are_linked_unless_they_were_changed(folder: Path) -> None:
    with open_world(make_arrays()) as world:
        first = save(world, folder, 1)
        paths = sorted(first.path.rglob("zarr.json"))
        arrays = [path for path in paths if json.loads(path.read_text())["node_type"] == "array"]
        changed = arrays[0]
        changed.chmod(0o644)
        changed.write_text(changed.read_text().replace("NaN", "nan"))
        second = save(world, folder, 2, first)
        assert check(world, folder, 2) == [FROZEN, TRAINED]
        for path in arrays:
            there = second.path / path.relative_to(first.path)
            assert there.samefile(path) == (path != changed)
            assert not there.stat().st_mode & 0o222
        shutil.rmtree(first.path)
        assert check(world, folder, 2) == [FROZEN, TRAINED]


def test_copies_on_another_file_system_are_made_once(nvme: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == nvme.stat().st_dev:
        pytest.skip("needs /dev/shm on a file system of its own")
    with (
        tempfile.TemporaryDirectory(dir=memory) as other,
        open_world(make_arrays(), tier="disk", run_path=nvme) as world,
    ):
        folder = Path(other)
        first = save(world, folder, 1)
        assert first.num_linked == 0
        assert "2 of 2 shards on disk were copied in the background" in first.messages[0]
        train(world)
        second = save(world, folder, 2, first)
        assert check(world, folder, 2) == [FROZEN]
        assert "1 of 2 shards on disk were copied in the background" in second.messages[0]


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


def save_pieces(folder: Path, world_size: int, **options: Any) -> Path:
    return save_arrays(folder, ARRAYS, world_size=world_size, few_files=True, **options)


def files_of(tag: Path) -> list[str]:
    return sorted(str(path.relative_to(tag)) for path in tag.rglob("*") if path.is_file() and path.name != "zarr.json")


@pytest.mark.parametrize("world_size", [2, 5])
def test_small_arrays_have_one_file_and_large_ones_one_for_each_rank(world_size: int, tmp_path: Path) -> None:
    tag = save_pieces(tmp_path, world_size)
    assert files_of(tag) == sorted(
        [
            *(f"manifest/rank-{rank:05d}.json" for rank in range(world_size)),
            "zstore.json",
            *(f"model/weight/c.{rank}.0" for rank in range(world_size)),
            *(f"model/{name}" for name in ("bias/c.0", "short/c.0", "half/c.0.0")),
            *(f"optimizer/{name}" for name in ("exp_avg/bias/c.0", "step/bias/c.0.0")),
        ]
    )


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
    save_pieces(folder, 2)
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000001"]
    assert not list(folder.rglob("*.pieces-*"))


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
def test_a_fault_with_a_piece_leaves_nothing(rank: int, kind: Any, pattern: str, tmp_path: Path) -> None:
    files = [FaultyFiles(), FaultyFiles()]
    files[rank] = FaultyFiles(faults=(Fault(kind=kind, pattern=pattern, error_number=errno.EIO),))
    with open_world(ARRAYS, world_size=2, files=files) as world, pytest.raises((StorageError, RankError)):
        world.save(tmp_path, few_files=True)
    assert_the_next_save_sweeps(tmp_path)


class _Flipping(FaultyFiles):
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
