"""The disk's own limit, measured by fio where it is installed, else by plain threads of preadv and pwritev."""

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from zstore.format.arrays import Bytes
from zstore.io.memory import make_slab

T = TypeVar("T")

_BLOCK_BYTES = 1024 * 1024


def disk_limit(folder: Path, pattern: str, nbytes: int) -> float:
    """Return bytes per second of direct I/O on a preallocated file: `pattern` is "read", "write" or "mixed".

    fio runs io_uring, 1 MiB x 32 deep over 4 jobs, its buffers in huge pages. "mixed" counts both directions.
    """
    return _fio(folder, pattern, nbytes) if shutil.which("fio") else _threads(folder, pattern, nbytes)


def limit_name() -> str:
    """Return what `disk_limit` measures with here."""
    return "fio (io_uring)" if shutil.which("fio") else "threads of preadv/pwritev"


def new_files_limit(folder: Path, nbytes: int, *, file_bytes: int | None = None) -> float:
    """Return bytes per second of writing new files, reserved beforehand and durable at the end: what a checkpoint does.

    Few large files by default; with `file_bytes` files of about that size, each durable as it is closed.
    """
    place = folder / "limit-new"
    place.mkdir()
    try:
        if shutil.which("fio"):
            job, jobs = _new_files_job(place, nbytes, file_bytes)
            return _rate(_run_fio(folder, job, jobs))
        return nbytes / _write_new_files(place, nbytes, file_bytes=file_bytes)
    finally:
        shutil.rmtree(place)


def copy_limit(folder: Path, read_bytes: int, written_bytes: int) -> float:
    """Return the seconds of reading a file and writing new ones, as `new_files_limit` does, both at once: what a
    conversion does."""
    disk_limit(folder, "write", read_bytes)  # what is read, as `limit.bin`
    place = folder / "limit-new"
    place.mkdir()
    try:
        if shutil.which("fio"):
            reading, jobs = _one_file_job(folder, "read", read_bytes)
            writing, more = _new_files_job(place, written_bytes, None)
            found = _run_fio(folder, [*reading, *writing], jobs + more)
            return _runtime_s(found)
        started = time.perf_counter()
        reader = threading.Thread(target=_threads, args=(folder, "read", read_bytes, 4))
        reader.start()
        _write_new_files(place, written_bytes)
        reader.join()
        return time.perf_counter() - started
    finally:
        shutil.rmtree(place)


_Job = tuple[list[str], int]
"""Arguments, and how many jobs they are."""


def _fio(folder: Path, pattern: str, nbytes: int) -> float:
    job, jobs = _one_file_job(folder, "rw" if pattern == "mixed" else pattern, nbytes)
    return _rate(_run_fio(folder, job, jobs))


def _one_file_job(folder: Path, rw: str, nbytes: int) -> _Job:
    """Return parts of one file, which is there or becomes so; in whole blocks, as direct I/O needs."""
    jobs = 4
    part = max(1, nbytes // jobs // _BLOCK_BYTES) * _BLOCK_BYTES
    sizes = [f"--filesize={jobs * part}", f"--size={part}", f"--offset_increment={part}", f"--numjobs={jobs}"]
    how = ["--overwrite=1", "--fallocate=none"]
    return ["--name=limit", f"--filename={folder / 'limit.bin'}", f"--rw={rw}", *how, *sizes], jobs


def _new_files_job(folder: Path, nbytes: int, file_bytes: int | None) -> _Job:
    """Return new files in `folder`, which has none; see `new_files_limit`."""
    jobs = 4
    num_files = 1 if file_bytes is None else max(1, nbytes // (jobs * file_bytes))
    size = nbytes // jobs // num_files // _BLOCK_BYTES * _BLOCK_BYTES
    sizes = [f"--nrfiles={num_files}", f"--filesize={size}", f"--size={num_files * size}", f"--numjobs={jobs}"]
    how = ["--offset_increment=0", "--overwrite=0", "--fallocate=posix", "--end_fsync=1"]
    if num_files > 1:
        how += ["--create_on_open=1", "--file_service_type=sequential", "--fsync_on_close=1", "--openfiles=4"]
    return ["--name=new", f"--directory={folder}", "--rw=write", *how, *sizes], jobs


def _run_fio(folder: Path, jobs: list[str], num_jobs: int) -> list[dict[str, Any]]:
    command = [
        "fio", "--bs=1m", "--iodepth=32", "--ioengine=io_uring", "--direct=1", "--thread", "--output-format=json", *jobs,
    ]  # fmt: skip
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=folder)
    found: list[dict[str, Any]] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    if len(found) != num_jobs:
        raise RuntimeError(f"fio ran {len(found)} jobs, expected {num_jobs}: {done.stdout[:500]}")
    return found


def _rate(jobs: list[dict[str, Any]]) -> float:
    """Return the bytes of jobs that ran at once, over the time that the longest of them took."""
    moved = sum(job["read"]["io_bytes"] + job["write"]["io_bytes"] for job in jobs)
    return float(moved / _runtime_s(jobs))


def _runtime_s(jobs: list[dict[str, Any]]) -> float:
    return max(float(job[direction]["runtime"]) for job in jobs for direction in ("read", "write")) / 1000


def in_threads(num_threads: int, items: Iterable[T], work: Callable[[T, Bytes], None], nbytes: int = 0) -> float:
    """Call `work` for each item, in threads that each have a buffer of `nbytes`; return the seconds."""
    left, lock = iter(items), threading.Lock()

    def serve() -> None:
        buffer = make_slab(nbytes)
        while True:
            with lock:
                item = next(left, None)
            if item is None:
                return
            work(item, buffer)

    started = time.perf_counter()
    with ThreadPoolExecutor(num_threads) as pool:
        for ended in [pool.submit(serve) for _ in range(num_threads)]:
            ended.result()
    return time.perf_counter() - started


def _write_new_files(folder: Path, nbytes: int, num_threads: int = 8, file_bytes: int | None = None) -> float:
    """Return the seconds of it."""
    block = 4 * _BLOCK_BYTES
    part = max(block, (file_bytes or nbytes // num_threads) // block * block)
    num_files = max(1, nbytes // part)

    def write(number: int, slab: Bytes) -> None:
        fd = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_DIRECT", 0), 0o644)
        try:
            os.posix_fallocate(fd, 0, part)
            for offset in range(0, part, block):
                os.pwritev(fd, [slab.data], offset)
            os.fdatasync(fd)
        finally:
            os.close(fd)

    return in_threads(num_threads, range(num_files), write, block) * nbytes / (num_files * part)


def _threads(folder: Path, pattern: str, nbytes: int, num_threads: int = 8) -> float:
    path = folder / "limit.bin"
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0)
    fd = os.open(path, flags, 0o644)
    block = 4 * _BLOCK_BYTES
    try:
        if os.fstat(fd).st_size < nbytes:
            os.posix_fallocate(fd, 0, nbytes)
            slab = make_slab(block)
            for offset in range(0, nbytes, block):
                os.pwritev(fd, [slab.data], offset)

        def move(number: int, slab: Bytes) -> None:
            reads = pattern == "read" or (pattern == "mixed" and number % 2)
            (os.preadv if reads else os.pwritev)(fd, [slab.data], number * block)

        return nbytes / in_threads(num_threads, range(-(-nbytes // block)), move, block)
    finally:
        os.close(fd)
