"""Shards that did not change since the last checkpoint are linked from it, whatever tier they rest on."""

from __future__ import annotations

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

from tests.checkpoint.checkpoints import World, open_world
from zstore.checkpoint.commit import discard
from zstore.checkpoint.plan import SaveSummary
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.io.files import Files
from zstore.store import TierName
from zstore.testing.faults import unlinkable_files

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
    """Change one of the arrays in a pass."""
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


def _remove(file: Path) -> None:
    file.unlink()


def _cut(file: Path) -> None:
    file.chmod(0o644)
    os.truncate(file, 4096)


def _rewrite(file: Path) -> None:
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)


def _replace(file: Path) -> None:
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data)


@pytest.mark.parametrize("harm", [_remove, _cut, _rewrite, _replace])
def test_a_file_that_is_not_what_was_written_is_written_anew(
    in_memory: World, folder: Path, harm: Callable[[Path], None]
) -> None:
    first = save(in_memory, folder, 1)
    harm(folder / "step-00000001" / FROZEN / "c.0.0")
    save(in_memory, folder, 2, first)
    assert check(in_memory, folder, 2) == [TRAINED]


def test_where_links_are_not_to_be_had_it_is_written(folder: Path) -> None:
    with open_world(make_arrays(), files=[unlinkable_files(95)]) as world:
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
        assert "2 of 2 shards on disk were copied behind training" in first.messages[0]
        train(world)
        second = save(world, folder, 2, first)
        assert check(world, folder, 2) == [FROZEN]
        assert "1 of 2 shards on disk were copied behind training" in second.messages[0]
