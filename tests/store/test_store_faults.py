"""Store when something is wrong: the disk, the folder, the caller; and its end."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.store.stores import create
from zstore.errors import ConfigError, DiskFullError, RunFolderError, StorageError, UsageError
from zstore.format import ArraySpec, make_grid
from zstore.io import Files
from zstore.store import Store, StoreOptions
from zstore.store.options import RunFolder
from zstore.store.store import _completions
from zstore.testing.faults import Fault, FaultyFiles
from zstore.testing.oracle import same_bits

TIERS = ("device", "host", "disk")


def test_a_full_disk_in_the_middle_of_a_pass(store: Store, files: FaultyFiles) -> None:
    values = create(store, "disk", (4_000_000,))
    store.write("model/w", values).wait()
    files.inject(Fault(kind="write", first=1, times=None, error_number=errno.ENOSPC))

    def update() -> None:
        for tile in store.tiles([["model/w"]]):
            tile.views[0][:] = 0

    with pytest.raises(DiskFullError):
        update()
    files.heal()
    # Never a wrong number afterwards.
    for act in (lambda: store.read("model/w").wait(), store.snapshot, update):
        with pytest.raises(UsageError, match="failed partway"):
            act()
    store.write("model/w", values).wait()
    assert same_bits(store.read("model/w").wait(), values)


def test_a_store_that_cannot_be_made_holds_nothing(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(UsageError, match="at least one thread"):
        Store(StoreOptions(run_path=tmp_path, num_threads=0))
    assert threading.active_count() == before
    Store(StoreOptions(run_path=tmp_path)).close()


Call = Callable[[], object]


def wrong_calls(store: Store) -> list[tuple[Call, str]]:
    """Calls that make no sense, with a part of what they are told: of `model/w` [600, 1000], half of `model/ten` [10],
    `model/a`, `model/b` [10] and `model/c` [11].
    """
    spec, numel = ArraySpec(name="model/x", shape=(10, 3), dtype="float32"), store.local("model/ten").valid_numel
    zeros, locked = partial(np.zeros, dtype=np.float32), np.zeros(numel, np.float32)
    locked.flags.writeable = False

    def create_x(rows: tuple[int, ...] = (10, 3), shard: int = 0, tier: Any = "host") -> Call:
        return lambda: store.create(spec, grid=make_grid(rows, 2), shard=shard, tier=tier)

    found: list[tuple[Call, str]] = [
        (lambda: create(store, "host"), "'model/w' already exists"),
        (create_x(tier="nvme"), "expected one of device, host, pinned, disk as tier, got 'nvme'"),
        (create_x(shard=-1), "10 rows of 3 elements, got shard -1"),
        (create_x(rows=(30,)), "of a grid of 30 rows of 1"),
    ]
    outside = f"are not in a shard of {numel}"
    data = [np.zeros(5), zeros((5, 1)), torch.zeros(5, dtype=torch.bfloat16), torch.zeros(5, 1)]
    found += [(partial(store.write, "model/w", each), "'model/w': expected 1-D float32") for each in data]
    writes = [(-1, 2), (numel, 1), (0, numel + 1)]
    found += [(partial(store.write, "model/ten", zeros(size), first), outside) for first, size in writes]
    reads = [(-1, 2), (3, 2), (0, numel + 1)]
    found += [(partial(store.read, "model/ten", *each), outside) for each in reads]
    targets, words = (
        (np.zeros(numel), zeros(numel + 1), zeros((numel, 1)), locked),
        "contiguous, writable elements of float32",
    )
    found += [(partial(store.read, "model/ten", out=out), f"expected {numel} {words}") for out in targets]
    named: list[Callable[[str], object]] = [store.read, store.spec, store.tier, store.local, store.remove, store.memory]
    named += [store.get, store.delete, store.tier_of, lambda x: store.adopt(x, Path(), []), lambda x: store.stream([x])]
    named += [lambda x: store.write(x, zeros(1)), lambda x: store.tiles([[x]]), lambda x: store.snapshot([x])]
    named += [lambda x: store.move(x, tier="host"), lambda x: store.changing([x]).__enter__()]
    found += [(partial(each, "model/x"), "the store has no array 'model/x'; it has 5, for example") for each in named]
    groups = [[[]], [["model/a", "model/a"]], [["model/a"], ["model/a"]]]
    found += [(partial(store.tiles, each), "visits each array once") for each in groups]
    return [*found, (partial(store.tiles, [["model/a", "model/c"]]), "share one layout")]


def test_what_makes_no_sense_is_refused_and_changes_nothing(store: Store) -> None:
    create(store, "host")
    create(store, "disk", (10,), name="model/ten", world_size=2, shard=0)
    for name, shape in (("model/a", (10,)), ("model/b", (10,)), ("model/c", (11,))):
        create(store, "host", shape, name=name)
    before = store.names()
    for call, words in wrong_calls(store):
        with pytest.raises(KeyError if "no array" in words else UsageError, match=words):
            call()
    with pytest.raises(ValueError, match="rewrite"):
        store.tiles([["model/a"]], "rewrite")  # type: ignore[arg-type]
    assert list(store.tiles([])) == []
    assert store.names() == before


def test_a_store_without_a_run_path_has_no_disk() -> None:
    with Store(StoreOptions()) as store:
        with pytest.raises(UsageError, match="no disk tier; open it with a path"):
            create(store, "disk")
        values = create(store, "host")
        store.write("model/w", values).wait()
        assert same_bits(store.read("model/w").wait(), values)


def test_a_closed_store_refuses_calls(tmp_path: Path) -> None:
    store = Store(StoreOptions(run_path=tmp_path))
    values = create(store, "disk")
    ticket = store.write("model/w", values)
    store.close()
    store.close()
    ticket.wait(0)
    store.remove("model/w")  # nothing to remove, nor of a name that never was
    store.remove("model/never")
    assert store.names() == ["model/w"]
    for act in (
        lambda: store.write("model/w", values),
        lambda: store.read("model/w"),
        lambda: store.tiles([["model/w"]]),
        lambda: create(store, "host", name="model/x"),
        store.snapshot,
        store.flush,
    ):
        with pytest.raises(UsageError, match="closed"):
            act()
    assert list(tmp_path.rglob("*.shard")) == []
    assert store.statistics().disk_write_bytes > 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("tier", "then"), [("host", "close"), ("device", "close"), ("host", "exit"), ("host", "save")])
def test_a_snapshot_that_is_never_released_does_not_hold_up_the_end(tier: str, then: str, tmp_path: Path) -> None:
    store = Store(StoreOptions())
    values = create(store, tier)
    store.snapshot()
    ticket = store.write("model/w", values)
    saved = store.checkpoint(tmp_path / "ckpt") if then == "save" else ticket
    if then == "exit":
        store._finalizer()
    for end in (store.close, ticket.wait, saved.wait):
        with pytest.raises(UsageError, match="closed while a change waited for a snapshot"):
            end()


@pytest.mark.timeout(60)
def test_calls_without_a_thread_say_so_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(("zstore-checkpoint", "zstore-passes")):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with Store(StoreOptions()) as store:
        values = create(store, "host")
        for call in (lambda: store.checkpoint(tmp_path / "ckpt"), store.flush):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                call()
        store.write("model/w", values).wait()  # which a pin would hold up
    assert not _completions._running


def test_close_gives_everything_back(tmp_path: Path) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with Store(StoreOptions(run_path=tmp_path)) as store:
        values = create(store, "disk")
        store.write("model/w", values)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_statistics_count_the_bytes_of_each_tier(store: Store) -> None:
    for tier in TIERS:
        values = create(store, tier, name=f"model/{tier}")
        store.write(f"model/{tier}", values).wait()
        store.read(f"model/{tier}").wait()
    found = store.statistics()
    assert found.device_bytes == found.host_bytes == found.disk_bytes == 2_400_000
    for moved in (found.disk_read_bytes, found.disk_write_bytes):
        assert 2_400_000 <= moved <= 2_400_000 * 1.06
    assert 0 < found.pool_peak_bytes <= found.pool_bytes
    assert found.fallbacks == ()


HOLD = """
import sys
from zstore.io.files import Files
from zstore.store.options import RunFolder
folder = RunFolder(sys.argv[1], int(sys.argv[2]), Files())
(folder.path / "left.0.shard").write_bytes(b"x" * 100)
print("held", flush=True)
sys.stdin.read()
"""


def hold(path: Path, rank: int = 0) -> subprocess.Popen[str]:
    """A process that holds the folder until its standard input is closed or it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str], *, kill: bool) -> None:
    if kill:
        process.kill()
    process.communicate()


def test_a_missing_folder_is_made_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder(tmp_path / "made" / "below", 0, Files())
    assert (tmp_path / "made" / "below").is_dir()
    assert f"created {tmp_path}/made/below, which did not exist" in caplog.text
    folder.close()


def test_a_folder_that_cannot_serve_is_an_error_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("relative", "./x", "", "~/x"):
        with pytest.raises(ConfigError, match="nvme_path: expected an absolute path"):
            RunFolder(path, 0, Files())
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunFolderError, match="expected a folder, or one that can be created") as info:
            RunFolder(place, 0, Files())
        assert info.value.path == str(place)
        assert isinstance(info.value, StorageError)
    for number in (errno.EACCES, errno.EROFS, errno.ENOSPC):
        files = FaultyFiles(faults=(Fault(kind="make_folder", error_number=number),))
        with pytest.raises(RunFolderError, match="the folder cannot be written") as info:
            RunFolder(tmp_path, 3, files)
        assert (info.value.path, info.value.errno, info.value.rank) == (str(tmp_path), number, 3)

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RunFolderError, match="cannot be locked") as info:
        RunFolder(tmp_path, 0, Files())
    assert info.value.errno == errno.ENOLCK


def test_a_second_run_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    process = hold(tmp_path)
    try:
        with pytest.raises(RunFolderError, match=rf"another run holds this folder \(process {process.pid} on "):
            RunFolder(tmp_path, 0, Files())
        RunFolder(tmp_path, 1, Files()).close()
        assert (tmp_path / "zstore-run" / "rank-00000" / "left.0.shard").exists()
    finally:
        end(process, kill=False)


@pytest.mark.parametrize("kill", [True, False])
def test_what_a_dead_run_left_is_swept_by_the_next_and_only_that(tmp_path: Path, kill: bool) -> None:
    end(hold(tmp_path), kill=kill)
    path = tmp_path / "zstore-run" / "rank-00000"
    assert (path / "left.0.shard").exists()
    for other in (path / "notes.txt", tmp_path / "b.0.shard"):
        other.write_bytes(b"")
    RunFolder(tmp_path, 0, Files()).close()
    assert sorted(p.name for p in path.iterdir()) == ["notes.txt", "owner"]
    assert (tmp_path / "b.0.shard").exists()


def test_stores_of_one_process_may_share_a_folder_and_what_a_killed_one_left_beside_is_swept(tmp_path: Path) -> None:
    base = tmp_path / "zstore-run"
    left = base / "rank-00000-2"
    left.mkdir(parents=True)
    for name in ("owner", "a.0.shard"):
        (left / name).write_bytes(b"")
    with ExitStack() as held:
        folders = [RunFolder(tmp_path, 0, Files(), shares=True)]
        held.callback(folders[0].close)
        assert not left.exists()
        with pytest.raises(RunFolderError, match="another run holds"):
            RunFolder(tmp_path, 0, Files())
        for _ in range(2):
            folders.append(RunFolder(tmp_path, 0, Files(), shares=True))
            held.callback(folders[-1].close)
        names = [folder.path.name for folder in folders]
        assert names == ["rank-00000", "rank-00000-2", "rank-00000-3"]
        assert [folder.is_first for folder in folders] == [True, False, False]
    assert [path.name for path in base.iterdir()] == ["rank-00000"]
