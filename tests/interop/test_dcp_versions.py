"""zstore.dcp.Writer into a bucket with versions: two ranks that share nothing but an S3 server."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zstore.dcp
from tests.checkpoint.buckets import VersionedBucket
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.testing.ranks import kill_ranks, run_ranks

zarr = pytest.importorskip("zarr")
pytest.importorskip("icechunk", reason="extra versions")
pytest.importorskip("moto", reason="extra test")


FROZEN = torch.arange(800 * 600, dtype=torch.float32).reshape(800, 600)


def state_of(value: float) -> dict[str, Any]:
    """Rows and columns, which pass between ranks, that stay; a tensor that changes; and bytes."""
    mesh = init_device_mesh("cpu", (2,))
    return {
        "model": {
            "rows": distribute_tensor(FROZEN, mesh, [Shard(0)]),
            "columns": distribute_tensor(FROZEN + 1, mesh, [Shard(1)]),
            "adapter": torch.full((100,), value),
        },
        "raw": b"bytes",
        "step": int(value),
    }


def save_twice(rank: int, base: str, url: str, options: dict[str, Any]) -> dict[str, Any]:
    tempfile.tempdir = f"{base}/rank-{rank}"  # of each rank's own, as on two machines
    Path(tempfile.tempdir).mkdir()
    for step in (1, 2):
        writer = zstore.dcp.Writer(f"{url}/step-{step}", storage_options=options, versions=step == 1)
        dcp.save(state_of(step), storage_writer=writer)
    with pytest.raises(BaseException, match="is committed in s3://"):
        dcp.save(state_of(3), storage_writer=zstore.dcp.Writer(f"{url}/step-2", storage_options=options))
    target = state_of(0) | {"raw": None}
    dcp.load(target, storage_reader=zstore.dcp.Reader(f"{url}/step-2", storage_options=options))
    model = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in target["model"].items()}
    return {
        "rows": torch.equal(model["rows"], FROZEN),
        "columns": torch.equal(model["columns"], FROZEN + 1),
        "adapter": model["adapter"].unique().tolist(),
        "rest": [target["raw"], target["step"]],
        "left": [path.name for path in Path(tempfile.tempdir).iterdir()],
    }


def test_two_ranks_save_versions_of_which_the_second_sends_what_changed(
    bucket: VersionedBucket, tmp_path: Path
) -> None:
    expected = {"rows": True, "columns": True, "adapter": [2.0], "rest": [b"bytes", 2], "left": []}
    assert run_ranks(save_twice, 2, str(tmp_path), bucket.url, bucket.options) == [expected] * 2
    versions = bucket.folder.all()
    first, second = (versions[f"step-{number}"].packs for number in (1, 2))
    assert sum(first.values()) > 2 * FROZEN.nbytes
    assert sum(nbytes for pack, nbytes in second.items() if pack not in first) < 50_000
    assert bucket.packs() == first | second, "no pieces are left"
    with open_checkpoint(bucket.folder) as reader:
        assert (reader.record.step, reader.record.world_size) == (2, 2)
        assert verify_checkpoint(reader) == []
    group = zarr.open_group(bucket.icechunk().readonly_session(tag="step-1").store, mode="r")
    assert (group["model/columns"][...] == (FROZEN + 1).numpy()).all()
    assert (group["model/adapter"][...] == 1).all()


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_one_process_saves_replaces_and_goes_on(
    bucket: VersionedBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    state = {"model": {"frozen": FROZEN, "w": torch.zeros(1000)}}
    for value, tag, overwrite in ((1, "a", False), (2, "b", False), (3, "a", True)):
        state["model"]["w"].fill_(value)
        writer = zstore.dcp.Writer(
            f"{bucket.url}/{tag}", overwrite=overwrite, storage_options=bucket.options, versions=True
        )
        dcp.save(state, storage_writer=writer, no_dist=True)
    assert [info.tag for info in tags(bucket.folder)] == ["b", "a"]
    target = {"model": {"frozen": torch.zeros_like(FROZEN), "w": torch.zeros(1000)}}
    reader = zstore.dcp.Reader(bucket.url, storage_options=bucket.options)
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert torch.equal(target["model"]["frozen"], FROZEN)
    assert torch.equal(target["model"]["w"], torch.full((1000,), 3.0))
    assert sum(bucket.packs().values()) < FROZEN.nbytes + 300_000


def save_and_die(rank: int, base: str, url: str, options: dict[str, Any], killed: int, request: int) -> None:
    from tests.checkpoint.mortal_s3 import MortalFileSystem

    tempfile.tempdir = f"{base}/rank-{rank}"
    Path(tempfile.tempdir).mkdir()
    dcp.save(state_of(1), storage_writer=zstore.dcp.Writer(f"{url}/a", storage_options=options, versions=True))
    MortalFileSystem.kill_at = request if rank == killed else None
    dcp.save(state_of(2), storage_writer=zstore.dcp.Writer(f"{url}/b", storage_options=options))


@pytest.mark.parametrize(("killed", "request_number"), [(0, 1), (1, 0), (1, 4), (0, 9)])
def test_a_killed_rank_leaves_no_version_and_its_files_go(
    killed: int, request_number: int, bucket: VersionedBucket, tmp_path: Path
) -> None:
    arguments = str(tmp_path), bucket.url, bucket.options, killed, request_number
    assert not all(kill_ranks(save_and_die, 2, *arguments, timeout_s=120))
    assert [info.tag for info in tags(bucket.folder)] == ["a"]
    bucket.folder.tidy(leftover_s=0)
    assert bucket.packs() == bucket.folder.all()["a"].packs
    with open_checkpoint(bucket.folder) as reader:
        assert verify_checkpoint(reader) == []
