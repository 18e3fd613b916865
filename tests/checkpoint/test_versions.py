"""Checkpoints in a bucket as versions of an icechunk repository, on a server of the S3 protocol on loopback."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import load_file

import zstore
from tests.checkpoint.buckets import VersionedBucket
from tests.checkpoint.checkpoints import open_world, save_arrays, wait_all
from tests.engine.runs import make_config, start, state_of, step
from zstore.checkpoint.names import new_save_id
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.retention import Keep
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import CheckpointError, CheckpointExistsError, UsageError
from zstore.io.pool import Workers
from zstore.remote.folder import open_folder
from zstore.remote.packs import LARGE_BYTES, Extent, plan_packs, training, worth_keeping
from zstore.remote.save import UploadOptions, save_to_url
from zstore.remote.upload import place_of, target_for, upload_checkpoint
from zstore.remote.versions import VersionsFolder

icechunk = pytest.importorskip("icechunk", reason="extra versions")
zarr = pytest.importorskip("zarr")
pytest.importorskip("s3fs", reason="extra s3")
pytest.importorskip("moto", reason="extra test")

Array = npt.NDArray[Any]

RNG = np.random.default_rng(8)
ARRAYS: dict[str, Array] = {
    "model/h.0.weight": RNG.standard_normal((700, 300)).astype(np.float32),
    "model/odd name/ü%~": RNG.standard_normal(77).astype(np.float32),
    "optimizer/exp_avg/h.0.weight": RNG.standard_normal((700, 300)).astype(np.float32),
}


def expect(bucket: VersionedBucket, tag: str | None, arrays: Mapping[str, Array]) -> None:
    with open_checkpoint(bucket.folder, tag) as reader:
        assert verify_checkpoint(reader) == []
        for name, expected in arrays.items():
            assert reader.read_array(name).tobytes() == expected.tobytes(), name


def test_two_ranks_save_versions_and_zarr_with_icechunk_reads_them(bucket: VersionedBucket) -> None:
    with open_world(ARRAYS, world_size=2, small={"buffer/steps": np.array(7)}) as world:
        for step_number in (1, 2):
            bucket.save(world, step=step_number)
    assert [info.record.step for info in tags(bucket.folder)] == [1, 2]
    expect(bucket, None, ARRAYS)
    expect(bucket, "step-00000001", ARRAYS)
    repository = bucket.icechunk()
    assert repository.list_tags() == {"step-00000001", "step-00000002"}
    assert repository.lookup_tag("step-00000002") == repository.lookup_branch("main")
    group = zarr.open_group(repository.readonly_session("main").store, mode="r")
    found = {
        array.attrs["zstore"]["name"]: array for _, array in group.members(max_depth=None) if hasattr(array, "shape")
    }
    assert found.keys() == {*ARRAYS, "buffer/steps"}
    for name, expected in ARRAYS.items():
        assert found[name][...].tobytes() == expected.tobytes()
    assert list(bucket.local.iterdir()) == [bucket.local / "latest"]


def test_only_what_changed_is_sent(bucket: VersionedBucket) -> None:
    base = RNG.standard_normal((2000, 1000)).astype(np.float32)
    arrays = {
        "model/base": base,
        "model/lora": np.zeros((8, 100), np.float32),
        "optimizer/exp_avg/rows": base[:400].copy(),
    }
    with open_world(arrays, world_size=2) as world:
        first = bucket.save(world, step=1)
        arrays["model/lora"] += 1
        world.fill()
        second = bucket.save(world, step=2)
        # Adam's rows that no gradient reached keep their bits: rank 1 has those.
        arrays["optimizer/exp_avg/rows"][:100] += 1
        world.fill()
        third = bucket.save(world, step=3)
    sent = [sum(summary.uploaded_bytes for summary in each) for each in (first, second, third)]
    assert sent[0] > sum(array.nbytes for array in arrays.values())
    assert sent[1] < sent[0] / 100
    assert third[1].uploaded_bytes < 100_000 < third[0].uploaded_bytes
    expect(bucket, None, arrays)
    expect(bucket, "step-00000001", {"model/base": base, "model/lora": np.zeros((8, 100), np.float32)})


def test_a_rank_sends_its_documents_with_its_shards_and_equal_shards_of_others_do_not_meet_them(
    bucket: VersionedBucket,
) -> None:
    arrays = {"optimizer/exp_avg/w": np.zeros(200_000, np.float32)}
    with open_world(arrays, world_size=2) as world:
        bucket.save(world, step=1)
        assert len(bucket.packs()) == 3  # one of each rank, and the index
        bucket.save(world, step=2)
        assert len(bucket.packs()) == 6  # documents alone
    for tag in ("step-00000001", "step-00000002"):
        expect(bucket, tag, arrays)
        with open_checkpoint(bucket.folder, tag) as reader:
            assert [[entry.shard for entry in reader.manifest(rank).shards] for rank in range(2)] == [[0], [1]]


def test_of_two_committers_one_is_told(bucket: VersionedBucket) -> None:
    paths = [save_arrays(bucket.local / str(n), {"model/w": np.full(100, n, np.float32)}, step=n) for n in (1, 2)]
    upload_checkpoint(paths[0], bucket.url, bucket.options)  # the plain layout, for nobody asked for versions
    assert not isinstance(open_folder(bucket.url, bucket.options), VersionsFolder)
    bucket.url += "-versions"
    place = place_of(bucket.url, bucket.options, versions=True)
    targets = []
    for path in paths:
        with open_checkpoint(path) as reader:
            record = reader.record
            target = target_for(
                place, place_of(bucket.url, bucket.options).retries, tag=record.tag, save_id=record.id, run_id=""
            )  # type: ignore[union-attr]
            target.begin(overwrite=False)
            targets.append(target)
    with Workers(2, "test") as workers:
        for target, path in zip(targets, paths, strict=True):
            with open_checkpoint(path) as reader:
                target.send(workers, reader, [0], lambda _: None)
                if target is targets[0]:
                    assert target.commit(reader) == []
                else:
                    with pytest.raises(CheckpointError, match="another save was committed to"):
                        target.commit(reader)
    assert [info.tag for info in tags(open_folder(bucket.url, bucket.options))] == ["step-00000001"]
    upload_checkpoint(paths[1], bucket.url, bucket.options)
    assert [info.tag for info in tags(open_folder(bucket.url, bucket.options))] == ["step-00000001", "step-00000002"]


def test_a_flipped_byte_in_a_pack_is_found(bucket: VersionedBucket) -> None:
    with open_world(ARRAYS, world_size=2) as world:
        bucket.save(world)
    pack = max(bucket.packs().items(), key=lambda item: item[1])[0]
    path = f"{bucket.name}/runs/one/packs/{pack}"
    data = bytearray(bucket.fs.cat_file(path))
    data[len(data) // 3] ^= 1  # in values: there is padding, too, and at the end documents
    bucket.fs.pipe_file(path, bytes(data))
    with open_checkpoint(bucket.folder) as reader:
        faults = verify_checkpoint(reader)
    assert len(faults) == 1
    assert "fails its crc32c" in faults[0].problem


def test_a_tag_is_refused_replaced_and_given_again(bucket: VersionedBucket) -> None:
    arrays = {"model/w": np.zeros(1000, np.float32)}
    with open_world(arrays) as world:
        for value in range(3):
            arrays["model/w"][:] = value
            world.fill()
            bucket.save(world, step=1)
            expect(bucket, "step-00000001", arrays)
        with pytest.raises(CheckpointError, match="already exists"):
            bucket.save(world, step=1, run_id="other")
        bucket.save(world, step=2)
        bucket.save(world, step=1, run_id="other", overwrite=True)
    assert [info.tag for info in tags(bucket.folder)] == ["step-00000002", "step-00000001"]
    path = save_arrays(bucket.local / "more", arrays, step=1)
    with pytest.raises(CheckpointExistsError):
        upload_checkpoint(path, bucket.url, bucket.options)


def test_removing_versions_frees_exactly_the_packs_that_no_other_needs(bucket: VersionedBucket) -> None:
    frozen = RNG.standard_normal(100_000).astype(np.float32)
    arrays = {"model/frozen": frozen, "model/w": np.zeros(1000, np.float32)}
    with open_world(arrays) as world:
        for number in (1, 2, 3, 4):
            arrays["model/w"][:] = number
            world.fill()
            bucket.save(world, step=number, keep=Keep(last=2, every=3))
    assert [info.record.step for info in tags(bucket.folder)] == [3, 4]
    needed = {pack for version in bucket.folder.all().values() for pack in version.packs}
    assert bucket.packs().keys() == needed
    assert bucket.packs() == {pack: size for v in bucket.folder.all().values() for pack, size in v.packs.items()}
    expect(bucket, "step-00000003", {"model/frozen": frozen, "model/w": np.full(1000, 3, np.float32)})
    # What a killed save left goes by age, and nothing else does.
    left = f"{'0' * 64}-{'1' * 32}"
    bucket.fs.pipe_file(f"{bucket.name}/runs/one/packs/{left}", b"left")
    assert bucket.folder.tidy() == 0
    assert bucket.folder.tidy(leftover_s=0) == 1
    assert bucket.packs().keys() == needed
    expect(bucket, None, arrays)


def test_the_commands_take_versions(bucket: VersionedBucket, tmp_path: Path) -> None:
    arrays = {name: array.copy() for name, array in ARRAYS.items()}
    with open_world(arrays, world_size=2) as world:
        for number in (1, 2, 3):
            arrays["model/odd name/ü%~"][:] = number
            world.fill()
            bucket.save(world, step=number)
    listed = json.loads(bucket.run("ls", bucket.url, "--json").stdout)["checkpoints"]
    assert [each["step"] for each in listed] == [1, 2, 3]
    assert all(0 < each["freed_bytes"] < each["shared_bytes"] < each["size_bytes"] for each in listed)
    shown = json.loads(bucket.run("inspect", f"{bucket.url}:step-00000002", "--json").stdout)
    assert shown["checkpoint"]["path"] == f"{bucket.url}/step-00000002"
    assert json.loads(bucket.run("verify", f"{bucket.url}/step-00000001", "--json").stdout)["faults"] == []
    different = bucket.run("diff", f"{bucket.url}:step-00000001", f"{bucket.url}:step-00000003", "--json", code=1)
    assert "odd name" in different.stdout
    assert "h.0" not in json.dumps(json.loads(different.stdout).get("differing", ""))
    bucket.run("consolidate", bucket.url, str(tmp_path / "weights"), "--dtype", "fp32")
    weights = load_file(tmp_path / "weights/model.safetensors")
    assert weights["h.0.weight"].tobytes() == ARRAYS["model/h.0.weight"].tobytes()
    bucket.run("reshard", bucket.url, str(tmp_path / "three"), "--world-size", "3")
    with open_checkpoint(tmp_path / "three") as reader:
        assert reader.read_array("model/odd name/ü%~").tobytes() == arrays["model/odd name/ü%~"].tobytes()
    bucket.run("reshard", str(tmp_path / "three"), "--to", f"{bucket.url}-plain")
    assert not isinstance(open_folder(f"{bucket.url}-plain", bucket.options), VersionsFolder)
    bucket.run("tag", bucket.url, "best", "step-00000001")
    plan = json.loads(bucket.run("prune", bucket.url, "--keep-last", "1", "--json").stdout)
    assert plan["removed"] == ["step-00000002"]
    assert plan["freed_bytes"] == listed[1]["freed_bytes"]
    assert [info.tag for info in tags(bucket.folder)] == ["step-00000001", "step-00000003"]
    assert bucket.packs().keys() == {pack for version in bucket.folder.all().values() for pack in version.packs}
    assert json.loads(bucket.run("inspect", f"{bucket.url}@best", "--json").stdout)["checkpoint"]["step"] == 1
    with zstore.open_checkpoint(f"{bucket.url}@best", storage_options=bucket.options) as checkpoint:
        assert checkpoint.step == 1


def test_reshard_makes_versions_that_refer_to_what_is_there(bucket: VersionedBucket, tmp_path: Path) -> None:
    arrays = {name: array.copy() for name, array in ARRAYS.items()}
    sizes = []
    for number in (1, 2):
        arrays["model/odd name/ü%~"][:] = number
        path = save_arrays(tmp_path / "local", arrays, step=number)
        bucket.run("reshard", str(path), "--to", bucket.url, *["--versions"] * (number == 1))
        sizes.append(sum(bucket.packs().values()))
    assert sizes[1] - sizes[0] < 20_000
    expect(bucket, None, arrays)
    # Of a version in the bucket, for another number of ranks, into another bucket.
    bucket.run("reshard", f"{bucket.url}:step-00000001", "--world-size", "3", "--to", f"{bucket.url}-3", "--versions")
    with open_checkpoint(open_folder(f"{bucket.url}-3", bucket.options)) as reader:
        assert reader.record.world_size == 3
        assert verify_checkpoint(reader) == []
        assert reader.read_array("model/h.0.weight").tobytes() == ARRAYS["model/h.0.weight"].tobytes()
    refused = bucket.run("reshard", f"{bucket.url}-3", "--to", bucket.url, code=1)
    assert isinstance(refused.exception, CheckpointExistsError)
    bucket.run("reshard", bucket.url, "--codec", "zstd", "--to", f"{bucket.url}-packed", "--versions")
    with open_checkpoint(open_folder(f"{bucket.url}-packed", bucket.options)) as reader:
        assert verify_checkpoint(reader) == []


def test_a_version_without_its_tag_counts_and_is_tagged_by_the_next_save(bucket: VersionedBucket) -> None:
    with open_world(ARRAYS) as world:
        bucket.save(world, step=1)
        bucket.icechunk().delete_tag("step-00000001")
        assert [info.tag for info in tags(bucket.folder)] == ["step-00000001"]
        bucket.save(world, step=2)
    assert [info.tag for info in tags(bucket.folder)] == ["step-00000001", "step-00000002"]


def test_an_engine_goes_on_from_versions_at_another_stage(bucket: VersionedBucket, tmp_path: Path) -> None:
    own = {"storage_options": bucket.options, "upload_folder": str(tmp_path / "uploads"), "versions": True, "keep": 2}
    with start(make_config(2, zstore=own)) as engine:
        for _ in range(3):
            step(engine)
            engine.save_checkpoint(bucket.url, wait=False)
        engine.wait_for_checkpoint()
        step(engine)
        expected = state_of(engine)
    assert [info.record.step for info in tags(bucket.folder)] == [2, 3]
    del own["versions"]  # the URL tells it by now
    with start(make_config(3, zstore=own)) as engine:
        assert engine.load_checkpoint(bucket.url)[0] == f"{bucket.url}/step-00000003"
        step(engine)
        assert state_of(engine) == expected
        engine.save_checkpoint(bucket.url)
    assert [info.record.step for info in tags(bucket.folder)] == [3, 4]


def test_the_plain_layout_goes_on_where_it_is(bucket: VersionedBucket) -> None:
    upload_checkpoint(save_arrays(bucket.local, ARRAYS), bucket.url, bucket.options)
    place = place_of(bucket.url, bucket.options, versions=True)
    assert not isinstance(place, VersionsFolder)
    with zstore.open_checkpoint(bucket.url, storage_options=bucket.options) as checkpoint:
        assert (checkpoint["model/h.0.weight"][:] == ARRAYS["model/h.0.weight"]).all()


def test_versions_on_a_file_system(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    place = place_of(url, versions=True)
    with open_world(ARRAYS, world_size=2) as world:
        for number in (1, 2):
            save_id = new_save_id()
            requests = [world.request(tmp_path / "local", rank, save_id, step=number) for rank in range(2)]
            wait_all([save_to_url(replace(request), UploadOptions(folder=place)) for request in requests])
    folder = open_folder(f"{url}/step-00000001")
    with open_checkpoint(folder) as reader:
        assert verify_checkpoint(reader) == []
        assert reader.read_array("model/h.0.weight").tobytes() == ARRAYS["model/h.0.weight"].tobytes()
    assert [info.tag for info in tags(folder.parent)] == ["step-00000001", "step-00000002"]


def test_what_a_branch_of_somebody_refers_to_stays(bucket: VersionedBucket) -> None:
    arrays = {"model/w": np.zeros(1000, np.float32)}
    with open_world(arrays) as world:
        for number in (1, 2, 3):
            arrays["model/w"][:] = number
            world.fill()
            bucket.save(world, step=number, keep=Keep(last=1) if number == 3 else None)
            if number == 1:
                repository = bucket.icechunk()
                repository.create_branch("mine", repository.lookup_branch("main"))
    assert [info.record.step for info in tags(bucket.folder)] == [1, 3]
    bucket.folder.tidy(leftover_s=0)
    expect(bucket, "step-00000001", {"model/w": np.full(1000, 1, np.float32)})


def test_a_bucket_with_versions_is_refused_where_it_cannot_be_used(
    bucket: VersionedBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_world(ARRAYS) as world:
        bucket.save(world)
    profile = {**bucket.options, "profile": "mine"}
    with pytest.raises(UsageError, match=r"\['profile'\] of s3:// cannot be passed on to icechunk"):
        VersionsFolder(bucket.folder, profile).all()
    monkeypatch.setitem(sys.modules, "icechunk", None)
    for look in (lambda: tags(bucket.folder), lambda: place_of(bucket.url, bucket.options)):
        with pytest.raises(UsageError, match=r"install zstore\[versions\]"):
            look()


@example([64 * 1000**2] * 4 + [0])
@given(st.lists(st.integers(0, 3 * LARGE_BYTES), max_size=60))
def test_packs_are_cut_in_order_and_few(sizes: list[int]) -> None:
    packs = plan_packs(sizes)
    assert [number for pack in packs for number in pack] == list(range(len(sizes)))
    assert len(packs) <= max(4, round(sum(sizes) / LARGE_BYTES))
    for pack in packs:
        nbytes = sum(sizes[number] for number in pack)
        assert nbytes <= 2 * LARGE_BYTES + 2 * max(sizes)


def test_a_pack_of_which_little_is_used_is_not_kept() -> None:
    places = [Extent("a", 0, 24), Extent("b", 0, 10), Extent("b", 50, 15)]
    assert worth_keeping(places, {"a": 100, "b": 100}) == {"b"}
    names = ["model/w", "model/frozen", "optimizer/exp_avg/w", "buffer/n", "model/a/b", "optimizer/ema/a/b"]
    assert training(names) == {"model/w", "optimizer/exp_avg/w", "model/a/b", "optimizer/ema/a/b"}
