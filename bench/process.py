"""What a process finds out about itself: time, memory, and bytes that the kernel moved for it. Imports nothing of zstore:
peers may live in another environment."""

import ctypes
import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Spec = dict[str, Any]
"""What a process of its own is asked to do: `contender` says by which function, `out` where it tells of it."""
Tell = Callable[..., None]
"""`tell(event, **facts)` notes what was found."""
Moved = tuple[int, int]
"""Bytes read from and written to disk so far."""


def serve(contenders: Mapping[str, Callable[[Spec, Tell], None]]) -> None:
    """Do what the JSON on the command line says (`Spec`); each event becomes a line of JSON in its `out`, so that a process
    that dies leaves what it reached."""
    spec: Spec = json.loads(sys.argv[1])
    with Path(spec["out"]).open("a", encoding="utf-8") as out:

        def tell(event: str, **facts: Any) -> None:
            out.write(json.dumps({"event": event, **facts}) + "\n")
            out.flush()

        contenders[spec["contender"]](spec, tell)


def measured(work: Callable[[], T]) -> tuple[T, dict[str, Any]]:
    """Do `work`; return its result, and its seconds, processor seconds, memory and bytes moved.

    `growth_bytes` is what its peak had resident over what was resident before, `peak_bytes` that peak; None where the
    kernel does not begin the peak anew.
    """
    gc.collect()
    synchronize()
    apart, before, moved = forget_peak(), resident_bytes(), kernel_moved()
    started, cpu = time.perf_counter(), time.process_time()
    result = work()
    synchronize()
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    peak, after = peak_bytes() if apart else None, kernel_moved()
    return result, {
        "seconds": seconds,
        "cpu_s": cpu_s,
        "peak_bytes": peak,
        "growth_bytes": None if peak is None else peak - before,
        "read_bytes": after[0] - moved[0],
        "written_bytes": after[1] - moved[1],
    }


def synchronize() -> None:
    """Return when the CUDA device has done what this process asked of it; at once where the process uses none."""
    cuda = _cuda()
    if cuda is not None:
        cuda.synchronize()


def device_peak_bytes() -> int | None:
    """Return the most bytes of the CUDA device that tensors of this process took; None where it uses none."""
    cuda = _cuda()
    return None if cuda is None else int(cuda.max_memory_allocated())


def _cuda() -> Any:
    """Return `torch.cuda` where this process uses a device."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def peak_bytes() -> int:
    """Return the most bytes that this process had resident since it began or since `forget_peak`."""
    return _status("VmHWM")


def resident_bytes() -> int:
    """Return the bytes that this process has resident."""
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def forget_peak() -> bool:
    """Begin the peak anew; false where the kernel does not let a process."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


def kernel_moved() -> Moved:
    """Return what the kernel moved between this process and drives; (0, 0) where it does not count."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0, 0
    counters = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return counters["read_bytes"], counters["write_bytes"]


def page_cache_bytes(folder: Path) -> int | None:
    """Return the bytes that files below `folder` have in the page cache; None where the kernel does not tell
    (before Linux 6.5)."""
    libc = ctypes.CDLL(None, use_errno=True)
    page, pages = os.sysconf("SC_PAGE_SIZE"), 0
    whole, counts = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    for fd in opened(path for path in folder.rglob("*") if path.is_file()):
        if libc.syscall(_CACHESTAT, fd, whole, counts, 0) != 0:
            return None
        pages += counts[0]
    return pages * page


_CACHESTAT = 451
"""Number of the system call, the same on every architecture."""


def opened(paths: Iterable[Path]) -> Iterator[int]:
    """Yield a descriptor of each file or folder, closed once the next is asked for."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            yield fd
        finally:
            os.close(fd)


def make_durable(folder: Path) -> None:
    """Have every file and folder below `folder` on disk, and the folder itself."""
    found = (path for path in folder.rglob("*") if not path.is_symlink() and (path.is_file() or path.is_dir()))
    for fd in opened([folder, *found]):
        os.fsync(fd)


def drop_page_cache(folder: Path) -> None:
    """Drop what the page cache has of files below `folder`, which are on disk."""
    for fd in opened(path for path in folder.rglob("*") if path.is_file()):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def disk_bytes(folder: Path) -> int:
    """Return the bytes of the disk blocks below `folder`, each inode counted once."""
    stats = [path.lstat() for path in folder.rglob("*")]
    return 512 * sum({(stat.st_dev, stat.st_ino): stat.st_blocks for stat in stats}.values())


def versions() -> dict[str, str]:
    """Return the versions of what is loaded here."""
    found = {"python": sys.version.split()[0]}
    for package in ("torch", "transformers", "deepspeed", "safetensors", "tensorstore", "numpy"):
        if package in sys.modules:
            found[package] = version(package)
    if "zstore" in sys.modules:
        found["zstore"] = str(sys.modules["zstore"].__version__)
    return found


def free_port() -> int:
    """Return a TCP port that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
