"""The disk's own limit, measured by fio where it is installed, else by plain threads of preadv and pwritev."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

from zstore.buffers import make_slab

_BLOCK_BYTES = 1024 * 1024


def disk_limit(folder: Path, pattern: str, nbytes: int, *, fio: bool | None = None) -> float:
    """Return bytes per second of direct I/O on a preallocated file: `pattern` is "read", "write" or "mixed".

    fio runs io_uring, 1 MiB x 32 deep over 4 jobs, its buffers in huge pages. "mixed" counts both directions.
    """
    if fio is None:
        fio = shutil.which("fio") is not None
    return _fio(folder, pattern, nbytes) if fio else _threads(folder, pattern, nbytes)


def limit_name() -> str:
    """Return what `disk_limit` measures with here."""
    return "fio (io_uring)" if shutil.which("fio") else "threads of preadv/pwritev"


def _fio(folder: Path, pattern: str, nbytes: int) -> float:
    jobs = 4
    command = [
        "fio", "--name=limit", f"--filename={folder / 'limit.bin'}", f"--rw={'rw' if pattern == 'mixed' else pattern}",
        "--bs=1m", "--iodepth=32", "--ioengine=io_uring", "--direct=1", "--overwrite=1", "--fallocate=none",
        f"--filesize={nbytes}", f"--size={nbytes // jobs}", f"--offset_increment={nbytes // jobs}", f"--numjobs={jobs}",
        "--thread", "--group_reporting", "--output-format=json",
    ]  # fmt: skip
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=folder)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    runtime_s = max(job["read"]["runtime"], job["write"]["runtime"]) / 1000
    return float(moved / runtime_s)


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

        def work(index: int) -> None:
            slab = make_slab(block)
            for i, offset in enumerate(range(index * block, nbytes, num_threads * block)):
                if pattern == "read" or (pattern == "mixed" and i % 2):
                    os.preadv(fd, [slab.data], offset)
                else:
                    os.pwritev(fd, [slab.data], offset)

        workers = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return nbytes / (time.perf_counter() - started)
    finally:
        os.close(fd)
