"""The seam to the operating system: counts are checked, transfers resumed, and every error says where."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from zstore.errors import DiskFullError, StorageError
from zstore.format import Bytes
from zstore.io import Files, OpenFile, make_slab
from zstore.testing.faults import Fault, FaultyFiles

SIZE = 64 * 1024


def pages(nbytes: int, seed: int = 0) -> Bytes:
    data = make_slab(nbytes)
    data[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return data


def write_new(files: Files, path: Path, data: Bytes) -> None:
    with files.opened(path, write=True, create=True) as file:
        files.allocate(file, data.size)
        files.write_from(file, data, 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.shard"


@pytest.mark.parametrize("direct", [True, False])
def test_what_is_written_is_read(path: Path, direct: bool) -> None:
    files, data = Files(direct=direct), pages(SIZE)
    write_new(files, path, data)
    out = make_slab(SIZE - 8192)
    with files.opened(path) as file:
        files.read_into(file, out, 4096)
    assert out.tobytes() == data[4096:-4096].tobytes()
    assert files.size(path) == SIZE
    assert path.read_bytes() == data.tobytes()


@pytest.mark.parametrize("most_bytes", [1, 511, 700, 5000])
def test_short_transfers_of_any_length_are_resumed_in_the_page_cache(path: Path, most_bytes: int) -> None:
    data = pages(8192)
    files = FaultyFiles(direct=False)
    files.inject(Fault(kind="write", times=3, most_bytes=most_bytes))
    files.inject(Fault(kind="read", times=3, most_bytes=most_bytes))
    write_new(files, path, data)
    out = make_slab(8192)
    with files.opened(path) as file:
        files.read_into(file, out, 0)
    assert out.tobytes() == data.tobytes() == path.read_bytes()
    assert files.operations.count("read") == files.operations.count("write") >= 2


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("length", [0, 100, 1000, 4096, 5000])
def test_a_file_that_ends_early_is_an_error_that_says_where(path: Path, length: int, direct: bool) -> None:
    files = Files(direct=direct)
    path.write_bytes(b"x" * length)
    out = make_slab(8192)
    with files.opened(path) as file, pytest.raises(StorageError, match=rf"the file ends after {length} bytes") as info:
        files.read_into(file, out, 0)
    assert (info.value.path, info.value.offset, info.value.nbytes) == (str(path), 0, 8192)


def test_a_write_that_does_not_move_is_an_error_not_a_loop(path: Path) -> None:
    class Stuck(Files):
        def _pwritev(self, file: OpenFile, data: Bytes, offset: int) -> int:
            return 0

    with Stuck().opened(path, write=True, create=True) as file, pytest.raises(StorageError, match="EIO"):
        Stuck().write_from(file, pages(4096), 0)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_an_error_carries_path_offset_size_and_errno(path: Path, kind: str) -> None:
    files, data = FaultyFiles(), pages(SIZE)
    write_new(files, path, data)
    # The first part goes through, so that the offset is that of the part that failed.
    files.inject(Fault(kind=kind, most_bytes=8192))
    files.inject(Fault(kind=kind, first=1, error_number=errno.EIO))
    transfer = files.read_into if kind == "read" else files.write_from
    with files.opened(path, write=True) as file, pytest.raises(StorageError) as info:
        transfer(file, data[:16384], 4096)
    error = info.value
    assert (error.path, error.offset, error.nbytes, error.errno) == (str(path), 12288, 8192, errno.EIO)
    assert isinstance(error, OSError)
    assert str(path) in str(error)
    assert "EIO" in str(error)
    assert not isinstance(error, DiskFullError)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("kind", ["allocate", "write", "fsync"])
def test_a_full_disk_is_its_own_error(path: Path, kind: str, number: int) -> None:
    files = FaultyFiles(faults=(Fault(kind=kind, error_number=number),))

    def make() -> None:
        with files.opened(path, write=True, create=True) as file:
            files.allocate(file, SIZE)
            files.write_from(file, pages(SIZE), 0)
            files.sync_data(file)

    with pytest.raises(DiskFullError) as info:
        make()
    assert info.value.errno == number
    assert info.value.path == str(path)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_space_that_cannot_be_reserved_is_made_by_truncation(path: Path, number: int) -> None:
    files = FaultyFiles(faults=(Fault(kind="allocate", error_number=number),))
    write_new(files, path, pages(SIZE))
    assert path.stat().st_size == SIZE


def test_a_missing_and_an_existing_file_are_errors(path: Path) -> None:
    files = Files()
    with pytest.raises(StorageError, match="cannot open the file") as info, files.opened(path):
        pass
    assert info.value.errno == errno.ENOENT
    write_new(files, path, pages(4096))
    with pytest.raises(StorageError, match="EEXIST"), files.opened(path, write=True, create=True):
        pass


def test_no_descriptor_is_left_open(path: Path) -> None:
    files = FaultyFiles()
    write_new(files, path, pages(4096))
    before = len(os.listdir("/proc/self/fd"))
    files.inject(Fault(kind="read", error_number=errno.EIO))
    with pytest.raises(StorageError), files.opened(path) as file:
        files.read_into(file, make_slab(4096), 0)
    with pytest.raises(StorageError, match="cannot open the file"), RefusingFiles(errno.EMFILE).opened(path):
        pass
    with RefusingFiles(errno.EINVAL).opened(path) as file:
        Files().read_into(file, make_slab(4096), 0)
    assert len(os.listdir("/proc/self/fd")) == before


class RefusingFiles(Files):
    """A file system that refuses O_DIRECT, as tmpfs did before Linux 6.6."""

    def __init__(self, error_number: int = errno.EINVAL) -> None:
        super().__init__()
        self._error_number = error_number

    def _make_direct(self, fd: int) -> None:
        raise OSError(self._error_number, os.strerror(self._error_number))


def test_a_file_system_that_refuses_direct_io_is_served_buffered_and_reported_once(tmp_path: Path) -> None:
    files, data = RefusingFiles(), pages(SIZE)
    for name in ("a", "b"):
        with files.opened(tmp_path / name, write=True, create=True) as file:
            assert not file.direct
            files.write_from(file, data[1:], 3)
        assert (tmp_path / name).read_bytes()[3:] == data[1:].tobytes()
    assert len(files.fallbacks) == 1
    assert str(tmp_path) in files.fallbacks[0]
    assert "refuses O_DIRECT" in files.fallbacks[0]


def test_what_fails_with_names_is_a_storage_error_with_the_path(tmp_path: Path) -> None:
    files = Files()
    missing = tmp_path / "missing"
    (tmp_path / "file").write_bytes(b"")
    for act in (
        lambda: files.rename(missing, tmp_path / "b"),
        lambda: files.sync_folder(missing),
        lambda: files.write_small(missing / "a", b"x"),
        lambda: files.make_folder(tmp_path / "file" / "x"),
        lambda: files.unlink(tmp_path),
        lambda: files.remove_tree(tmp_path / "file"),
    ):
        with pytest.raises(StorageError) as info:
            act()
        assert info.value.path is not None
        assert info.value.path.startswith(str(tmp_path))
        assert info.value.errno is not None
    with pytest.raises(FileNotFoundError):
        files.size(missing)
    with pytest.raises(FileNotFoundError):
        files.link(missing, tmp_path / "b")


def test_an_error_that_is_a_storage_error_has_python_s_fields() -> None:
    error = StorageError("cannot read", path="/x", offset=3, nbytes=4, errno=errno.EIO, rank=2)
    assert str(error) == "cannot read: Input/output error [EIO] (path=/x, offset=3, bytes=4, rank=2)"
    assert error.errno == errno.EIO
