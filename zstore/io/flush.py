"""One flush of a whole file system in place of one for each file: small files cost more flushes than bytes.

[Note: one flush for many files]
`syncfs` makes durable all that was written to a file system before it, whichever process of the machine wrote it: files,
their names and the folders. It also writes what other programs left in the page cache, so it is used only if that is
little. It reports an error of any earlier write since its descriptor was opened (Linux 5.8 and later), so
that is opened before the first file is written. Local file systems of one machine alone are known to do all this.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .files import Files

_LOCAL = ("ext4", "xfs")
_LEAST_KERNEL = (5, 8)
_SYNC_CALL = "syncfs"


class Flush:
    """Makes durable all that is written to the file system of `folder` from now on, once `sync` returns. Close it at the
    end; `Flush.of` tells whether there is one."""

    def __init__(self, files: Files, folder: str | Path) -> None:
        self._files = files
        self._folder = folder
        self._fd = os.open(folder, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    @classmethod
    def of(cls, files: Files, folder: str | Path) -> Flush | None:
        """Return a flush for `folder`; None if its files are better made durable one by one."""
        with contextlib.suppress(OSError):  # no /proc, or a folder that is gone: a write there will fail
            if _sync_call() and _is_local(os.stat(folder).st_dev) and _num_dirty_bytes() <= files.most_dirty_bytes:
                return cls(files, folder)
        return None

    def sync(self) -> None:
        """Make durable all that any process of this machine has written to the file system by now."""
        self._files.sync_filesystem(self._folder, partial(_call, self._fd))

    def close(self) -> None:
        """Close the file system's descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _call(fd: int) -> None:
    call = getattr(ctypes.CDLL(None, use_errno=True), _SYNC_CALL)
    if call(fd) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


@cache
def _sync_call() -> bool:
    """Return whether this system's `syncfs` reports errors of earlier writes."""
    if not hasattr(os, "uname") or os.uname().sysname != "Linux":
        return False
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    with contextlib.suppress(OSError):
        return (
            found is not None
            and tuple(map(int, found.groups())) >= _LEAST_KERNEL
            and hasattr(ctypes.CDLL(None), _SYNC_CALL)
        )
    return False


@cache
def _is_local(device: int) -> bool:
    """Return whether `device` has a file system of this machine alone."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        mounts = (line.split() for line in file)
        return any(mount[2] == number and mount[mount.index("-") + 1] in _LOCAL for mount in mounts)


def _num_dirty_bytes() -> int:
    """Return the bytes in the page cache that are not on their drives yet."""
    with open("/proc/meminfo", "rb") as file:
        found = dict(re.findall(rb"^(Dirty|Writeback):\s+(\d+) kB", file.read(), re.MULTILINE))
    return 1024 * sum(map(int, found.values()))
