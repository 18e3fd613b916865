"""Probes the features of a folder's file system and the speed of its drive, by trying them."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from zstore.errors import ConfigError, StorageError
from zstore.format import Bytes
from zstore.io import PAGE_BYTES, Files, make_slab

NUM_THREADS = 8
BLOCK_BYTES = 4 * 2**20
"""Threads, and bytes of one request: enough in flight for a drive's full rate."""

RATE_BYTES = 512 * 2**20
"""Size of the file that the rates are measured on: a second or so on a good drive."""

PASS_LIMIT_S = 10.0
"""A pass over the file ends after this time, however slow the drive is."""


@dataclass(frozen=True, kw_only=True)
class FolderReport:
    """Type and features of a folder's file system. None: not tried, because the folder cannot be written."""

    path: str
    file_system: str | None
    """Its type, as "ext4"; None if the system does not say."""
    free_bytes: int
    writable: bool
    direct_io: bool | None
    """Transfers go past the page cache."""
    hard_links: bool | None
    """Checkpoints of state on this drive cost no copy."""
    preallocation: bool | None
    """Space is reserved when a file is made, so a full disk shows then."""


@dataclass(frozen=True, kw_only=True)
class DriveReport:
    """Rates with `NUM_THREADS` threads and `BLOCK_BYTES` a request, in bytes per second."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    """Over blocks that were written before, as swap files are."""
    write_new_bytes_per_s: float
    """Into a preallocated new file, made durable at the end, as checkpoints are."""
    file_bytes: int
    direct_io: bool
    """False: through the page cache, so the rates may be the memory's."""


def probe_folder(path: Path) -> FolderReport:
    """Try out the folder; nothing is left in it. `ConfigError` if it does not exist."""
    if not path.is_dir():
        raise ConfigError(f"expected an existing folder, got {path}: create it, or give another --path")
    files = Files()
    direct = links = preallocates = None
    try:
        with _scratch(path) as folder:
            direct = _has_direct_io(files, folder / "direct")
            links = _has_hard_links(folder)
            preallocates = _has_preallocation(files, folder / "preallocated")
        writable = True
    except OSError:
        writable = False
    return FolderReport(
        path=str(path.resolve()),
        file_system=file_system_of(path),
        free_bytes=files.free_bytes(path),
        writable=writable,
        direct_io=direct,
        hard_links=links,
        preallocation=preallocates,
    )


def measure_drive(path: Path, max_bytes: int = RATE_BYTES) -> DriveReport | None:
    """The rates of the drive under the folder `path`; None when there is no room even for one block.

    Takes at most an eighth of the free space, and leaves nothing behind.
    """
    files = Files()
    num_blocks = min(max_bytes, files.free_bytes(path) // 8) // BLOCK_BYTES
    if num_blocks < 1:
        return None
    # Random bytes, since some drives store zeros for nothing. One block for each thread.
    slab = make_slab(NUM_THREADS * BLOCK_BYTES)
    slab[:] = np.random.default_rng(0).integers(0, 256, slab.size, dtype=np.uint8)
    with _scratch(path) as folder, files.opened(folder / "rate", write=True, create=True) as file:
        files.allocate(file, num_blocks * BLOCK_BYTES)
        write, read = partial(files.write_from, file), partial(files.read_into, file)
        write_new, num_blocks = _pass(write, slab, num_blocks, lambda: files.sync_data(file))
        rewrite, _ = _pass(write, slab, num_blocks, lambda: files.sync_data(file))
        if hasattr(os, "posix_fadvise"):  # what goes through the page cache is read from the drive then
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        reading, _ = _pass(read, slab, num_blocks, lambda: None)
        return DriveReport(
            read_bytes_per_s=reading,
            write_bytes_per_s=rewrite,
            write_new_bytes_per_s=write_new,
            file_bytes=num_blocks * BLOCK_BYTES,
            direct_io=file.direct,
        )


def file_system_of(path: Path) -> str | None:
    """The type of the file system that holds `path`; None if there is no `/proc/self/mountinfo`."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    resolved = path.resolve()
    best: tuple[int, str | None] = (-1, None)
    for line in lines:
        # See proc_pid_mountinfo(5): the fifth field is the mount point, the type is the first one after the dash.
        before, _, after = line.partition(" - ")
        mount = Path(before.split()[4].encode().decode("unicode_escape"))
        if resolved.is_relative_to(mount) and len(mount.parts) >= best[0]:
            best = (len(mount.parts), after.split()[0])
    return best[1]


def _pass(
    transfer: Callable[[Bytes, int], None], slab: Bytes, num_blocks: int, finish: Callable[[], None]
) -> tuple[float, int]:
    """Move blocks 0..num_blocks-1 from all threads; return bytes per second, and the blocks moved within the time limit."""
    numbers = iter(range(num_blocks))
    lock = threading.Lock()
    started_s = time.perf_counter()

    def work(thread: int) -> int:
        block = slab[thread * BLOCK_BYTES : (thread + 1) * BLOCK_BYTES]
        moved = 0
        while time.perf_counter() - started_s < PASS_LIMIT_S:
            with lock:
                number = next(numbers, None)
            if number is None:
                break
            transfer(block, number * BLOCK_BYTES)
            moved += 1
        return moved

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        moved = sum(threads.map(work, range(NUM_THREADS)))
    finish()
    return moved * BLOCK_BYTES / (time.perf_counter() - started_s), moved


@contextlib.contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".zstore-doctor-", dir=path) as folder:
        yield Path(folder)


def _has_direct_io(files: Files, path: Path) -> bool:
    try:
        with files.opened(path, write=True, create=True) as file:
            # Some file systems open such a file and refuse the transfer.
            files.write_from(file, make_slab(PAGE_BYTES), 0)
            return file.direct
    except StorageError as error:
        if error.errno in (None, 22):
            return False
        raise


def _has_hard_links(folder: Path) -> bool:
    (folder / "source").touch()
    try:
        os.link(folder / "source", folder / "link")
    except OSError:
        return False
    return (folder / "link").stat().st_nlink == 2


def _has_preallocation(files: Files, path: Path) -> bool:
    with files.opened(path, write=True, create=True) as file:
        files.allocate(file, 2**20)
        status = os.fstat(file.fd)
        return getattr(status, "st_blocks", 0) * 512 >= 2**20
