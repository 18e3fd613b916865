"""The run folder: one owner at a time, and what a killed one left is swept."""

import errno
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from zstore.errors import ConfigError, RunFolderError, StorageError
from zstore.io.files import Files
from zstore.store.runfolder import RunFolder
from zstore.testing.faults import Fault, FaultyFiles

HOLD = """
import sys
from zstore.io.files import Files
from zstore.store.runfolder import RunFolder
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
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str], *, kill: bool) -> None:
    if kill:
        process.kill()
    process.communicate()


@pytest.mark.parametrize("path", ["relative", "./x", "", "~/x"])
def test_a_relative_path_is_a_configuration_error(path: str) -> None:
    with pytest.raises(ConfigError, match="nvme_path: expected an absolute path"):
        RunFolder(path, 0, Files())


def test_a_missing_folder_is_made_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder(tmp_path / "made" / "below", 0, Files())
    assert (tmp_path / "made" / "below").is_dir()
    assert f"made {tmp_path}/made/below, which was not there" in caplog.text
    folder.close()


def test_a_file_in_place_of_the_folder_is_an_error_that_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunFolderError, match="expected a folder, or one that can be made") as info:
            RunFolder(path, 0, Files())
        assert info.value.path == str(path)
        assert isinstance(info.value, StorageError)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, number: int) -> None:
    files = FaultyFiles(faults=(Fault(kind="make_folder", error_number=number),))
    with pytest.raises(RunFolderError, match="the folder cannot be written") as info:
        RunFolder(tmp_path, 3, files)
    assert (info.value.path, info.value.errno, info.value.rank) == (str(tmp_path), number, 3)


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
def test_what_a_dead_run_left_is_swept_by_the_next(tmp_path: Path, kill: bool) -> None:
    end(hold(tmp_path), kill=kill)
    left = tmp_path / "zstore-run" / "rank-00000" / "left.0.shard"
    assert left.exists()
    folder = RunFolder(tmp_path, 0, Files())
    assert not left.exists()
    folder.close()


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


def test_only_our_files_are_swept(tmp_path: Path) -> None:
    path = tmp_path / "zstore-run" / "rank-00000"
    path.mkdir(parents=True)
    for name in ("a.3.shard", "notes.txt"):
        (path / name).write_bytes(b"")
    (tmp_path / "b.0.shard").write_bytes(b"")
    RunFolder(tmp_path, 0, Files()).close()
    assert sorted(p.name for p in path.iterdir()) == ["notes.txt", "owner"]
    assert (tmp_path / "b.0.shard").exists()


def test_a_file_system_without_locks_is_an_error_that_names_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RunFolderError, match="cannot be locked") as info:
        RunFolder(tmp_path, 0, Files())
    assert info.value.errno == errno.ENOLCK
