"""Checkpoints behind URLs are read by ranges: the same values, errors and choices as from a folder; `docs/remote.md`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.checkpoint.checkpoints import save_arrays
from tests.checkpoint.object_store import ObjectFileSystem, RequestFault, unavailable
from tests.pages import blocks
from tests.tools.commands import done
from zstore.checkpoint.reader import CheckpointReader, open_checkpoint, refused, tags
from zstore.checkpoint.reader import tags as list_tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import CheckpointNotFoundError, CorruptionError, StorageError, UsageError, shown
from zstore.io import is_url
from zstore.open.sources import folder_of, open_source
from zstore.remote.bucket import PART_BYTES, Retries
from zstore.remote.service import open_folder
from zstore.remote.target import NUM_THREADS
from zstore.tools.options import parse_options

Array = npt.NDArray[Any]

RNG = np.random.default_rng(4)
ARRAYS: dict[str, Array] = {
    "model/h.0.weight": RNG.standard_normal((1000, 300)).astype(np.float32),
    "model/odd name/ü%": RNG.standard_normal(77).astype(np.float32),
    "model/experts": RNG.standard_normal((3, 400, 50)).astype(np.float16),
    "model/none": np.zeros((0, 5), np.float16),
    "optimizer/exp_avg/h.0.weight": RNG.standard_normal((1000, 300)).astype(np.float32),
}
URL = "objects://bucket/run"
QUICK = Retries(first_pause_s=0.0)


class Remote:
    def __init__(self, tmp_path: Path) -> None:
        self.local = tmp_path / "local"
        self.options = {"folder": str(tmp_path / "objects")}
        self.fs: ObjectFileSystem = open_folder(URL, self.options).fs

    def copy(self) -> None:
        for path in sorted(self.local.rglob("*")):
            if path.is_file():
                self.fs.put(f"bucket/run/{path.relative_to(self.local).as_posix()}", path.read_bytes())

    def open(self, tag: str | None = None, url: str = URL) -> CheckpointReader:
        return open_checkpoint(open_folder(url, self.options, retries=QUICK), tag)

    def change(self, key: str, offset: int) -> None:
        data = bytearray(self.fs.object_path(key).read_bytes())
        data[offset] ^= 1
        self.fs.put(key, bytes(data))


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    """Two checkpoints of two ranks, of which the second is the newer."""
    remote = Remote(tmp_path)
    for step in (1, 2):
        save_arrays(remote.local, ARRAYS, world_size=2, step=step)
    remote.copy()
    yield remote
    ObjectFileSystem.clear_instance_cache()


def test_tags_are_listed_found_by_name_and_by_their_own_url(remote: Remote) -> None:
    folder = folder_of(URL, remote.options)
    assert [info.tag for info in tags(folder)] == ["step-00000001", "step-00000002"]
    assert refused(folder) == []
    for tag, url in (("step-00000001", URL), (None, f"{URL}/step-00000001"), (None, f"{URL}/step-00000001/")):
        with remote.open(tag, url) as reader:
            assert reader.record.step == 1
    with pytest.raises(CheckpointNotFoundError, match=r"tag 'x'; it has the tags 'step-00000001', 'step-0"):
        remote.open("x")
    with pytest.raises(CheckpointNotFoundError, match="objects://bucket/other does not exist"):
        remote.open(url="objects://bucket/other")
    with pytest.raises(UsageError, match="is behind a URL and has no path"), remote.open() as reader:
        _ = reader.path


def test_a_folder_without_a_valid_record_is_no_checkpoint(remote: Remote) -> None:
    remote.fs.rm_file("bucket/run/step-00000002/zstore.json")
    remote.fs.put("bucket/run/latest", b"step-00000002\n")
    with remote.open() as reader:
        assert reader.tag == "step-00000001"
    with pytest.raises(CheckpointNotFoundError, match="it was never committed"):
        remote.open(url=f"{URL}/step-00000002")
    remote.change("bucket/run/step-00000001/zstore.json", 200)
    with pytest.raises(CheckpointNotFoundError, match="step-00000001 was rejected"):
        remote.open()
    found = refused(folder_of(URL, remote.options))
    assert {refusal.folder.name for refusal in found} == {"step-00000001", "step-00000002"}


def test_reading_asks_for_no_more_than_the_chunks(remote: Remote) -> None:
    with remote.open() as reader:
        before = reader.folder.traffic
        metadata_bytes, requests = before.read_bytes, before.requests
        out = np.empty((40, 300), np.float32)
        reader.read("model/h.0.weight", 0, 12000, out)
        grid = reader.array("model/h.0.weight").grid
        manifest_bytes = (remote.local / "step-00000002/manifest/rank-00000.json").stat().st_size
        chunks = -(-12000 // grid.chunk_numel)
        assert reader.asked_bytes == 48000
        assert reader.read_bytes == chunks * reader.open_shard("model/h.0.weight", 0).layout.slot_bytes
        assert before.read_bytes - metadata_bytes == reader.read_bytes + manifest_bytes
        assert before.requests - requests == 2  # the manifest and the range: no size, no index
        assert before.read_bytes == remote.fs.read_bytes


SHARD = "bucket/run/step-00000002/model/h.0.weight/c.1.0"
MANIFEST = "bucket/run/step-00000002/manifest/rank-00001.json"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda remote: remote.fs.object_path(SHARD).unlink(), "c.1.0 is missing"),
        (lambda remote: remote.fs.put(SHARD, remote.fs.object_path(SHARD).read_bytes()[:-4096]), "was cut or replaced"),
        (lambda remote: remote.fs.rm_file(MANIFEST), "rank-00001.json is missing"),
    ],
)
def test_damage_is_found_and_named(damage: Any, words: str, remote: Remote) -> None:
    damage(remote)
    with remote.open() as reader, pytest.raises(CorruptionError, match=words):
        reader.read_array("model/h.0.weight")
    with remote.open() as reader:
        assert verify_checkpoint(reader) != []


def test_a_read_that_fails_for_a_while_is_tried_again(remote: Remote) -> None:
    remote.fs.faults += [
        RequestFault(kind="read", pattern="*/c.0.0", times=2, error=unavailable),
        RequestFault(kind="list", times=1, error=lambda: TimeoutError("too slow")),
        RequestFault(kind="read", pattern="*/c.1.0", times=1, error=lambda: ConnectionResetError("reset")),
    ]
    with remote.open() as reader:
        assert reader.read_array("model/h.0.weight").tobytes() == ARRAYS["model/h.0.weight"].tobytes()


@pytest.mark.parametrize(
    ("error", "tries"),
    [(unavailable, "6 times"), (lambda: PermissionError("no key"), r"once\): PermissionError: no key")],
)
def test_a_read_that_keeps_failing_is_an_error_that_says_where(error: Any, tries: str, remote: Remote) -> None:
    with remote.open() as reader:
        remote.fs.faults.append(RequestFault(kind="read", pattern="*/c.0.0", times=None, error=error))
        with pytest.raises(StorageError, match=f"cannot read .tried {tries}") as raised:
            reader.read_array("model/h.0.weight")
    assert raised.value.path == f"{URL}/step-00000002/model/h.0.weight/c.0.0"


def test_what_is_a_url() -> None:
    assert all(map(is_url, ["s3://b/run", "memory://x", "simplecache::s3://b", "file:///x"]))
    assert not any(map(is_url, ["runs/one", "/runs/one", "C:\\runs", "runs/a::b", Path("s3://b"), "s3:/x"]))
    assert shown("ftp://me:secret@host/x") == "ftp://me:***@host/x"


def test_storage_options_are_json_where_they_can_be() -> None:
    words = ["anon=true", 'client_kwargs={"endpoint_url": "http://h:1"}', "key=AKIA", "secret=a=b", "retries=3"]
    client = {"endpoint_url": "http://h:1"}
    found = {"anon": True, "client_kwargs": client, "key": "AKIA", "secret": "a=b", "retries": 3}
    assert parse_options(words) == found
    for word in ("anon", "=x"):
        with pytest.raises(UsageError, match="key=value"):
            parse_options([word])


def test_urls_that_nothing_opens_are_refused_at_once() -> None:
    with pytest.raises(UsageError, match="nosuch://x"):
        open_source("nosuch://x/y")
    with pytest.raises(UsageError, match="storage options"):  # the folder is missing
        open_source("objects://x/y", storage_options={"deny_writes": "x"})


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def test_the_examples_run(memory: Any, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    *here, _ = [block.replace("s3://bucket", "memory://bucket") for block in blocks("docs/remote.md")]
    for block in here:
        exec(block, names)
    assert [info.tag for info in list_tags(open_folder("memory://bucket/run"))] == ["step-00000002", "step-00000004"]
    assert names["rows"].shape == (10, 32)
    assert names["weights"]["0.weight"].dtype == torch.bfloat16
    assert not list((tmp_path / "cache/zstore-uploads").glob("*/step-*"))
    for line in blocks("docs/remote.md", "sh")[0].splitlines():
        done(line.replace("s3://bucket", "memory://bucket"))
    assert (tmp_path / "weights/model.safetensors").exists()
    with open_checkpoint(open_folder("memory://bucket/four")) as reader:
        assert reader.record.world_size == 4
    # Resuming: the loop again goes on at step 4.
    exec(here[0], names)
    assert names["engine"].global_steps == 8
    assert (PART_BYTES, NUM_THREADS) == (8 * 2**20, 4)  # as the text says
    # A local folder is uploaded as the docs say.
    done("zstore reshard memory://bucket/four here --world-size 2")
    assert names["upload_all"](tmp_path / "here", "memory://bucket/again") == ["memory://bucket/again/step-00000004"]
