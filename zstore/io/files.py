"""File operations: the only module through which zstore accesses a disk.

[Note: test doubles]
All other code calls `Files`. A test double (`zstore.testing.faults`) overrides the primitives at the end of the class, to
inject short transfers and errors below the code that must resume or report them.

[Note: one flush for many files]
For small files, flushes cost more than writes. `syncfs` makes durable everything that any process of the machine has written
to a file system: files, their names and folders. It also writes other programs' data in the page cache, so it is used only
if there is little. It reports errors of all writes since its descriptor was opened (Linux 5.8 and later), so the descriptor
is opened before the first file is written. Only local file systems of one machine are known to guarantee this.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

import numpy as np

from ..errors import DiskFullError, StorageError, UsageError, storage_error
from ..format.arrays import Bytes
from ..format.shardfile import ScatteredMemory
from .memory import make_slab

with contextlib.suppress(ImportError):  # Windows, where no transfer bypasses the page cache
    import fcntl

UserPath = str | os.PathLike[str]
"""A path, or where accepted a URL, from the user. A relative path refers to the working directory at the time of the call,
so every public function converts its paths once, with `user_path` or `user_location`."""
_URL = re.compile(r"\A[A-Za-z][A-Za-z0-9+.-]*(::|://)")

Kind = Literal[
    "open", "read", "write", "allocate", "fsync", "link", "rename", "unlink", "make_folder", "remove_tree", "sync_folder",
    "syncfs", "write_small",
]  # fmt: skip
"""Names of the operations; `write_small` counts as one, though it opens, writes and syncs a file."""

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
LARGE_BYTES = 1024 * 1024
"""Larger files bypass the page cache even if no caller waits until they are durable."""
_MAX_DIRTY_BYTES = 32 * 1024 * 1024
_LOCAL_FILE_SYSTEMS = ("ext4", "xfs")
_MIN_KERNEL = (5, 8)
_SYNC_CALL = "syncfs"
# Errors of file systems without direct I/O, links or preallocation.
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY)


def is_url(location: UserPath) -> bool:
    """Return whether it is a URL, such as `s3://bucket/run`, rather than a path."""
    return isinstance(location, str) and _URL.match(location) is not None


def user_path(path: UserPath) -> Path:
    """Return an absolute path, relative to the current working directory, with `~` and `~USER` expanded and without `..`.

    Symbolic links are kept, except those before a `..`. Raises UsageError for other types, and for an unknown user.
    """
    value: object = path
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise UsageError(f"expected a path as text or pathlib.Path, got {path!r}")
    absolute = Path(os.path.expanduser(text))
    if text.startswith("~") and absolute == Path(text):
        home = Path(text).parts[0]
        raise UsageError(
            f"{text}: there is no home folder for {home}: write an absolute path, for a folder of that name {Path.cwd() / text}"
        )
    absolute = absolute.absolute()
    if ".." in absolute.parts:
        depth = len(absolute.parts) - absolute.parts[::-1].index("..")
        absolute = Path(*absolute.parts[:depth]).resolve().joinpath(*absolute.parts[depth:])
    return absolute


def user_location(location: UserPath) -> str:
    """Return a URL unchanged, and a path as `user_path` does."""
    return str(location) if is_url(location) else str(user_path(location))


@dataclass(frozen=True)
class OpenFile:
    """A descriptor, and whether its transfers bypass the page cache (memory and offsets are then multiples of 512)."""

    fd: int
    path: str
    direct: bool


class Files:
    """Reads, writes, renames and removes files; every failure is a StorageError with path, offset, size and errno.

    `direct=False` keeps all transfers in the page cache. File systems that refuse O_DIRECT get buffered transfers,
    with the same bytes, and are named in `fallbacks`.
    """

    def __init__(self, *, direct: bool = True) -> None:
        self.direct = direct and _O_DIRECT != 0
        """Whether transfers bypass the page cache if the file system allows it."""
        self.supports_scattered = True
        """Whether `ScatteredMemory` is transferred without a copy; false once a drive has required larger alignment."""
        self.max_dirty_bytes = _MAX_DIRTY_BYTES
        """Maximum bytes of dirty page cache with which a whole file system is flushed."""
        self._buffered_devices: set[int] = set()
        self.fallbacks: list[str] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def opened(
        self, path: str | Path, *, write: bool = False, create: bool = False, direct: bool = True
    ) -> Iterator[OpenFile]:
        """Open `path`, bypassing the page cache if the file system allows it (unless `direct` is false), and close it at the
        end.

        `create` creates a new file, and fails if one exists.
        """
        flags = (os.O_RDWR if write else os.O_RDONLY) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        name = os.fspath(path)
        fd, direct = self._open_probed(name, flags, direct)
        try:
            yield OpenFile(fd, name, direct)
        finally:
            os.close(fd)

    def _open_probed(self, name: str, flags: int, direct: bool) -> tuple[int, bool]:
        try:
            fd = self._open(name, flags)
        except OSError as error:
            raise storage_error(error, "cannot open the file", path=name) from error
        try:
            return fd, direct and self.direct and self._try_direct(fd, name)
        except BaseException:
            os.close(fd)
            raise

    def _try_direct(self, fd: int, name: str) -> bool:
        """Let the transfers of `fd` bypass the page cache; return whether the file system supports that."""
        if self._buffered_devices and os.fstat(fd).st_dev in self._buffered_devices:
            return False
        try:
            self._make_direct(fd)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise storage_error(error, "cannot open the file", path=name) from error
            device = os.fstat(fd).st_dev
            with self._lock:
                if device not in self._buffered_devices:
                    self._buffered_devices.add(device)
                    folder = os.path.dirname(name)
                    self.fallbacks.append(f"{folder}: the file system refuses O_DIRECT; transfers are buffered")
            return False
        return True

    def read_into(self, file: OpenFile, out: Bytes | ScatteredMemory, offset: int) -> None:
        """Fill `out` from `offset` on; short reads are resumed. Raises StorageError if the file is too short."""
        self._transfer(file, out, offset, write=False)

    def write_from(self, file: OpenFile, data: Bytes | ScatteredMemory, offset: int) -> None:
        """Write all of `data` at `offset`; short writes are resumed."""
        self._transfer(file, data, offset, write=True)

    def _transfer(self, file: OpenFile, data: Bytes | ScatteredMemory, offset: int, *, write: bool) -> None:
        try:
            self._move(file, data, offset, write=write)
        except StorageError as error:
            needs_contiguous = file.direct and error.errno == errno.EINVAL  # it requires larger alignment
            if not isinstance(data, ScatteredMemory) or not needs_contiguous:
                raise
            self.supports_scattered = False
            contiguous = make_slab(data.size)
            if write:
                data.copy_into(contiguous)
            self._move(file, contiguous, offset, write=write)
            if not write:
                data.fill(contiguous)

    def _move(self, file: OpenFile, data: Bytes | ScatteredMemory, offset: int, *, write: bool) -> None:
        transfer, done = self._pwritev if write else self._preadv, 0
        while done < data.size:
            try:
                count = transfer(file, data[done:], offset + done)
                if write and count == 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            except OSError as error:
                problem = "cannot write" if write else "cannot read"
                raise storage_error(
                    error, problem, path=file.path, offset=offset + done, nbytes=data.size - done
                ) from error
            if count == 0:
                raise StorageError(
                    f"the file ends after {offset + done} bytes, expected at least {offset + data.size}",
                    path=file.path,
                    offset=offset,
                    nbytes=data.size,
                )
            done = _resume_at(done, count, data.size, file.direct)

    def allocate(self, file: OpenFile, nbytes: int) -> None:
        """Reserve `nbytes` for the file, so that a full disk is reported now and not by a later write."""
        if nbytes == 0:
            return
        try:
            self._do("allocate", file.path, partial(_reserve, file.fd, nbytes))
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise storage_error(error, "cannot reserve space", path=file.path, nbytes=nbytes) from error
            os.ftruncate(file.fd, nbytes)

    def sync_data(self, file: OpenFile) -> None:
        """Make the file's data durable."""
        self._run("fsync", "cannot make the file durable", file.path, partial(_sync_data, file.fd))

    def sync_file(self, path: str | Path) -> None:
        """Make the data of a closed file durable; it may be read-only."""
        with self.opened(path, direct=False) as file:
            self.sync_data(file)

    def size(self, path: str | Path) -> int:
        """Return the file's size; raises FileNotFoundError if it is missing."""
        return os.stat(path).st_size

    def link(self, source: str | Path, target: str | Path) -> None:
        """Create the hard link `target`. Raises OSError, upon which callers fall back to a copy."""
        self._do("link", os.fspath(source), partial(os.link, source, target))

    def rename(self, source: str | Path, target: str | Path) -> None:
        """Rename; `target` must not exist, or be a file (which is then replaced)."""
        self._run("rename", f"cannot rename to {os.fspath(target)}", source, partial(os.rename, source, target))

    def unlink(self, path: str | Path) -> None:
        """Remove the file; a missing file is not an error."""
        self._run("unlink", "cannot remove the file", path, partial(os.unlink, path), missing_ok=True)

    def make_folder(self, path: str | Path) -> None:
        """Create the folder and its parents; an existing folder is not an error."""
        self._run("make_folder", "cannot create the folder", path, partial(_make_folder, path))

    def remove_tree(self, path: str | Path) -> None:
        """Remove the folder and its content; a missing folder is not an error."""
        self._run("remove_tree", "cannot remove the folder", path, partial(shutil.rmtree, path), missing_ok=True)

    def sync_folder(self, path: str | Path) -> None:
        """Make the entries of the folder durable (a no-op if folders cannot be opened)."""
        if hasattr(os, "O_DIRECTORY"):
            self._run("sync_folder", "cannot make the folder durable", path, partial(_sync_folder, path))

    def sync_filesystem(self, path: str | Path, operation: Callable[[], object]) -> None:
        """Make the whole file system of `path` durable by `operation`; see `Flush`."""
        self._run("syncfs", "cannot make the file system durable", path, operation)

    def _run(
        self, kind: Kind, problem: str, path: str | Path, operation: Callable[[], object], *, missing_ok: bool = False
    ) -> None:
        """Run an operation on `path`; if it fails, raise a StorageError that says so."""
        try:
            self._do(kind, os.fspath(path), operation)
        except OSError as error:
            if not (missing_ok and isinstance(error, FileNotFoundError)):
                raise storage_error(error, problem, path=os.fspath(path)) from error

    def write_small(self, path: str | Path, data: bytes, *, sync: bool = True) -> None:
        """Write a small file through the page cache, durable when this returns unless `sync` is false."""
        name = os.fspath(path)
        try:
            fd = self._open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise storage_error(error, "cannot create the file", path=name) from error
        try:
            file = OpenFile(fd, name, False)
            self.write_from(file, np.frombuffer(data, dtype=np.uint8), 0)
            if sync:
                self.sync_data(file)
        finally:
            os.close(fd)

    def free_bytes(self, path: str | Path) -> int:
        """Return the free bytes that an ordinary user may write to the path's file system."""
        return shutil.disk_usage(path).free

    def require_room(
        self, path: str | Path, nbytes: int, need: str, advice: str = "make room, or write elsewhere"
    ) -> None:
        """Raise DiskFullError unless `nbytes` are free on the path's file system; `need` starts the message."""
        free = self.free_bytes(path)
        if nbytes > free:
            raise DiskFullError(f"{need}, but only {free} are free: {advice}", path=os.fspath(path), nbytes=nbytes)

    def _open(self, path: str, flags: int) -> int:
        return os.open(path, flags, 0o666)

    def _make_direct(self, fd: int) -> None:
        # Not by reopening the file, which would take two more calls, each of which releases the GIL.
        fcntl.fcntl(fd, fcntl.F_SETFL, _O_DIRECT)

    def _preadv(self, file: OpenFile, out: Bytes | ScatteredMemory, offset: int) -> int:
        return os.preadv(file.fd, _views(out), offset)

    def _pwritev(self, file: OpenFile, data: Bytes | ScatteredMemory, offset: int) -> int:
        return os.pwritev(file.fd, _views(data), offset)

    def _do(self, kind: Kind, path: str, operation: Callable[[], object]) -> None:
        operation()


def make_read_only(path: str | Path) -> None:
    """Remove everyone's write permission; read permissions stay as created, by the process's umask."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o222:
        os.chmod(path, mode & ~0o222)


def _make_folder(path: str | Path) -> None:
    # Not `os.makedirs`, which first checks every parent folder.
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    except FileNotFoundError:
        os.makedirs(path, exist_ok=True)


def _views(data: Bytes | ScatteredMemory) -> Sequence[memoryview]:
    return data.views if isinstance(data, ScatteredMemory) else [data.data]


def _reserve(fd: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
    else:
        os.ftruncate(fd, nbytes)


def _sync_data(fd: int) -> None:
    os.fdatasync(fd) if hasattr(os, "fdatasync") else os.fsync(fd)


def _sync_folder(path: str | Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class NewFile:
    """A new file `path`, written sequentially in pieces of any size, and closed with `opened`. It goes through the page cache,
    so pieces need no alignment."""

    def __init__(self, files: Files, path: str | Path, opened: contextlib.ExitStack) -> None:
        self._files = files
        self._file: OpenFile = opened.enter_context(files.opened(path, write=True, create=True, direct=False))
        self.offset = 0
        """Bytes written so far."""

    def write(self, data: bytes | bytearray | Bytes) -> None:
        """Append data."""
        part = np.frombuffer(data, np.uint8) if isinstance(data, bytes | bytearray) else data
        self._files.write_from(self._file, part, self.offset)
        self.offset += part.size

    def patch(self, offset: int, data: bytes) -> None:
        """Overwrite bytes that were written before."""
        self._files.write_from(self._file, np.frombuffer(data, np.uint8), offset)

    def finish(self) -> None:
        """Make the file durable."""
        self._files.sync_data(self._file)


def _resume_at(done: int, count: int, size: int, direct: bool) -> int:
    """Return the offset to continue from. A direct transfer must resume aligned, so a few bytes are transferred twice."""
    after = done + count
    if direct and after < size:
        aligned = after // 512 * 512
        return aligned if aligned > done else after
    return after


class Flush:
    """Makes everything durable that is written to the file system of `folder` between its creation and `sync`. Close it at
    the end; `Flush.of` returns None if this is not supported."""

    def __init__(self, files: Files, folder: str | Path) -> None:
        self._files = files
        self._folder = folder
        self._fd = os.open(folder, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    @classmethod
    def of(cls, files: Files, folder: str | Path) -> Flush | None:
        """Return a flush for `folder`; None if its files should be made durable one by one."""
        with contextlib.suppress(OSError):  # no /proc, or a removed folder: a write to it will fail
            if _sync_call() and _is_local(os.stat(folder).st_dev) and _num_dirty_bytes() <= files.max_dirty_bytes:
                return cls(files, folder)
        return None

    def sync(self) -> None:
        """Make everything durable that any process of this machine has written to the file system."""
        self._files.sync_filesystem(self._folder, partial(_syncfs, self._fd))

    def close(self) -> None:
        """Close the file system's descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _syncfs(fd: int) -> None:
    call = getattr(ctypes.CDLL(None, use_errno=True), _SYNC_CALL)
    if call(fd) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


@cache
def _sync_call() -> bool:
    """Return whether this system's `syncfs` reports errors of earlier writes."""
    if not hasattr(os, "uname") or os.uname().sysname != "Linux":
        return False
    match = re.match(r"(\d+)\.(\d+)", os.uname().release)
    with contextlib.suppress(OSError):
        return (
            match is not None
            and tuple(map(int, match.groups())) >= _MIN_KERNEL
            and hasattr(ctypes.CDLL(None), _SYNC_CALL)
        )
    return False


@cache
def _is_local(device: int) -> bool:
    """Return whether `device` has a file system used only by this machine."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        mounts = (line.split() for line in file)
        return any(mount[2] == number and mount[mount.index("-") + 1] in _LOCAL_FILE_SYSTEMS for mount in mounts)


def _num_dirty_bytes() -> int:
    """Return the bytes in the page cache that have not been written to drives yet."""
    with open("/proc/meminfo", "rb") as file:
        sizes = dict(re.findall(rb"^(Dirty|Writeback):\s+(\d+) kB", file.read(), re.MULTILINE))
    return 1024 * sum(map(int, sizes.values()))
