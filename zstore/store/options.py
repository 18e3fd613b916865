"""How a store uses this rank's host memory and disks: options, statistics, and run folders.

[Note: run folders]
Where one rank keeps the files of its disk tier, owned by one process at a time.

    <nvme_path>/zstore-run/rank-00000/owner     locked while its owner lives; its text names that process
    <nvme_path>/zstore-run/rank-00000/*.shard   files of the disk tier
    <nvme_path>/zstore-run/rank-00000-2/        the same for a second store of that process, if stores may share

The lock ends with the process, so a killed run leaves none. Its files are not needed (an update may have been interrupted),
and the next owner removes them: checkpoints have separate links.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from ..errors import ConfigError, RunFolderError
from ..io.files import Files
from ..io.queue import QueueStatistics

try:
    import fcntl
except ImportError:  # Windows: training does not run there
    fcntl = None  # type: ignore[assignment]

DEFAULT_POOL_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How a store uses this rank's host memory and disk."""

    run_path: Path | None = None
    """Absolute folder on the drive for swap files (`nvme_path`); None: no disk tier."""
    other_paths: tuple[Path, ...] = ()
    """Folders on further drives: shards are spread over all of them, the next one to the drive with the fewest bytes."""
    group_paths: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    """Folders that shards are spread over instead, by the first part of an array's name, as "parameter"."""
    shares_folders: bool = False
    """Another store of this process may use the same folders, each with separate files. Otherwise that is an error."""
    reserves: bool = True
    """Disk space of an array is reserved at creation; else by writing its first values, in fewer requests to the drive."""
    host_budget_bytes: int | None = None
    """Bytes of host memory for buffers and host-tier state of this rank; None: buffers of 128 MiB, state unlimited."""
    max_pool_bytes: int = DEFAULT_POOL_BYTES
    """Bytes of transfer buffers; at most half of the budget, and by default an eighth, but at least 64 MiB."""
    num_threads: int = 8
    """I/O threads."""
    queue_depth: int = 64
    """Operations that may wait for a thread."""
    block_bytes: int = 4 * 1024 * 1024
    """Bytes of one request to the disk, about."""
    verify: bool = True
    """Check the crc32c of every chunk that is read from disk."""
    device: str = "cpu"
    """Torch device of the device tier."""
    pin_buffers: bool = False
    """Register transfer buffers with CUDA; if that fails, the store's `fallbacks` say so."""
    pin_state: bool = False
    """Register arrays of tier "pinned" with CUDA, likewise."""

    @property
    def all_paths(self) -> tuple[Path, ...]:
        """Return the folders of all drives, each once."""
        first = () if self.run_path is None else (self.run_path,)
        others = (path for paths in self.group_paths.values() for path in paths)
        return tuple(dict.fromkeys((*first, *self.other_paths, *others)))

    @property
    def pool_bytes(self) -> int:
        """Bytes of transfer buffers; see `max_pool_bytes`."""
        most, budget_bytes = self.max_pool_bytes, self.host_budget_bytes
        if budget_bytes is None:
            return most
        if most == DEFAULT_POOL_BYTES:  # state in memory gains more from what they leave
            most = min(most, max(most // 2, budget_bytes // 8))
        return min(most, budget_bytes // 2)

    @property
    def span_bytes(self) -> int:
        """Bytes of one request as the pool allows: a small pool has room for several."""
        return min(self.block_bytes, self.pool_bytes // 12)


@dataclass(frozen=True, kw_only=True)
class StoreStatistics:
    """The store's contents, and its work since it was opened."""

    disk_read_bytes: int
    disk_write_bytes: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    pool_bytes: int
    pool_peak_bytes: int
    read_wait_s: float
    write_wait_s: float
    pool_wait_s: float
    pin_wait_s: float
    pinned_bytes: int
    """Bytes of buffers and state in host memory that are registered with CUDA."""
    queue: QueueStatistics
    fallbacks: tuple[str, ...]


_log = logging.getLogger("zstore")

RUN_FOLDER = "zstore-run"
"""The folder of all files of a run, in the given folder."""
_OWNER = "owner"
_PROCESS = uuid.uuid4().hex
"""With the process id it identifies this process among all machines."""


class RunFolder:
    """Holds the folder `path` for this rank until `close()`.

    With `shares`, a folder that another store of this process holds is no error: `path` is then a new one next to it.
    A missing folder is created, with a warning. Raises ConfigError for a relative path, RunFolderError for one that
    cannot be made, is not writable or held by another run.
    """

    def __init__(self, nvme_path: str | Path, rank: int, files: Files, *, shares: bool = False) -> None:
        base = Path(nvme_path)
        if not base.is_absolute():
            raise ConfigError(f"nvme_path: expected an absolute path, got {str(base)!r}")
        is_new = not base.exists()
        try:
            base.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(
                f"nvme_path: expected a folder, or one that can be made: {error.strerror}", path=str(base)
            ) from error
        if is_new and rank == 0:
            _log.warning("nvme_path: made %s, which was not there; if a drive belongs there, it is not mounted", base)
        self._files = files
        self._rank = rank
        first = base / RUN_FOLDER / f"rank-{rank:05d}"
        for number in count(1):
            self.path = first if number == 1 else first.with_name(f"{first.name}-{number}")
            self._fd = self._open(base)
            try:
                is_mine = self._owner()[1:] == [f"{_PROCESS} {os.getpid()}"]  # this process took it last
                if self._lock(may_fail=shares and (number > 1 or is_mine)):
                    self._sweep()
                    break
            except BaseException:
                os.close(self._fd)
                raise
            os.close(self._fd)
        self.is_first = self.path == first
        """Whether no other store of this process held the folder before."""
        if self.is_first:
            self._sweep_siblings()

    def _open(self, base: Path) -> int:
        try:
            self._files.make_folder(self.path)
            return os.open(self.path / _OWNER, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise RunFolderError(
                "nvme_path: the folder cannot be written; give one that this user may write",
                path=str(base),
                errno=error.errno,
                rank=self._rank,
            ) from error

    def _owner(self) -> list[str]:
        """Return the lines of the present or last holder of the folder: its name and its process."""
        return os.pread(self._fd, 300, 0).decode(errors="replace").splitlines() or ["unknown"]

    def _lock(self, *, may_fail: bool) -> bool:
        """Take the lock; false if another process has it and that `may_fail`."""
        if fcntl is not None:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if may_fail:
                    return False
                raise RunFolderError(
                    f"nvme_path: another run holds this folder ({self._owner()[0]}); wait for its end or name another "
                    "folder",
                    path=str(self.path),
                    rank=self._rank,
                ) from error
            except OSError as error:
                raise RunFolderError(
                    "nvme_path: the folder cannot be locked; give one on a local drive",
                    path=str(self.path),
                    errno=error.errno,
                    rank=self._rank,
                ) from error
        os.ftruncate(self._fd, 0)
        who = f"process {os.getpid()} on {socket.gethostname()}\n{_PROCESS} {os.getpid()}\n"
        os.pwrite(self._fd, who.encode(), 0)
        return True

    def _sweep(self) -> None:
        for left in self.path.glob("*.shard"):
            self._files.unlink(left)

    def _sweep_siblings(self) -> None:
        """Remove the folders that further stores of a killed process left."""
        for path in self.path.parent.glob(f"{self.path.name}-*"):
            with suppress(OSError):  # such as a live store's, which is locked
                fd = os.open(path / _OWNER, os.O_RDWR)
                try:
                    if fcntl is not None:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._files.remove_tree(path)
                finally:
                    os.close(fd)

    def close(self) -> None:
        """Remove the folder's files, and the folder if it is not the first, and release the lock."""
        try:
            if self.is_first:
                self._sweep()
            else:
                self._files.remove_tree(self.path)
        finally:
            os.close(self._fd)


class RunFolders:
    """The run folders of one rank, one on each drive, by the given path; all of them, or none. `shares` as in
    `RunFolder`."""

    def __init__(self, paths: Iterable[Path], rank: int, files: Files, *, shares: bool = False) -> None:
        self._held: dict[Path, RunFolder] = {}
        self._files = files
        try:
            for path in paths:
                self._held[path] = RunFolder(path, rank, files, shares=shares)
        except BaseException:
            self.close()
            raise

    def paths(self, given: Iterable[Path]) -> tuple[Path, ...]:
        """Return the folders under these paths."""
        return tuple(self._held[path].path for path in given)

    def require_room(self, nbytes: Mapping[Path, int], num_ranks: int) -> int:
        """Return the bytes that `num_ranks` ranks need on the first drive, each the `nbytes` of its folders.

        Raises DiskFullError if a drive has no room for them.
        """
        needed: Counter[int] = Counter()
        for folder, wanted in nbytes.items():
            needed[os.stat(folder).st_dev] += num_ranks * wanted
        drives = [os.stat(held.path).st_dev for held in self._held.values()]
        for held, drive in zip(self._held.values(), drives, strict=True):
            self._files.require_room(
                held.path,
                needed[drive],
                f"a save keeps this version's files, so that the next step needs {needed[drive]} bytes for new ones",
                "make room on the drive of the run folder, or keep fewer checkpoints there",
            )
        return needed[drives[0]]

    def close(self) -> None:
        """Remove the folders' files and release the locks."""
        with ExitStack() as last_to_first:
            for folder in self._held.values():
                last_to_first.callback(folder.close)
