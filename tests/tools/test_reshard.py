"""Resharding: the same bytes for another number of ranks, and back."""

import errno
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.checkpoints import save_arrays, values
from tests.interop.deepspeed_data import DATA
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.reshard import reshard_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import CheckpointExistsError, CorruptionError, DiskFullError, StorageError, UsageError
from zstore.format.arrays import WHOLE_BYTES, make_grid
from zstore.io.shards import open_resources
from zstore.open.sources import open_source
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.oracle import random_values
from zstore.tools.reshard import reshard_command

Array = npt.NDArray[Any]


def make_arrays() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {
        "model/w": rng.standard_normal((1003, 301)).astype(np.float32),
        "model/b": rng.standard_normal(77).astype(ml_dtypes.bfloat16),
        "model/long.rows": rng.standard_normal((3, 400_000)).astype(ml_dtypes.bfloat16),
        "model/none": np.zeros((0, 5), np.float16),
        "model/scalar": np.array(3.5),
        "optimizer/exp_avg/w": rng.standard_normal((1003, 301)).astype(np.float32),
        "buffer/mask": rng.random(40_000) < 0.5,
    }


DTYPES = ["bool", "int8", "uint16", "int64", "float16", "bfloat16", "float32", "float64"]
SMALL = {"client/history": np.arange(30_000, dtype=np.float64)}


@pytest.fixture(scope="module")
def arrays() -> dict[str, Array]:
    return make_arrays()


@pytest.fixture(scope="module")
def saved(arrays: dict[str, Array], tmp_path_factory: pytest.TempPathFactory) -> Path:
    parts = {name: array for name, array in arrays.items() if not name.startswith("buffer/")}
    small = SMALL | {name: array for name, array in arrays.items() if name.startswith("buffer/")}
    folder = tmp_path_factory.mktemp("run")
    options: dict[str, Any] = {"record": {"counters": [1, 2]}, "run_id": "run", "few_files": True}
    return save_arrays(folder, parts, world_size=3, step=60, small=small, **options)


def files_of(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("c.*")) if p.is_file()}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_any_world_size_holds_the_same_values(
    world_size: int, saved: Path, arrays: dict[str, Array], tmp_path: Path
) -> None:
    assert reshard_command(saved.parent, tmp_path / "out", world_size) == 0
    with open_checkpoint(tmp_path / "out") as opened:
        assert verify_checkpoint(opened) == []
        for name, array in {**arrays, **SMALL}.items():
            assert opened.read_array(name).tobytes() == array.tobytes()
            spec = opened.arrays[name].spec
            whole = name in SMALL or "buffer/" in name or spec.nbytes < WHOLE_BYTES
            assert opened.arrays[name].grid == make_grid(spec.stored_shape, 1 if whole else world_size)
        record = opened.record
        assert (record.tag, record.step, record.run) == ("step-00000060", 60, "run")
        assert (record.world_size, record.training_world_size) == (world_size, 3)
        assert record.state == {"counters": [1, 2]}
        # They belong to the ranks that trained.
        states = [{"rank": rank} if world_size == 3 else {} for rank in range(world_size)]
        assert [opened.manifest(rank).rank_state for rank in range(world_size)] == states


def test_what_is_not_carried_over_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = DATA / "stage2-fp16-1"
    assert reshard_command(root, tmp_path / "out") == 0
    with open_source(root) as source:
        assert source.notes
        lines = capsys.readouterr().err.splitlines()
        assert lines[1 : 1 + len(source.notes)] == [f"not carried over: {note}" for note in source.notes]


SHAPES = st.lists(st.integers(0, 9) | st.integers(0, 300), max_size=2).map(tuple)
SHAPES |= st.tuples(st.integers(1, 9), st.integers(90_000, 200_000)) | st.tuples(*[st.integers(0, 40)] * 3)
RANKS = st.integers(1, 5)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=4),
    RANKS,
    RANKS,
    st.sampled_from(["none", "zstd"]),
)
def test_there_and_back_gives_the_same_files_for_any_array_and_number_of_ranks(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[tuple[tuple[int, ...], str]],
    first: int,
    other: int,
    codec: str,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    given_arrays = {
        f"model/{n}": random_values(dtype, math.prod(shape), n).reshape(shape) for n, (shape, dtype) in enumerate(kinds)
    }
    saved = save_arrays(folder / "saved", given_arrays, world_size=first, few_files=True)
    reshard_command(saved, folder / "other", other, compression=codec)
    reshard_command(folder / "other", folder / "back", first)
    assert values(folder / "other") == {name: array.tobytes() for name, array in given_arrays.items()}
    assert files_of(folder / "back" / saved.name) == files_of(saved)
    with open_checkpoint(folder / "back") as opened:
        assert opened.record.training_world_size == first


def test_no_stored_chunk_is_read_twice(saved: Path, tmp_path: Path) -> None:
    with open_checkpoint(saved) as reader:
        reshard_checkpoint(reader, tmp_path / "out", 4)
        stored = sum(array.file_bytes for array in reader.arrays.values())
        # Where a new shard begins inside a stored chunk, that chunk is read for both; these arrays have few chunks.
        assert reader.read_bytes < 1.5 * stored


def test_a_tag_that_is_there_is_not_replaced(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointExistsError, match="has a checkpoint 'step-00000060' already: name another folder"):
        reshard_command(saved, saved.parent, 2)
    with pytest.raises(UsageError, match="at least 1"):
        reshard_command(saved, tmp_path / "out", 0)


def test_a_damaged_checkpoint_is_not_resharded(arrays: dict[str, Array], tmp_path: Path) -> None:
    path = save_arrays(tmp_path / "ckpt", arrays)
    shard = path / "model/w/c.0.0"
    shard.chmod(0o644)
    with shard.open("r+b") as file:
        file.seek(8000)
        file.write(b"x")
    with pytest.raises(CorruptionError, match="'model/w'"):
        reshard_command(path, tmp_path / "out", 2)
    assert tags(tmp_path / "out") == []
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("kind", ["write", "fsync", "sync_folder", "rename", "write_small", "make_folder"])
def test_a_failure_leaves_nothing_and_is_told(kind: Any, saved: Path, tmp_path: Path) -> None:
    files = FaultyFiles(faults=(Fault(kind=kind, first=2, pattern=f"{tmp_path}/*", error_number=errno.EIO),))
    with (
        open_resources(files=files) as resources,
        open_checkpoint(saved, resources=resources) as reader,
        pytest.raises(StorageError, match="Input/output error"),
    ):
        reshard_checkpoint(reader, tmp_path / "out", 2)
    assert tags(tmp_path / "out") == []


def test_no_room_is_said_before_anything_is_written(saved: Path, tmp_path: Path) -> None:
    class Full(FaultyFiles):
        def free_bytes(self, path: str | Path) -> int:
            return 1000

    with (
        open_resources(files=Full()) as resources,
        open_checkpoint(saved, resources=resources) as reader,
        pytest.raises(DiskFullError, match="only 1000 are free"),
    ):
        reshard_checkpoint(reader, tmp_path / "out", 2)
