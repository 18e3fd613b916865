"""How a store uses this rank's host memory and disks: options, statistics, and run folders.

[Note: run folders]
A run folder holds the files of one rank's disk tier. One process at a time owns it.

    <nvme_path>/zstore-run/rank-00000/owner     locked while its owner is alive; its text names that process
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
    """Folders on further drives: each new shard goes to the drive with the fewest bytes so far."""
    group_paths: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    """Folders to use instead for some arrays, by the first part of the array's name, such as "parameter"."""
    shares_folders: bool = False
    """Another store of this process may use the same folders, each with separate files. Otherwise that is an error."""
    reserves: bool = True
    """Reserve an array's disk space when it is created; otherwise its first write does, in fewer requests to the drive."""
    host_budget_bytes: int | None = None
    """Bytes of host memory for buffers and host-tier state of this rank; None: buffers of 128 MiB, state unlimited."""
    max_pool_bytes: int = DEFAULT_POOL_BYTES
    """Bytes of transfer buffers; at most half of the budget, and by default an eighth, but at least 64 MiB."""
    num_threads: int = 8
    """I/O threads."""
    queue_depth: int = 64
    """Operations that may wait for a thread."""
    block_bytes: int = 4 * 1024 * 1024
    """Approximate bytes per disk request."""
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
        pool_bytes, budget_bytes = self.max_pool_bytes, self.host_budget_bytes
        if budget_bytes is None:
            return pool_bytes
        if pool_bytes == DEFAULT_POOL_BYTES:  # the rest of the budget helps more as memory for state
            pool_bytes = min(pool_bytes, max(pool_bytes // 2, budget_bytes // 8))
        return min(pool_bytes, budget_bytes // 2)

    @property
    def span_bytes(self) -> int:
        """Bytes per disk request, limited so that even a small pool has room for several."""
        return min(self.block_bytes, self.pool_bytes // 12)


@dataclass(frozen=True, kw_only=True)
class StoreStatistics:
    """The store's contents, and its transfers and waits since it was opened."""

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
"""Name of the folder for a run's files, inside the folder from the options."""
_OWNER_FILE = "owner"
_PROCESS_UUID = uuid.uuid4().hex
"""Together with the process id it identifies this process across machines."""


class RunFolder:
    """Holds the folder `path` for this rank until `close()`.

    With `shares`, another store of this process may hold the folder: `path` is then a new folder next to it. A missing
    folder is created, with a warning. Raises ConfigError for a relative path, RunFolderError for a folder that cannot
    be created, is not writable or is held by another run.
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
                f"nvme_path: expected a folder, or one that can be created: {error.strerror}", path=str(base)
            ) from error
        if is_new and rank == 0:
            _log.warning("nvme_path: created %s, which did not exist; is a drive not mounted there?", base)
        self._files = files
        self._rank = rank
        first_path = base / RUN_FOLDER / f"rank-{rank:05d}"
        for number in count(1):
            self.path = first_path if number == 1 else first_path.with_name(f"{first_path.name}-{number}")
            self._fd = self._open(base)
            try:
                is_own = self._owner()[1:] == [f"{_PROCESS_UUID} {os.getpid()}"]  # this process took it last
                if self._lock(may_fail=shares and (number > 1 or is_own)):
                    self._remove_shard_files()
                    break
            except BaseException:
                os.close(self._fd)
                raise
            os.close(self._fd)
        self.is_first = self.path == first_path
        """Whether no other store of this process held the folder before."""
        if self.is_first:
            self._remove_abandoned()

    def _open(self, base: Path) -> int:
        try:
            self._files.make_folder(self.path)
            return os.open(self.path / _OWNER_FILE, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise RunFolderError(
                "nvme_path: the folder cannot be written; give one that this user may write",
                path=str(base),
                errno=error.errno,
                rank=self._rank,
            ) from error

    def _owner(self) -> list[str]:
        """Return the owner file's lines about the current or last holder of the folder: its name and its process."""
        return os.pread(self._fd, 300, 0).decode(errors="replace").splitlines() or ["unknown"]

    def _lock(self, *, may_fail: bool) -> bool:
        """Acquire the lock. If another process holds it, return False with `may_fail`, else raise RunFolderError."""
        if fcntl is not None:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if may_fail:
                    return False
                raise RunFolderError(
                    f"nvme_path: another run holds this folder ({self._owner()[0]}); wait for it to end or choose another "
                    "folder",
                    path=str(self.path),
                    rank=self._rank,
                ) from error
            except OSError as error:
                raise RunFolderError(
                    "nvme_path: the folder cannot be locked; choose one on a local drive",
                    path=str(self.path),
                    errno=error.errno,
                    rank=self._rank,
                ) from error
        os.ftruncate(self._fd, 0)
        owner = f"process {os.getpid()} on {socket.gethostname()}\n{_PROCESS_UUID} {os.getpid()}\n"
        os.pwrite(self._fd, owner.encode(), 0)
        return True

    def _remove_shard_files(self) -> None:
        for path in self.path.glob("*.shard"):
            self._files.unlink(path)

    def _remove_abandoned(self) -> None:
        """Remove the folders that further stores of a killed process left."""
        for path in self.path.parent.glob(f"{self.path.name}-*"):
            with suppress(OSError):  # for example, the folder of a live store is locked
                fd = os.open(path / _OWNER_FILE, os.O_RDWR)
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
                self._remove_shard_files()
            else:
                self._files.remove_tree(self.path)
        finally:
            os.close(self._fd)


class RunFolders:
    """The run folders of one rank, one in each of `paths`. If one cannot be opened, all are closed. See `RunFolder` for
    `shares`."""

    def __init__(self, paths: Iterable[Path], rank: int, files: Files, *, shares: bool = False) -> None:
        self._folders: dict[Path, RunFolder] = {}
        self._files = files
        try:
            for path in paths:
                self._folders[path] = RunFolder(path, rank, files, shares=shares)
        except BaseException:
            self.close()
            raise

    def paths(self, parents: Iterable[Path]) -> tuple[Path, ...]:
        """Return the folders under these paths."""
        return tuple(self._folders[path].path for path in parents)

    def require_room(self, nbytes: Mapping[Path, int], num_ranks: int) -> int:
        """Return the bytes that `num_ranks` ranks need on the first drive, if each needs `nbytes` in its folders.

        Raises DiskFullError if a drive has no room for them.
        """
        needed: Counter[int] = Counter()
        for folder, folder_bytes in nbytes.items():
            needed[os.stat(folder).st_dev] += num_ranks * folder_bytes
        drives = [os.stat(run_folder.path).st_dev for run_folder in self._folders.values()]
        for run_folder, drive in zip(self._folders.values(), drives, strict=True):
            self._files.require_room(
                run_folder.path,
                needed[drive],
                f"a save keeps this version's files, so the next step needs {needed[drive]} bytes for new ones",
                "make room on the drive of the run folder, or keep fewer checkpoints there",
            )
        return needed[drives[0]]

    def close(self) -> None:
        """Remove the folders' files and release the locks."""
        with ExitStack() as cleanup:
            for folder in self._folders.values():
                cleanup.callback(folder.close)
