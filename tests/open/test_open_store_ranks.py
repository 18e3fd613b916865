"""A store that several processes share: rows of DTensors, one checkpoint of all, loads at other numbers of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - bfloat16
import numpy as np
import pytest
import tensorstore
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import zstore
from zstore.checkpoint.reader import tags
from zstore.errors import CorruptionError, UsageError, ZstoreError
from zstore.format import zarr_dtypes  # noqa: F401 - lets zarr read bfloat16
from zstore.format.arrays import ArraySpec
from zstore.io.tensors import as_numpy
from zstore.open.ranks import Ranks
from zstore.open.store import Store
from zstore.store import StoreOptions, TensorStore
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.ranks import kill_ranks, run_ranks

SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "model/embedding": ((50257, 6), "float32"),  # 50257 = 29 * 1733: no chunks at multiples of 16 elements
    "model/expert": ((7, 60, 100), "bfloat16"),
    "model/even": ((1024, 130), "float16"),
    "model/long": ((3, 600_000), "float32"),
    "model/flat": ((200_003,), "int32"),
    "model/bias": ((11,), "float32"),
    "model/one": ((1, 5), "int64"),
    "model/none": ((0, 4), "float32"),
}


def whole(name: str) -> torch.Tensor:
    shape, dtype = SHAPES[name]
    made = torch.Generator().manual_seed(len(name))
    return (torch.randn(shape, generator=made) * 1000).to(getattr(torch, dtype))


def same(found: Any, expected: torch.Tensor) -> bool:
    array = as_numpy(found.contiguous()) if isinstance(found, torch.Tensor) else np.asarray(found)
    return array.shape == tuple(expected.shape) and array.tobytes() == as_numpy(expected.contiguous()).tobytes()


@given(rows=st.integers(0, 5000), cols=st.sampled_from([1, 3, 130, 4096, 300_000]), world_size=st.integers(2, 9))
def test_rows_of_ranks_are_those_of_torch(rows: int, cols: int, world_size: int) -> None:
    spec = ArraySpec(name="a/w", shape=(rows, cols), dtype="float32")
    parts = [len(part) for part in torch.arange(rows).chunk(world_size)] if rows else []
    stops = np.cumsum([0, *parts, *[0] * (world_size - len(parts))]).tolist()
    for rank in range(world_size):
        held = Ranks(rank, world_size).hold(spec, by_rows=True)
        assert (held.first, held.stop) == (stops[rank], stops[rank + 1])
        if rows:
            assert held.grid.shard_range(rank) == (held.first, held.stop)
            assert held.grid.shard_rows % held.grid.chunk_rows == held.grid.row_numel % held.grid.chunk_cols == 0


def _save(rank: int, folder: str, world_size: int) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (world_size,))
    with zstore.open_store(Path(folder) / "run", mesh=mesh, host_budget_bytes=64e6) as store:
        for name in SHAPES:
            value = distribute_tensor(whole(name) * 0, mesh, [Shard(0)])
            store.put(name, value, dims=[f"d{i}" for i in range(value.ndim)])
            store.update(name, distribute_tensor(whole(name), mesh, [Shard(0)]))
        store.put("buffer/all", distribute_tensor(torch.arange(30_000), mesh, [Replicate()]))
        store.put("buffer/plain", np.arange(12).reshape(3, 4))
        store.put("buffer/scalar", 7)
        rows = store.own_rows(1000)
        store.put("client/rows", np.arange(1000)[rows], shape=(1000,))
        for name in SHAPES:
            found = store.get(name).wait()
            assert isinstance(found, DTensor)
            assert same(found.full_tensor(), whole(name))
            own = store.own_rows(len(found))
            expected = distribute_tensor(whole(name), mesh, [Shard(0)]).to_local()
            assert same(store.get(name, rows=own).wait(), expected)
            assert same(store[name][own], expected)
            assert same(store.get(name, out=torch.zeros_like(expected)).wait(), expected)
            assert store.spec(name).shape == found.shape
        assert store.get("buffer/all").wait().full_tensor().equal(torch.arange(30_000))
        for name, value in store.stream(["model/even", "client/rows"], prefetch=1):
            value.neg_() if name == "model/even" else np.add(value, 1, out=value)
        done = store.checkpoint(Path(folder) / "ckpt" / "one", extra={"loss": 1.0}).wait()
        for _, value in store.stream(["model/even"]):
            value.neg_()
        store.checkpoint(Path(folder) / "ckpt" / "two", keep=1).wait()
        return done.num_files, done.num_linked


def _load(rank: int, folder: str, world_size: int, has_mesh: bool) -> None:
    mesh = init_device_mesh("cpu", (world_size,)) if has_mesh else None
    numbers = {} if has_mesh else {"rank": rank, "world_size": world_size}
    with zstore.open_store(Path(folder) / f"run-{world_size}", mesh=mesh, **numbers) as store:
        assert store.load(Path(folder) / "ckpt").wait() == {}
        for name in SHAPES:
            found = store.get(name).wait()
            assert isinstance(found, DTensor) == has_mesh
            assert store.spec(name).dims == tuple(f"d{i}" for i in range(found.ndim))
            own = store.own_rows(store.spec(name).shape[0])
            assert same(found.to_local() if isinstance(found, DTensor) else found, whole(name)[own])
        assert store.get("buffer/all").wait().equal(torch.arange(30_000))
        assert store.get("buffer/plain").wait().shape == (3, 4)
        assert store.get("buffer/scalar").wait() == 7
        rows = store.own_rows(1000)
        assert same(store.get("client/rows", rows=rows).wait(), torch.arange(1, 1001)[rows])
        store.checkpoint(Path(folder) / "again" / str(world_size)).wait()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("ranks")
    done = run_ranks(_save, 2, str(folder), 2)
    assert [num_linked for _, num_linked in done] == [5, 4]  # rows of 64 KiB a rank, and rank 0's "buffer/all"
    return folder


def test_other_programs_read_what_ranks_saved_together(saved: Path) -> None:
    assert [info.tag for info in tags(saved / "ckpt")] == ["two"]
    group = zarr.open_group(saved / "ckpt" / "two", mode="r")
    with zstore.open_checkpoint(saved / "ckpt") as checkpoint:
        assert checkpoint.world_size == 2
        assert checkpoint.verify() == []
        for name in SHAPES:
            place = {"driver": "file", "path": str(saved / "ckpt" / "two" / name)}
            other = tensorstore.open({"driver": "zarr3", "kvstore": place}, open=True).result()
            for found in (group[name][...], other.read().result(), checkpoint[name].numpy()):
                assert same(found, whole(name))
            assert list(group[name].metadata.dimension_names) == [f"d{i}" for i in range(whole(name).ndim)]


@pytest.mark.parametrize(
    ("world_size", "has_mesh"), [pytest.param(1, False, marks=pytest.mark.soak), (2, False), (3, True)]
)
def test_any_number_of_ranks_loads_it(world_size: int, has_mesh: bool, saved: Path) -> None:
    run_ranks(_load, world_size, str(saved), world_size, has_mesh)
    with zstore.open_checkpoint(saved / "again", str(world_size)) as checkpoint:
        assert checkpoint.verify() == []
        assert all(same(checkpoint[name].numpy(), whole(name)) for name in SHAPES)


def _load_own(rank: int, folder: str) -> str:
    with zstore.open_store(Path(folder) / "own", rank=rank, world_size=2) as store:
        try:
            store.load(Path(folder) / "torn", names=["model/long"], tier="host").wait()
        except CorruptionError as error:
            return type(error).__name__
        return "whole"


def test_a_rank_reads_its_own_rows_alone(saved: Path, tmp_path: Path) -> None:
    """The rows of one rank are damaged, which the other does not see."""
    with zstore.open_store(tmp_path / "run") as store:
        store.put("model/long", whole("model/long"))
        store.checkpoint(tmp_path / "torn" / "one").wait()
    (file,) = (tmp_path / "torn" / "one" / "model" / "long").glob("c*")
    file.chmod(0o644)
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size - 8000)
        opened.write(b"damaged")
    assert run_ranks(_load_own, 2, str(tmp_path)) == ["whole", CorruptionError.__name__]


def _fail(rank: int, folder: str) -> list[str]:
    files, place = FaultyFiles(), Path(folder)
    ranks = Ranks.of(rank, 2, None, place)
    told: list[str] = []
    with Store(TensorStore(StoreOptions(run_path=place), rank=rank, files=files), ranks) as store:
        rows = store.own_rows(100_000)
        store.put("a/w", np.ones(100_000)[rows], shape=(100_000,)).wait()

        def save(tag: str, **options: Any) -> None:
            error: BaseException | None = None
            try:
                store.checkpoint(place / "ckpt" / tag, **options).wait()
            except (ZstoreError, KeyError) as raised:
                error = raised
            told.append(type(error).__name__)

        save("one")
        save("one")  # it is there
        save("two", names=["a/w", *(["a/x"] if rank else [])])  # rank 1 has no such array
        if rank:
            store.put("b/w", np.ones(3))
        save("two")  # other arrays than rank 0's
        if rank:
            store.delete("b/w")
            files.inject(Fault(kind="link", error_number=5, times=None))
            files.inject(Fault(kind="allocate", error_number=28, times=None))
        save("two")
        files.heal()
        store.checkpoint(place / "ckpt" / "two")
        save("three")
    return told


def test_what_one_rank_cannot_save_no_rank_has_saved(tmp_path: Path) -> None:
    first, second = run_ranks(_fail, 2, str(tmp_path))
    assert first == ["NoneType", "CheckpointExistsError", "RankError", "CheckpointError", "RankError", "NoneType"]
    assert second == ["NoneType", "RankError", "KeyError", "CheckpointError", "DiskFullError", "NoneType"]
    assert {info.tag for info in tags(tmp_path / "ckpt")} == {"one", "two", "three"}


def _refuse(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    value = torch.randn(10, 4)
    with zstore.open_store(mesh=mesh) as store:
        for placement in (Shard(1), Partial()):
            made = DTensor.from_local(value, mesh, [placement], run_check=False)
            with pytest.raises(UsageError, match=r"placed as Shard\(0\) or Replicate\(\).*redistribute"):
                store.put("a/w", made)
        with pytest.raises(UsageError, match=rf"rank {rank} of 2 has rows \[{5 * rank}, {5 * rank + 5}\)"):
            store.put("a/w", value, shape=(10, 4))
        store.put("a/w", distribute_tensor(value, mesh, [Shard(0)]))
        with pytest.raises(UsageError, match=r"this rank has rows .*open_checkpoint"):
            store.get("a/w", rows=slice(4, 6))
        with pytest.raises(UsageError, match="this rank has rows"):
            store["a/w"][::9]
        with pytest.raises(UsageError, match="cannot be cut into chunks"):
            store.put("a/p", np.zeros(1_048_583), shape=(2_097_166,))  # a prime number of rows
    with zstore.open_store() as store, pytest.raises(UsageError, match=r"open_store\(mesh=tensor.device_mesh\)"):
        store.put("a/w", distribute_tensor(value, mesh, [Shard(0)]))
    with pytest.raises(UsageError, match=r"rank=\d, world_size=3\): this is rank \d of 2 of torch's process group"):
        zstore.open_store(rank=rank, world_size=3)
    for numbers in ({"rank": 1}, {"rank": 2, "world_size": 2}, {"mesh": mesh, "rank": 1}):
        with pytest.raises(UsageError, match="open_store"):
            zstore.open_store(**numbers)


def test_what_ranks_cannot_hold_is_refused(tmp_path: Path) -> None:
    run_ranks(_refuse, 2, str(tmp_path))


def _endless(rank: int, folder: str) -> None:
    with zstore.open_store(Path(folder) / "run", rank=rank, world_size=2) as store:
        for turn in range(10**6):
            for i in range(2):
                rows = store.own_rows(40_000)
                store.put(f"b.{i}/w", np.full(rows.stop - rows.start, turn), shape=(40_000,))
            saving = store.checkpoint(Path(folder) / "ckpt" / f"{turn:06d}", keep=2)
            if rank == 1 and turn == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            saving.wait()


def test_killed_ranks_leave_whole_checkpoints(tmp_path: Path) -> None:
    ended = kill_ranks(_endless, 2, str(tmp_path), timeout_s=200)  # the other one is killed behind it
    assert ended == [False, False]
    found = tags(tmp_path / "ckpt")
    assert found
    for info in found:
        with zstore.open_checkpoint(tmp_path / "ckpt", info.tag) as checkpoint:
            assert checkpoint.verify() == []
            assert all((checkpoint[f"b.{i}/w"].numpy() == int(info.tag)).all() for i in range(2))


ALONE = """
import sys
for name in ("torch", "torch.distributed"):
    sys.modules[name] = None  # not installed
import numpy as np
import zstore
folder, run, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
for turn in range(2):
    with zstore.open_store(folder + "/run", rank=rank, world_size=3) as store:
        rows = store.own_rows(100_000)
        store.put("a/w", np.arange(100_000)[rows] + turn, shape=(100_000,))
        store.checkpoint(f"{folder}/ckpt/{run}-{turn}", extra={"turn": turn}).wait()
        store.load(f"{folder}/ckpt/{run}-{turn}").wait()
        assert (store.get("a/w").wait() == np.arange(100_000)[rows] + turn).all()
"""


def test_ranks_without_torch_agree_in_their_folder(tmp_path: Path) -> None:
    for run in ("first", "second"):  # what an earlier run left does not mislead them
        command = [sys.executable, "-c", ALONE, str(tmp_path), run]
        ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(3)]
        for process in ranks:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    for run in ("first", "second"):
        for turn in range(2):
            with zstore.open_checkpoint(tmp_path / "ckpt", f"{run}-{turn}") as checkpoint:
                assert checkpoint.verify() == []
                assert (checkpoint["a/w"].numpy() == np.arange(100_000) + turn).all()
