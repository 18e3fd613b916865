"""Checkpoints from elsewhere: an error of ours or values, soon, nothing outside the target, and little memory."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.checkpoints import save_arrays
from tests.checkpoint.forging import Forge, data_start, index_of, mutate, record_digest, tree_of
from tests.interop.watching import MOST_GROWN_BYTES, grown, sparse, use
from zstore.checkpoint.catalog import scan
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import CheckpointNotFoundError, CorruptionError, ZstoreError
from zstore.io.shards import IoResources, open_resources

W = "model/h.0.weight"
SHARD = f"{W}/c.0.0"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    arrays = {
        W: rng.standard_normal((64, 32)).astype(np.float32),
        "model/h.0.bias": rng.standard_normal(40).astype(ml_dtypes.bfloat16),
        "optimizer/exp_avg/h.0.weight": rng.standard_normal((64, 32)).astype(np.float32),
    }
    folder = tmp_path_factory.mktemp("original")
    return save_arrays(folder, arrays, world_size=2, small={"client/n": np.arange(5)}, record={"step": 1})


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "ckpt" / original.name))


@pytest.fixture
def forge(path: Path) -> Forge:
    return Forge(path)


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def own(document: Any) -> Any:
    return document["attributes"]["zstore"]


def cuts(document: Any) -> Any:
    return document["chunk_grid"]["configuration"]


def inner(document: Any) -> Any:
    return document["codecs"][0]["configuration"]


def reshape(document: Any, shape: list[Any], shard: list[Any] | None = None, chunk: list[Any] | None = None) -> None:
    document["shape"] = own(document)["shape"] = shape
    if shard:
        cuts(document)["chunk_shape"] = shard
    if chunk:
        inner(document)["chunk_shape"] = chunk


ARRAYS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a name that leads up": (lambda d: own(d).update(name="model/../../h"), "must be in"),
    "a name that leads to the root": (lambda d: own(d).update(name="/etc/passwd"), "expected `group/name`"),
    "a name with a lone surrogate": (lambda d: own(d).update(name="model/\ud800"), "lone surrogates"),
    "a name without end": (lambda d: own(d).update(name="model/" + "x" * 2**20), "at most 4096"),
    "the manifests' group": (lambda d: own(d).update(name="manifest/rank-00000.json"), "belongs to the format"),
    "no end of elements": (lambda d: reshape(d, [2**40, 2**40]), "larger than any array"),
    "no end of extents": (lambda d: reshape(d, [1] * 10_000), "larger than any array"),
    "negative rows": (lambda d: reshape(d, [-1, 32]), "whole numbers from 0"),
    "deep rows": (lambda d: reshape(d, nested(700)), "whole numbers from 0"),
    "shards of no rows": (lambda d: cuts(d).update(chunk_shape=[0, 32]), "not whole rows"),
    "huge shards": (lambda d: cuts(d).update(chunk_shape=[2**30, 32]), "more than 16 times"),
    "huge chunks": (lambda d: reshape(d, [2**35, 32], [2**35, 32], [2**35, 32]), "more than any checkpoint has"),
    "chunks without end": (lambda d: reshape(d, [2**35, 32], [2**35, 32], [1, 32]), "more than any checkpoint has"),
    "shards without end": (lambda d: reshape(d, [2**35, 32], [32, 32]), "but 2 rank"),
    "more rows than there are": (lambda d: reshape(d, [128, 32], [64, 32], [64, 32]), "bytes, expected"),
    "a petabyte": (lambda d: reshape(d, [2**43, 32], [2**42, 32], [2**22, 32]), "no checksums for each"),
    "another type": (lambda d: d.update(data_type="float64"), "bytes, expected"),
    "objects": (lambda d: d.update(data_type="object"), "cannot be stored"),
    "another codec": (lambda d: inner(d)["codecs"].append({"name": "pickle"}), "has an encoding"),
    "a transformer": (lambda d: d.update(storage_transformers=[{"name": "x"}]), "has an encoding"),
    "a fill value": (lambda d: d.update(fill_value=0), "has an encoding"),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_hostile_metadata_of_an_array_is_refused(case: str, forge: Forge, tmp_path: Path) -> None:
    change, words = ARRAYS[case]
    forge.edit_array(W, change)
    before = tree_of(tmp_path)
    problems = use(forge.path, tmp_path / "out")
    assert len(problems) >= 3
    assert words in problems[0]
    assert all(len(problem) < 2000 for problem in problems)
    assert {k: v for k, v in tree_of(tmp_path).items() if "/out" not in k} == before
    assert not list((tmp_path / "out").rglob("zstore.json"))


GROUPS = ["..", "../..", "/", "/etc", "", "model/..", f"{W}/deeper", "manifest", "strange", "\ud800", "a\0b"]


@pytest.mark.parametrize("folder", GROUPS, ids=repr)
def test_groups_that_no_array_is_in_are_refused(folder: str, forge: Forge, tmp_path: Path) -> None:
    group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    forge.edit("zarr.json", lambda root: root["consolidated_metadata"]["metadata"].update({folder: group}))
    assert all("is not a group of its arrays" in problem for problem in use(forge.path, tmp_path / "out")[:4])


RECORDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a tag that leads up": (lambda r: r.update(tag="../../elsewhere"), "cannot be a tag"),
    "an absolute tag": (lambda r: r.update(tag="/tmp/elsewhere"), "cannot be a tag"),
    "a tag with a NUL": (lambda r: r.update(tag="a\0b"), "cannot be a tag"),
    "no tag": (lambda r: r.update(tag=""), "cannot be a tag"),
    "an id that leads up": (lambda r: r.update(id="../../elsewhere"), "32 lower-case hex"),
    "no end of ranks": (lambda r: r.update(world_size=2**40), "to be from 0"),
    "ranks without manifests": (lambda r: r.update(world_size=1000), "digests of 1000 manifests"),
    "text for a step": (lambda r: r.update(step="1"), "to be a int"),
    "deep state": (lambda r: r.update(state={"x": nested(700)}), "levels deep"),
    "a newer version": (lambda r: r.update(version=2**70), "install a newer one"),
    "another format": (lambda r: r.update(format="x" * 2**20), "expected format"),
    "wrong digests": (lambda r: r.update(manifest_sha256=[1, 2]), "digests of 2 manifests"),
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_hostile_record_is_refused(case: str, forge: Forge, tmp_path: Path) -> None:
    change, words = RECORDS[case]
    document = json.loads(forge.read("zstore.json"))
    change(document)
    document["digest"] = record_digest(document)
    forge.put("zstore.json", json.dumps(document).encode())
    problems = use(forge.path, tmp_path / "out")
    assert all(words in problem and len(problem) < 2000 for problem in problems)
    assert len(problems) == 6
    assert tags(forge.path.parent) == []
    assert words in scan(forge.path.parent).refusals[0].reason


BYTES: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "no JSON": lambda: b"\x80\x04}q\x00.",
    "a list": lambda: b"[]",
    "deep lists": lambda: b"[" * 10**6,
    "deep objects": lambda: b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
    "a long number": lambda: b'{"version":' + b"9" * 10**6 + b"}",
    "no number": lambda: b'{"version": NaN, "format": Infinity, "x": 1e999}',
    "half a letter": lambda: b'{"format": "\xc3"}',
    "many small values": lambda: b"{" + b'"a":[' + b"[]," * 2**17 + b"[]]" + b"}",
}


@pytest.mark.parametrize("file", ["zstore.json", "zarr.json", "manifest/rank-00001.json"])
@pytest.mark.parametrize("case", BYTES)
def test_files_that_are_no_json_of_ours_are_refused(file: str, case: str, forge: Forge, tmp_path: Path) -> None:
    forge.put(file, BYTES[case]())
    if file != "zstore.json":
        forge.seal()
    problems = use(forge.path, tmp_path / "out")
    assert len(problems) >= 3
    assert all(Path(file).name in problem and len(problem) < 2000 for problem in problems)


@pytest.mark.parametrize(
    "name", [SHARD, W, "model", "manifest", "manifest/rank-00000.json", "zarr.json", "zstore.json", f"{W}/zarr.json"]
)
def test_links_out_of_the_folder_are_refused(name: str, path: Path, tmp_path: Path) -> None:
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    problems = use(path, tmp_path / "out")
    # Only verifying looks at the copies of metadata.
    assert "symbolic link" in problems[0]
    assert len(problems) > 2 or name == f"{W}/zarr.json"
    assert not list((tmp_path / "out").rglob("*.safetensors")) or name == f"{W}/zarr.json"


def test_a_link_in_the_folder_of_checkpoints_may_lead_to_its_neighbour_alone(path: Path, tmp_path: Path) -> None:
    folder = path.parent
    (folder / "best").symlink_to(path.name)
    with open_checkpoint(folder, "best") as reader:
        assert reader.record.step == 1
    outside = tmp_path / "outside"
    path.rename(outside)
    (folder / "best").unlink()
    (folder / "best").symlink_to(outside)
    assert tags(folder) == []
    with pytest.raises(CheckpointNotFoundError, match=r"best was rejected: .* symbolic link to .*outside, out of"):
        open_checkpoint(folder)
    with pytest.raises(CorruptionError, match="name that folder itself"):
        open_checkpoint(folder, "best")
    with open_checkpoint(folder / "best") as reader:  # its user named it
        assert reader.record.step == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
@pytest.mark.parametrize("name", [SHARD, "manifest/rank-00000.json", "zarr.json", "zstore.json", f"{W}/zarr.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_pipes_and_folders_in_place_of_files_are_refused(name: str, kind: str, path: Path, tmp_path: Path) -> None:
    (path / name).unlink()
    os.mkfifo(path / name) if kind == "pipe" else (path / name).mkdir()
    problems = use(path, tmp_path / "out")
    assert problems
    assert all(Path(name).name in problem for problem in problems)


def test_an_index_that_leads_elsewhere_is_refused(forge: Forge, tmp_path: Path) -> None:
    for offset, nbytes in ((2**63, 8), (0, 8), (4096, 2**40), (2**64 - 1, 8)):

        def change(data: bytearray, entry: tuple[int, int] = (offset, nbytes)) -> None:
            data[:16] = entry[0].to_bytes(8, "little") + entry[1].to_bytes(8, "little")

        forge.forge_shard(SHARD, change)
        assert any("belongs to another layout" in problem for problem in use(forge.path, tmp_path / f"out-{offset}"))
        forge.restore()


def _huge_array(forge: Forge) -> None:
    """An array of 2 TiB of which the file is there, all holes, and the manifest names every chunk."""
    numel, chunk = 2**39, 2**19
    forge.edit_array("client/n", lambda d: (reshape(d, [numel], [numel], [chunk]), d.update(data_type="float32")))
    forge.edit_array("client/n", lambda d: d.update(fill_value="NaN"))
    forge.name_crcs("client/n/c.0", [0] * (numel // chunk), 0)
    sparse(forge.path / "client/n/c.0", 16 * 2**20 + 4096 + numel // chunk * (4 * chunk + 4096))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_hostile_files_take_little_memory(original: Path, tmp_path: Path) -> None:
    def variant(name: str) -> Forge:
        return Forge(Path(shutil.copytree(original, tmp_path / name / original.name)))

    paths = []
    for file in ("zstore.json", "zarr.json", "manifest/rank-00000.json", SHARD):
        forge = variant(f"oversized-{Path(file).name}")
        sparse(forge.path / file, 2**40)
        paths.append(forge.path)
    for case in ("huge shards", "huge chunks", "chunks without end", "shards without end", "a petabyte", "deep rows"):
        forge = variant(case)
        forge.edit_array(W, ARRAYS[case][0])
        paths.append(forge.path)
    for case, data in BYTES.items():
        forge = variant(f"bytes-{case}")
        forge.put("zarr.json", data())
        forge.seal()
        paths.append(forge.path)
    forge = variant("huge array")
    _huge_array(forge)
    paths.append(forge.path)
    forge = variant("no end of values")
    forge.put("zarr.json", b'{"a":[' + b"[]," * 2**24 + b"[]]}")
    forge.seal()
    paths.append(forge.path)
    growth = grown("tests.interop.watching", original, tmp_path / "out", paths)
    assert len(growth) == len(paths)
    assert max(growth.values()) < MOST_GROWN_BYTES, growth


LIMIT_S = 10.0
"""No example may take longer; one takes some milliseconds."""
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def resources() -> Iterator[IoResources]:
    with open_resources(pool_bytes=2**20, num_threads=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def forge_fuzz(tmp_path_factory: pytest.TempPathFactory) -> Forge:
    rng = np.random.default_rng(0)
    arrays = {
        "model/w": rng.standard_normal((40, 16)).astype(np.float32),
        "model/b": rng.standard_normal(5).astype(ml_dtypes.bfloat16),
        "optimizer/exp_avg/w": rng.standard_normal((40, 16)).astype(np.float32),
    }
    small = {"client/n": np.arange(6).reshape(2, 3)}
    folder = tmp_path_factory.mktemp("fuzz")
    return Forge(save_arrays(folder, arrays, world_size=2, small=small, record={"step": 1}))


@contextlib.contextmanager
def changed(forge_fuzz: Forge) -> Iterator[None]:
    """The block changes the checkpoint and reads it, within the limit; then it is as it was."""
    started = time.process_time()
    try:
        yield
        assert time.process_time() - started < LIMIT_S
    finally:
        forge_fuzz.restore()


def read_all(forge_fuzz: Forge, resources: IoResources) -> tuple[dict[str, bytes], int]:
    """Read and verify; return the arrays that could be read, and how many faults there are. Other errors fail."""
    found: dict[str, bytes] = {}
    try:
        with open_checkpoint(forge_fuzz.path, resources=resources) as reader:
            for name in reader.arrays:
                with contextlib.suppress(ZstoreError):
                    found[name] = reader.read_array(name).tobytes()
            for rank in range(reader.record.world_size):
                with contextlib.suppress(ZstoreError):
                    reader.rank_state(rank)
            return found, len(verify_checkpoint(reader, num_threads=1))
    except ZstoreError:
        return found, 1


@FUZZ
@given(data=st.data())
def test_changed_json_with_digests_that_fit(forge_fuzz: Forge, resources: IoResources, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from([f for f in sorted(forge_fuzz.originals) if f.endswith(".json")]))
    document = json.loads(forge_fuzz.originals[file])
    for _ in range(data.draw(st.integers(1, 3))):
        if document:
            mutate(document, data)
    with changed(forge_fuzz):
        if file == "zstore.json":
            document["digest"] = record_digest(document)
        forge_fuzz.put(file, json.dumps(document).encode())
        if file != "zstore.json":
            forge_fuzz.seal()
        read_all(forge_fuzz, resources)


@FUZZ
@given(data=st.data())
def test_changed_shards_with_checksums_that_fit(forge_fuzz: Forge, resources: IoResources, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from([f for f in sorted(forge_fuzz.originals) if "/c." in f]))
    old = forge_fuzz.originals[file]
    (offset, nbytes), *_ = index_of(old)
    start = data_start(old)
    places = st.integers(0, start - 1) | st.integers(offset, offset + nbytes - 5) | st.integers(0, len(old) - 1)
    edits = data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=8))

    def change(shard: bytearray) -> None:
        for at, value in edits:
            shard[at] = value

    with changed(forge_fuzz):
        rank = 1 if "/c.1" in file else 0
        forge_fuzz.forge_shard(file, change, rank)
        found, num_faults = read_all(forge_fuzz, resources)
        written = forge_fuzz.read(file)
        name = forge_fuzz.name_of(file)
        if name in found:
            assert written[: start - 4] == old[: start - 4]  # an index that leads elsewhere is never followed
            assert num_faults == 0
            shard_bytes = nbytes - 4  # one chunk a shard
            here = found[name][rank * shard_bytes :][:shard_bytes]
            assert here == written[offset : offset + len(here)]


def test_the_forgers_do_what_they_say(forge_fuzz: Forge, resources: IoResources) -> None:
    """A checkpoint that was sealed anew is one; else the two tests above would try nothing behind the digests."""
    with changed(forge_fuzz):
        forge_fuzz.edit("manifest/rank-00000.json", lambda manifest: manifest["rank_state"].update(rank=5))
        found, num_faults = read_all(forge_fuzz, resources)
        assert (len(found), num_faults) == (4, 0)
        forge_fuzz.forge_shard("model/w/c.0.0", lambda shard: shard.__setitem__(slice(4096, 4100), b"\0\0\x80\x3f"))
        found, num_faults = read_all(forge_fuzz, resources)
        assert np.frombuffer(found["model/w"], np.float32)[0] == 1.0
        assert num_faults == 0
    found, num_faults = read_all(forge_fuzz, resources)
    assert (len(found), num_faults) == (4, 0)
