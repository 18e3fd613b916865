"""Saves to a URL: the record last, and what is left when something fails."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest

from tests.checkpoint.checkpoints import World, begin_upload, open_world, save_arrays, wait_all
from tests.checkpoint.object_store import ObjectFileSystem, RequestFault, unavailable
from zstore.checkpoint.layout import LOCK, SET_ASIDE, new_save_id, parse_working_name, working_name
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.retention import Keep
from zstore.checkpoint.save import SaveHandle
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import (
    BudgetError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    RankError,
    StorageError,
)
from zstore.remote.bucket import PART_BYTES, Retries
from zstore.remote.service import open_folder
from zstore.remote.target import BucketTarget, has_ended, sweep
from zstore.remote.upload import upload_checkpoint

Array = npt.NDArray[Any]

RNG = np.random.default_rng(5)
ARRAYS: dict[str, Array] = {
    "model/h.0.weight": RNG.standard_normal((1000, 30)).astype(np.float32),
    "optimizer/exp_avg/h.0.weight": RNG.standard_normal((1000, 30)).astype(np.float32),
}
SMALL = {"buffer/steps": np.array(7, np.int64)}
URL = "objects://bucket/run"
TAG = "bucket/run/step-00000001"
QUICK = Retries(first_pause_s=0.0)


class Remote:
    def __init__(self, tmp_path: Path) -> None:
        self.local = tmp_path / "local"
        self.options = {"folder": str(tmp_path / "objects")}
        self.folder: Any = open_folder(URL, self.options, retries=QUICK)
        self.fs: ObjectFileSystem = self.folder.fs

    def begin(self, world: World, **fields: Any) -> list[SaveHandle]:
        return begin_upload(world, self.local, URL, self.options, retries=QUICK, **fields)

    def save(self, world: World, **fields: Any) -> list[Any]:
        return wait_all(self.begin(world, **fields))

    def fail(self, world: World, **fields: Any) -> list[str]:
        messages = []
        for handle in self.begin(world, **fields):
            with pytest.raises(CheckpointError) as raised:
                handle.wait(200)
            messages.append(str(raised.value))
        return messages

    def tags(self) -> list[str]:
        try:
            return [info.tag for info in tags(open_folder(URL, self.options))]
        except CheckpointNotFoundError:
            return []

    def arrays(self, tag: str | None = None) -> dict[str, bytes]:
        with open_checkpoint(open_folder(URL, self.options), tag) as reader:
            return {name: reader.read_array(name).tobytes() for name in ARRAYS}


def content(arrays: dict[str, Array]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    yield Remote(tmp_path)
    ObjectFileSystem.clear_instance_cache()


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(ARRAYS, world_size=2, small=SMALL) as world:
        yield world


def test_a_save_is_sent_and_leaves_nothing_here(remote: Remote, world: World) -> None:
    first, second = remote.save(world, before_commit=lambda saved: [str((saved.path / "config.json").write_text("{}"))])
    added = remote.fs.object_path("bucket/run/step-00000001/config.json").read_text()
    assert (added, first.messages, second.messages) == ("{}", ("2",), ())
    assert remote.arrays() == content(ARRAYS)
    with open_checkpoint(open_folder(URL, remote.options)) as reader:
        assert (verify_checkpoint(reader), reader.read_array("buffer/steps")) == ([], 7)
    assert first.url == second.url == f"{URL}/step-00000001"
    assert (remote.fs.object_path("bucket/run/latest")).read_text() == "step-00000001\n"
    assert not any(parse_working_name(key.split("/")[2]) for key in remote.fs.objects())  # no locks, nothing set aside
    assert list(remote.local.iterdir()) == []
    # Each rank uploads what it wrote.
    sizes = {key: size for key, size in remote.fs.objects().items() if key.startswith(TAG)}
    assert second.uploaded_bytes == sum(size for key, size in sizes.items() if "/c.1" in key)
    assert (first.all_uploaded_bytes, second.all_uploaded_bytes) == (first.uploaded_bytes + second.uploaded_bytes, 0)
    assert first.all_uploaded_bytes == sum(sizes.values()) - sizes[f"{TAG}/zarr.json"] - sizes[f"{TAG}/zstore.json"]
    # The record comes last.
    writes = [key for kind, key in remote.fs.order if kind == "write"]
    assert parse_working_name(writes[0].split("/")[2]) is not None  # the lock
    assert writes[-3:] == [f"{TAG}/zarr.json", f"{TAG}/zstore.json", "bucket/run/latest"]


def test_requests_that_fail_for_a_while_are_tried_again(remote: Remote, world: World) -> None:
    for kind in ("write", "list", "ask", "read", "remove"):
        remote.fs.faults.append(RequestFault(kind=kind, times=3, error=unavailable))  # type: ignore[arg-type]
    remote.fs.faults.append(RequestFault(kind="write", pattern="*zstore.json", times=4, error=unavailable))
    remote.save(world)
    assert remote.arrays() == content(ARRAYS)


@pytest.mark.parametrize("pattern", ["*/c.0.0", "*/c.1.0", "*/rank-00001.json", "*/zarr.json", "*/zstore.json"])
def test_a_failed_upload_fails_every_rank_and_leaves_nothing(pattern: str, remote: Remote, world: World) -> None:
    remote.fs.faults.append(RequestFault(kind="write", pattern=pattern, times=None, error=unavailable))
    for message in remote.fail(world):
        assert f"{URL}/step-00000001" in message
        assert "503 Slow Down" in message
    assert remote.tags() == []
    assert remote.fs.objects() == {}  # what had been sent is removed
    assert list(remote.local.iterdir()) == []
    remote.fs.faults.clear()
    remote.save(world, step=2)
    assert remote.arrays() == content(ARRAYS)
    assert {key.split("/")[2] for key in remote.fs.objects()} == {"step-00000002", "latest"}


def test_what_arrives_cut_is_not_committed(remote: Remote, world: World) -> None:
    remote.fs.faults.append(RequestFault(kind="write", pattern="*/model/*/c.1.0", cut_bytes=1))
    assert "bytes were sent" in remote.fail(world)[0]
    assert remote.tags() == []


@pytest.mark.parametrize("at", ["*/step-00000001/zstore.json", "*.old-*/zstore.json", None])
def test_what_cannot_be_removed_is_swept_by_the_next_save(at: str | None, remote: Remote, world: World) -> None:
    """Of an upload of a new tag, or of one that replaces another: up to the removal of the former record (None)."""
    replaces = at != "*/step-00000001/zstore.json"
    if replaces:
        remote.save(world)
    remote.fs.faults.append(RequestFault(kind="remove", times=None, error=unavailable))
    if at is not None:
        remote.fs.faults.append(RequestFault(kind="write", pattern=at, times=None, error=unavailable))
    remote.fail(world)
    assert any(key.endswith("c.0.0") and (".old-" in key) == replaces for key in remote.fs.objects())
    assert remote.tags() == ["step-00000001"] * replaces
    remote.fs.faults.clear()
    remote.save(world, step=2)
    names = {"step-00000002", "latest"} | ({"step-00000001"} if replaces else set())
    assert {key.split("/")[2] for key in remote.fs.objects()} == names
    remote.save(world)
    assert remote.arrays("step-00000001") == content(ARRAYS)


def _upload_and_wait(local: Path, options: dict[str, str], at: str) -> None:
    fs = open_folder(URL, options).fs
    fs.faults.append(RequestFault(kind="write", pattern=at, gate=_Forever(local.parent / "reached")))
    upload_checkpoint(local, URL, options)


class _Forever(threading.Event):
    def __init__(self, reached: Path) -> None:
        super().__init__()
        self._reached = reached

    def wait(self, timeout: float | None = None) -> bool:
        self._reached.touch()
        return super().wait(None)


@pytest.mark.parametrize("at", ["*/c.1.0", "*/zstore.json", "*/latest"])
def test_a_killed_upload_is_not_seen_and_is_swept(at: str, remote: Remote, tmp_path: Path) -> None:
    save_arrays(remote.local, ARRAYS, world_size=2, run_id="other")
    process = multiprocessing.get_context("spawn").Process(
        target=_upload_and_wait, args=(remote.local, remote.options, at)
    )
    process.start()
    while not (tmp_path / "reached").exists():
        assert process.is_alive()
        process.join(0.01)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    committed = at == "*/latest"
    assert remote.tags() == (["step-00000001"] if committed else [])
    with open_world(ARRAYS) as world:
        remote.save(world, step=2)
    names = {key.split("/")[2] for key in remote.fs.objects()}
    assert names == {"step-00000002", "latest"} | ({"step-00000001"} if committed else set())


def test_an_upload_under_way_of_another_run_is_left_alone(remote: Remote, world: World) -> None:
    other = BucketTarget(open_folder(URL, remote.options), "theirs", new_save_id(), "other run")
    other.begin(None, overwrite=False)  # type: ignore[arg-type]
    other.stage.write_small("model/part", b"x")
    remote.fs.put("bucket/run/notes/mine.txt", b"a user's")
    remote.save(world)
    assert "bucket/run/theirs/model/part" in remote.fs.objects()
    assert "bucket/run/notes/mine.txt" in remote.fs.objects()
    assert remote.tags() == ["step-00000001"]


def test_whose_upload_has_ended_is_told_by_its_lock() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "run": "a", "since_s": int(time.time())}
    cases = [
        ({}, "b", False),
        ({}, "a", True),  # a run has one upload at a time
        ({"pid": process.pid}, "b", True),
        ({"pid": process.pid, "host": "elsewhere"}, "b", False),
        ({"host": "elsewhere", "since_s": mine["since_s"] - 25 * 3600}, "b", True),
        ({"run": ""}, "", False),
        ({"pid": "x"}, "a", False),
    ]
    for change, run, ended in cases:
        assert has_ended(json.dumps(mine | change).encode(), run) == ended, (change, run)
    assert not has_ended(b"no JSON", "a")
    assert not has_ended(StorageError("cannot read"), "a")


def test_an_upload_that_was_taken_for_dead_does_not_commit(remote: Remote) -> None:
    path = save_arrays(remote.local, ARRAYS, run_id="run")
    folder = open_folder(URL, remote.options)

    def restart() -> Exception:
        BucketTarget(folder, "another", new_save_id(), "run").begin(None, overwrite=False)  # type: ignore[arg-type]  # the same run
        return unavailable()

    remote.fs.faults.append(RequestFault(kind="write", pattern="*/step-00000001/zarr.json", error=restart))
    with pytest.raises(CheckpointError, match=r"considered the upload of .* dead"):
        upload_checkpoint(path, URL, remote.options)
    assert remote.tags() == []


def test_retention_holds_at_the_url_for_the_runs_own_checkpoints(remote: Remote, world: World) -> None:
    remote.save(world, step=1, run_id="other")
    for step in (2, 3, 4, 5):
        remote.save(world, step=step, keep=Keep(last=2))
    assert remote.tags() == ["step-00000001", "step-00000004", "step-00000005"]
    removed = [key for kind, key in remote.fs.order if kind == "remove" and "/step-00000002/" in key]
    assert removed[0].endswith("/zstore.json")  # else half of it would look like a checkpoint
    assert {key.split("/")[2] for key in remote.fs.objects()} == {*remote.tags(), "latest"}


def test_a_tag_of_another_run_is_not_replaced_unasked(remote: Remote, world: World) -> None:
    remote.save(world)
    before = remote.fs.objects()
    handles = remote.begin(world, run_id="other")
    with pytest.raises(CheckpointExistsError, match=r"'step-00000001' is committed in objects://.* by another run"):
        handles[0].wait(200)
    with pytest.raises(CheckpointError):
        handles[1].wait(200)
    assert remote.fs.objects() == before


def test_a_users_folder_is_never_touched(remote: Remote, world: World) -> None:
    remote.fs.put(f"{TAG}/thesis.txt", b"mine")
    for message in remote.fail(world, overwrite=True):
        assert "is not a zstore checkpoint" in message
    assert list(remote.fs.objects()) == [f"{TAG}/thesis.txt"]


def test_at_every_request_of_an_overwriting_save_one_of_the_two_is_whole(remote: Remote) -> None:
    """The tag goes from its folder to one beside it and back, and a reader always finds all of one of them."""
    other = ObjectFileSystem(skip_instance_cache=True, **remote.options)
    versions = [{name: array + np.float32(i) for name, array in ARRAYS.items()} for i in range(4)]
    seen: list[int] = []

    def watched(kind: str, key: str) -> int:
        if kind in ("write", "remove"):
            folder = open_folder(URL, remote.options)
            folder.fs = other
            with open_checkpoint(folder, "step-00000001") as reader:
                found = reader.read_array("model/h.0.weight")
            (number,) = [i for i, version in enumerate(versions) if (version["model/h.0.weight"] == found).all()]
            seen.append(number)
        return 0

    for number, arrays in enumerate(versions):
        with open_world(arrays) as world:
            if number > 0:
                remote.fs.step = watched  # type: ignore[method-assign]
            remote.save(world, overwrite=True)
        assert remote.arrays() == content(arrays)
    assert set(seen) == set(range(4))
    assert seen == sorted(seen)
    assert {key.split("/")[2].partition(".old-")[0] for key in remote.fs.objects()} == {"step-00000001", "latest"}
    assert len({key.split("/")[2] for key in remote.fs.objects()}) == 2


def test_a_large_file_goes_part_by_part_in_bounded_memory(remote: Remote, tmp_path: Path) -> None:
    big = tmp_path / "big"
    size = 12 * PART_BYTES + 5
    with big.open("wb") as file:
        file.truncate(size)
    tracemalloc.start()
    try:
        assert remote.folder.send(big, "big") == size
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert remote.fs.requests["write"] == 13
    assert peak < 4 * PART_BYTES


def test_a_part_that_fails_begins_the_file_anew_and_shows_nothing_of_it(remote: Remote, tmp_path: Path) -> None:
    big = tmp_path / "big"
    data = RNG.bytes(3 * PART_BYTES)
    big.write_bytes(data)
    remote.fs.faults.append(RequestFault(kind="write", pattern="*/big", first=1, times=1, error=unavailable))
    remote.folder.send(big, "big")
    assert remote.fs.object_path("bucket/run/big").read_bytes() == data
    remote.fs.faults.append(RequestFault(kind="write", pattern="*/lost", first=1, times=None, error=unavailable))
    with pytest.raises(StorageError, match="cannot upload"):
        remote.folder.send(big, "lost")
    with pytest.raises(CheckpointError, match="cancelled"):
        remote.folder.send(big, "cancelled", Mock(side_effect=[None, CheckpointError("cancelled")]))
    assert list(remote.fs.objects()) == ["bucket/run/big"]


def test_remains_that_cannot_be_told_from_a_checkpoint_keep_their_lock(remote: Remote) -> None:
    save_id = new_save_id()
    lock, aside = (f"bucket/run/{working_name('step-00000001', kind, save_id)}" for kind in (LOCK, SET_ASIDE))
    upload_checkpoint(save_arrays(remote.local, ARRAYS, run_id="run"), URL, remote.options)
    remote.fs.put(lock, json.dumps({"host": "", "pid": 0, "run": "run", "since_s": 0}).encode())
    remote.fs.put(f"{aside}/zstore.json", remote.fs.object_path(f"{TAG}/zstore.json").read_bytes())
    remote.fs.faults.append(RequestFault(kind="read", pattern=f"{TAG}/zstore.json", times=6, error=unavailable))
    assert len(sweep(remote.folder, "run")) == 1
    assert lock in remote.fs.objects()
    assert sweep(remote.folder, "run") == []
    assert not any(parse_working_name(key.split("/")[2]) for key in remote.fs.objects())


def test_a_cancelled_save_ends_soon(remote: Remote, world: World) -> None:
    gate = threading.Event()
    remote.fs.faults.append(RequestFault(kind="write", pattern="*/c.*", times=None, gate=gate))
    handles = remote.begin(world)
    for handle in handles:
        handle.cancel()
    gate.set()
    for handle in handles:
        # Rank 0 may learn of the other's end before it looks whether it is to end itself.
        with pytest.raises((CheckpointError, RankError), match=r"cancelled|gave"):
            handle.wait(200)
    assert remote.tags() == []


def test_one_process_uploads_a_checkpoint_of_many_ranks(remote: Remote) -> None:
    path = save_arrays(remote.local, ARRAYS, world_size=3, small=SMALL)
    (path / "config.json").write_text("{}")
    sent: list[int] = []
    url, messages = upload_checkpoint(path, URL, remote.options, advance=sent.append)
    assert (url, messages) == (f"{URL}/step-00000001", [])
    assert remote.arrays() == content(ARRAYS)
    assert f"{TAG}/config.json" in remote.fs.objects()
    with pytest.raises(CheckpointExistsError):
        upload_checkpoint(path, URL, remote.options)
    assert upload_checkpoint(path, URL, remote.options, overwrite=True) == (url, [])
    assert remote.tags() == ["step-00000001"]
    with open_checkpoint(open_folder(url, remote.options)) as reader:  # by its own URL, wherever it lies
        assert reader.read_array("model/h.0.weight").tobytes() == ARRAYS["model/h.0.weight"].tobytes()
    assert open_checkpoint(path).path == path  # the local one stays


def test_an_upload_in_little_memory_sends_one_file_at_a_time(tmp_path: Path, remote: Remote) -> None:
    path = save_arrays(tmp_path / "kept", ARRAYS, world_size=2)
    upload_checkpoint(path, URL, remote.options, memory_bytes=32 * 2**20)
    assert remote.fs.most_at_once == 1
    assert remote.arrays() == content(ARRAYS)
    with pytest.raises(BudgetError, match=r"uploaded in parts of \d+, .* but 10000000 are available"):
        upload_checkpoint(path, URL, remote.options, memory_bytes=10**7, overwrite=True)


def test_rows_of_small_arrays_come_together_without_a_folder(remote: Remote, tmp_path: Path) -> None:
    """The files are those of a save into a folder."""
    arrays: dict[str, Array] = {
        "model/weight": RNG.standard_normal((300, 100)).astype(np.float32),
        "model/bias": RNG.standard_normal(9).astype(np.float32),
    }
    with open_world(arrays, world_size=5) as world:
        remote.save(world, few_files=True)
        world.save(tmp_path / "folder", few_files=True, run_id="run")
    expected = {
        f"bucket/run/{path.relative_to(tmp_path / 'folder')}": path.read_bytes()
        for path in (tmp_path / "folder").rglob("c.*")
    }
    found = {key for key in remote.fs.objects() if key.rpartition("/")[2].startswith("c.")}
    assert {key: remote.fs.object_path(key).read_bytes() for key in found} == expected
    with open_checkpoint(open_folder(URL, remote.options)) as reader:
        assert verify_checkpoint(reader) == []
        assert {name: reader.read_array(name).tobytes() for name in arrays} == content(arrays)
    assert list(remote.local.iterdir()) == []
