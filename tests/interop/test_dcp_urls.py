"""zstore.dcp.Writer to a URL: two ranks that share nothing but an object store."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zstore.dcp
from tests.checkpoint.object_store import ObjectFileSystem, RequestFault, denied
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.remote.folder import open_folder
from zstore.testing.ranks import run_ranks

URL = "objects://bucket/run/step-7"


def state_of(values: torch.Tensor) -> dict[str, Any]:
    """Rows, even and not, columns that pass between ranks, a tensor of one rank, and bytes."""
    mesh = init_device_mesh("cpu", (2,))
    return {
        "model": {
            "rows": distribute_tensor(values, mesh, [Shard(0)]),
            "uneven": distribute_tensor(values[:77], mesh, [Shard(0)]),
            "columns": distribute_tensor(values, mesh, [Shard(1)]),
            "alone": values.to(torch.bfloat16),
        },
        "raw": b"bytes",
        "step": 7,
    }


def save_and_load(rank: int, folder: str) -> dict[str, Any]:
    fsspec.register_implementation("objects", ObjectFileSystem)
    options = {"folder": f"{folder}/objects"}
    # A folder of each rank's own, as on two machines.
    tempfile.tempdir = f"{folder}/rank-{rank}"
    Path(tempfile.tempdir).mkdir()
    values = torch.arange(80 * 600, dtype=torch.float32).reshape(80, 600)
    dcp.save(state_of(values), storage_writer=zstore.dcp.Writer(URL, storage_options=options))
    with pytest.raises(BaseException, match="is committed in objects://bucket/run"):
        dcp.save(state_of(values), storage_writer=zstore.dcp.Writer(URL, storage_options=options))
    future: Any = dcp.async_save(
        state_of(values + 1),
        storage_writer=zstore.dcp.Writer(URL, overwrite=True, storage_options=options),
        process_group=torch.distributed.new_group(backend="gloo"),
    )
    future.result(60)
    # One rank may not write its shards.
    if rank == 1:
        store: Any = fsspec.filesystem("objects", **options)
        store.faults.append(RequestFault(kind="write", pattern="*/model/*/c.*", times=None, error=denied))
    # The error may keep the writer, but nothing of it stays in the folder for temporary files.
    with pytest.raises(BaseException, match="403 Forbidden") as kept:
        dcp.save(state_of(values), storage_writer=zstore.dcp.Writer(f"{URL}7", storage_options=options))
    left = [str(path) for path in Path(tempfile.tempdir).iterdir()]
    del kept
    gc.collect()  # what was uploaded goes with the writer
    torch.distributed.barrier()
    target = state_of(torch.zeros_like(values)) | {"raw": None, "step": 0}
    dcp.load(target, storage_reader=zstore.dcp.Reader(URL, storage_options=options))
    loaded = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in target["model"].items()}
    expected = values + 1
    wanted = {"rows": expected, "uneven": expected[:77], "columns": expected, "alone": expected.to(torch.bfloat16)}
    return {
        "equal": {name: torch.equal(loaded[name], wanted[name]) for name in wanted},
        "rest": [target["raw"], target["step"]],
        "left": left,
    }


def test_ranks_that_share_only_a_url(tmp_path: Path) -> None:
    names = ("rows", "uneven", "columns", "alone")
    expected = {"equal": dict.fromkeys(names, True), "rest": [b"bytes", 7], "left": []}
    assert run_ranks(save_and_load, 2, str(tmp_path)) == [expected] * 2
    fsspec.register_implementation("objects", ObjectFileSystem, clobber=True)
    options = {"folder": str(tmp_path / "objects")}
    store: Any = fsspec.filesystem("objects", **options)
    folders = {key.split("/")[2] for key in store.objects()}
    assert len(folders) == 2, "the checkpoint and `latest`"
    assert not any("pieces" in key for key in store.objects())
    with open_checkpoint(open_folder("objects://bucket/run", options)) as reader:
        assert (reader.record.tag, reader.record.step, reader.record.world_size) == ("step-7", 7, 2)
        assert verify_checkpoint(reader) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_little_of_a_save_to_a_url_is_on_disk_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("objects", ObjectFileSystem, clobber=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    most = 0

    class Watching(ObjectFileSystem):
        def step(self, kind: Any, key: str) -> int:
            nonlocal most
            most = max(most, sum(path.stat().st_size for path in tmp_path.glob("zstore-dcp*/**/c.*")))
            return super().step(kind, key)

    fsspec.register_implementation("objects", Watching, clobber=True)
    state = {f"w{i}": torch.randn(300, 1000) for i in range(8)}
    options = {"folder": str(tmp_path / "objects")}
    writer = zstore.dcp.Writer("objects://bucket/run/a", num_threads=2, storage_options=options)
    dcp.save({"model": state}, storage_writer=writer, no_dist=True)
    assert 0 < most <= 3 * 1_300_000, "of 9.6 MB"
    with pytest.raises(BaseException, match="CheckpointExistsError"):
        dcp.save({"model": state}, storage_writer=writer, no_dist=True)
