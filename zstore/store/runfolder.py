"""The run folder: where one rank keeps the files of its disk tier, owned by one process at a time.

    <nvme_path>/zstore-run/rank-00000/owner     locked for as long as the owner lives; its text says who that is
    <nvme_path>/zstore-run/rank-00000/*.shard   files of the disk tier

The lock goes with the process, so a killed run leaves none. Its files hold nothing that is needed (they may stop in the
middle of an update), and the next owner sweeps them: checkpoints, and the snapshots that the engine takes of steps in
`<nvme_path>/zstore-run/steps`, have links of their own.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

from ..errors import ConfigError, RunFolderError
from ..io.files import Files

try:
    import fcntl
except ImportError:  # Windows: training does not run there
    fcntl = None  # type: ignore[assignment]

RUN_FOLDER = "zstore-run"
"""In the folder that a run was given, where all of its files are."""
_OWNER = "owner"


class RunFolder:
    """Holds the folder `path` for this rank until `close()`.

    Raises ConfigError for a relative path, RunFolderError for one that is missing, not writable or held by another run.
    """

    def __init__(self, nvme_path: str | Path, rank: int, files: Files) -> None:
        base = Path(nvme_path)
        if not base.is_absolute():
            raise ConfigError(f"nvme_path: expected an absolute path, got {str(base)!r}")
        if not base.is_dir():
            raise RunFolderError("nvme_path: expected an existing folder; make it on the drive to use", path=str(base))
        self.path = base / RUN_FOLDER / f"rank-{rank:05d}"
        self._files = files
        try:
            files.make_folder(self.path)
            self._fd = os.open(self.path / _OWNER, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunFolderError(
                "nvme_path: the folder cannot be written; give one that this user may write",
                path=str(base),
                errno=error.errno,
                rank=rank,
            ) from error
        try:
            self._lock(rank)
            self._sweep()
        except BaseException:
            os.close(self._fd)
            raise

    def _lock(self, rank: int) -> None:
        if fcntl is not None:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                owner = os.pread(self._fd, 200, 0).decode(errors="replace").strip() or "unknown"
                raise RunFolderError(
                    f"nvme_path: another run holds this folder ({owner}); wait for its end or name another folder",
                    path=str(self.path),
                    rank=rank,
                ) from error
            except OSError as error:
                raise RunFolderError(
                    "nvme_path: the folder cannot be locked; give one on a local drive",
                    path=str(self.path),
                    errno=error.errno,
                    rank=rank,
                ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _sweep(self) -> None:
        for left in self.path.glob("*.shard"):
            self._files.unlink(left)

    def close(self) -> None:
        """Remove the folder's files and give the lock back."""
        try:
            self._sweep()
        finally:
            os.close(self._fd)


class RunFolders:
    """The run folders of one rank, one on each drive, by the path that was given; all of them, or none."""

    def __init__(self, paths: Iterable[Path], rank: int, files: Files) -> None:
        self._held: dict[Path, RunFolder] = {}
        self._files = files
        try:
            for path in paths:
                self._held[path] = RunFolder(path, rank, files)
        except BaseException:
            self.close()
            raise

    def paths(self, given: Iterable[Path]) -> tuple[Path, ...]:
        """Return the folders under these paths."""
        return tuple(self._held[path].path for path in given)

    def require_room(self, nbytes: Mapping[Path, int], num_ranks: int) -> int:
        """Return the bytes that `num_ranks` ranks need on the first drive, each as many as `nbytes` says by folder.

        Raises DiskFullError where a drive has no room for them.
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
        """Remove the folders' files and give the locks back."""
        with ExitStack() as last_to_first:
            for folder in self._held.values():
                last_to_first.callback(folder.close)
