"""Checkpoints in S3, through s3fs and the S3 protocol to a server on loopback."""

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import zstore
from tests.checkpoint.checkpoints import World, begin_upload, open_world, save_arrays, wait_all
from tests.engine.runs import make_config, start, state_of, step
from zstore.checkpoint.layout import new_save_id
from zstore.checkpoint.reader import open_checkpoint, refused, tags
from zstore.checkpoint.retention import Keep
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import CheckpointExistsError
from zstore.io.machine import Workers
from zstore.remote.bucket import PART_BYTES, BucketFolder
from zstore.remote.service import open_folder
from zstore.remote.target import BucketTarget, local_files
from zstore.remote.upload import upload_checkpoint

pytest.importorskip("s3fs", reason="extra s3")
pytest.importorskip("moto", reason="extra test")

Array = npt.NDArray[Any]

RNG = np.random.default_rng(6)
ARRAYS: dict[str, Array] = {
    "model/h.0.weight": RNG.standard_normal((700, 300)).astype(np.float32),
    "model/odd name/ü%": RNG.standard_normal(77).astype(np.float32),
    "optimizer/exp_avg/h.0.weight": RNG.standard_normal((700, 300)).astype(np.float32),
}


class Bucket:
    def __init__(self, options: dict[str, Any], tmp_path: Path) -> None:
        name = f"bucket-{uuid.uuid4().hex[:8]}"
        self.url = f"s3://{name}/runs/one"
        self.options = options
        self.local = tmp_path / "local"
        self.folder: Any = open_folder(self.url, options)
        self.fs = self.folder.fs
        self.fs.mkdir(name)

    def save(self, world: World, **fields: Any) -> None:
        wait_all(begin_upload(world, self.local, self.url, self.options, **fields))

    def names(self) -> set[str]:
        self.fs.invalidate_cache()
        return {key.split("/")[3] for key in self.fs.find(self.folder.root)}


@pytest.fixture
def bucket(server: dict[str, Any], tmp_path: Path) -> Bucket:
    return Bucket(server, tmp_path)


def test_two_ranks_save_and_any_layout_reads(bucket: Bucket) -> None:
    with open_world(ARRAYS, world_size=2, small={"buffer/steps": np.array(7)}) as world:
        for step in (1, 2, 3):
            bucket.save(world, step=step, keep=Keep(last=2))
        bucket.save(world, step=3, overwrite=True)
    assert [info.record.step for info in tags(bucket.folder)] == [2, 3]
    assert refused(bucket.folder) == []
    assert len(bucket.names()) == 3  # two checkpoints and `latest`, nothing else
    for url in (bucket.url, f"{bucket.url}/step-00000003"):
        with open_checkpoint(open_folder(url, bucket.options)) as reader:
            assert verify_checkpoint(reader) == []
            for name, expected in ARRAYS.items():
                assert reader.read_array(name).tobytes() == expected.tobytes()
    assert list(bucket.local.iterdir()) == []


def test_a_file_of_several_parts_arrives_whole(bucket: Bucket) -> None:
    array = RNG.standard_normal((2 * PART_BYTES + 12345) // 8)
    upload_checkpoint(save_arrays(bucket.local, {"model/w": array}), bucket.url, bucket.options)
    with zstore.open_checkpoint(bucket.url, storage_options=bucket.options) as checkpoint:
        assert (checkpoint["model/w"][100:200] == array[100:200]).all()
        assert (checkpoint["model/w"][:] == array).all()


def test_an_engine_saves_to_s3_and_goes_on_from_it(bucket: Bucket, tmp_path: Path) -> None:
    own = {"storage_options": bucket.options, "upload_folder": str(tmp_path / "uploads"), "keep": 1}
    with start(make_config(2, zstore=own)) as engine:
        for _ in range(2):
            step(engine)
            engine.save_checkpoint(bucket.url, wait=False)
        engine.wait_for_checkpoint()
        step(engine)
        expected = state_of(engine)
    assert [info.record.step for info in tags(bucket.folder)] == [2]
    with start(make_config(3, zstore=own)) as engine:
        assert engine.load_checkpoint(bucket.url)[0] == f"{bucket.url}/step-00000002"
        step(engine)
        assert state_of(engine) == expected


def test_a_bucket_that_is_not_there_is_an_error_and_is_not_made(bucket: Bucket) -> None:
    path = save_arrays(bucket.local, ARRAYS)
    with pytest.raises(OSError, match=r"cannot write|does not exist|not exist"):
        upload_checkpoint(path, "s3://no-such-bucket/run", bucket.options)
    assert not bucket.fs.exists("no-such-bucket")


def test_of_two_saves_of_one_tag_one_is_committed(bucket: Bucket) -> None:
    """One request decides it: a write of the record on condition that there is none."""
    folder = open_folder(bucket.url, bucket.options)
    assert isinstance(folder, BucketFolder)
    folder.write_small("record", b"one", is_new=True)
    folder.write_small("record", b"one", is_new=True)  # of a request whose answer was lost
    with pytest.raises(FileExistsError, match="record already exists"):
        folder.write_small("record", b"two", is_new=True)
    assert folder.read_small("record") == b"one"
    path = save_arrays(bucket.local, ARRAYS)
    with open_checkpoint(path) as reader, Workers(1, "test") as workers:
        first = BucketTarget(folder, reader.record.tag, reader.record.id, "one")
        first.begin(reader, overwrite=False)
        with pytest.raises(CheckpointExistsError, match=r"another save of s3://.*/step-00000001 is running"):
            BucketTarget(folder, reader.record.tag, new_save_id(), "two").begin(reader, overwrite=False)
        # As of a machine whose clock or listing is behind: it commits without having seen the first.
        second = BucketTarget(folder, reader.record.tag, new_save_id(), "two")
        folder.write_small(second._lock, b"{}")
        second.facts = first.facts
        first.send(workers, reader.path, local_files(reader), lambda _: None)
        first.commit(reader)
        with pytest.raises(CheckpointExistsError, match="was committed by another save in the meantime"):
            second.commit(reader)
        assert [info.record.id for info in tags(folder)] == [reader.record.id]
