"""The lock of one save: held while its process lives, so that a sweep knows the living from the dead."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from ..errors import StorageError

try:
    import fcntl
except ImportError:  # Windows: nothing saves there
    fcntl = None  # type: ignore[assignment]

_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK)
FOREIGN_LIFE_S = 24 * 3600
"""Without locks, a save of another machine counts as alive for this long."""


class SaveLock:
    """Holds the new lock file `path` until `release()`, the end of a `with` block, or of the process; its text names the
    process. Waits while another process has it.

    Raises StorageError if it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        while True:
            self._fd: int | None = _make(path)
            _flock(self._fd, wait=True)
            # A sweep may have taken the file for a dead save's between the two calls.
            with contextlib.suppress(FileNotFoundError):
                if os.stat(path).st_ino == os.fstat(self._fd).st_ino:
                    break
            os.close(self._fd)
        os.pwrite(self._fd, owner_document(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Remove the file and give the lock back; a second call does nothing."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        if fcntl is not None:
            # Explicitly: a forked child, such as a data loader's worker, shares the lock with us.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _make(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise StorageError(
            "cannot write to the folder: name one that this user may write to", path=str(path.parent), errno=error.errno
        ) from error


@contextlib.contextmanager
def owner_is_dead(path: Path) -> Iterator[bool]:
    """Yield whether the save that made the lock file `path` has ended; a missing file is a dead save's.

    If it is dead, the lock is held for the length of the block: nobody begins a save of that name meanwhile.
    """
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield True
        return
    except OSError:  # another user's
        yield False
        return
    try:
        taken = _flock(fd, wait=False)
        yield not _owner_lives(fd) if taken is None else taken
    finally:
        os.close(fd)


def _flock(fd: int, *, wait: bool) -> bool | None:
    """Take the lock and return whether that worked, None if the system or the file system has no locks."""
    if fcntl is not None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
    return None


def _owner_lives(fd: int) -> bool:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        owner = json.loads(os.pread(fd, 4096, 0))
        if owner["host"] == socket.gethostname():
            return not process_ended(owner)
    return time.time() - os.fstat(fd).st_mtime < FOREIGN_LIFE_S


def owner_document(**more: str | int) -> bytes:
    """Return a lock's description of this process, with `more`."""
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), **more}).encode()


def process_ended(owner: Mapping[str, Any]) -> bool:
    """Return whether the process of a lock is one of this machine and has ended."""
    pid = int(owner["pid"])
    if owner["host"] != socket.gethostname():
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:  # of another user's it is one too
        return isinstance(error, ProcessLookupError)
    return False
