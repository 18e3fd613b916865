"""`zstore doctor`: reports this machine's hardware, how suitable a folder is for training from disk, and what to do."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from zstore._version import __version__
from zstore.errors import ConfigError, format_bytes
from zstore.format import Bytes
from zstore.io import Files, OpenFile, make_slab, num_cores, read_host_memory

from .options import Json
from .printing import make_console, print_json, printable

_NUM_THREADS = 8
BLOCK_BYTES = 4 * 2**20
"""Bytes per request: with all threads, enough in flight for a drive's full rate."""
RATE_BYTES = 512 * 2**20
"""Size of the file used to measure rates: about a second on a fast drive."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A compute device."""

    name: str
    memory_bytes: int
    native: tuple[str, ...]
    """The 16-bit types that it supports natively, from which "auto" in a config selects."""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder and its drive. None means not tested, because the folder cannot be written or has no space."""

    path: str
    free_bytes: int
    direct_io: bool | None = None
    """Transfers bypass the page cache."""
    hard_links: bool | None = None
    """Checkpoints of state on this drive need no copying."""
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    """Overwriting blocks that were written before, as updates do."""

    @property
    def fault(self) -> str | None:
        """Why zstore cannot use the folder, with the remedy."""
        if self.direct_io is None:
            return f"{self.path} cannot be written: check its permissions, or choose another folder"
        if self.read_bytes_per_s is None:
            return f"{self.path} has only {format_bytes(self.free_bytes)} free: free some space"
        return None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The findings of `zstore doctor`. Memory is None if the system does not report it."""

    system: str
    """Includes the versions of Python, torch and zstore."""
    devices: tuple[Device, ...]
    available_bytes: int | None
    """Available host memory, within the control groups' limits."""
    huge_pages: str | None
    """The kernel's mode: "always", "madvise" or "never"."""
    folder: Folder


def doctor_command(
    path: Annotated[Path, typer.Option(help="Folder on the drive to examine.", metavar="P")] = Path(),
    json: Json = False,
) -> int:
    """Print the report to stdout, as JSON or text; return 1 if something prevents zstore from working, else 0."""
    report = examine(path, rate_bytes=RATE_BYTES)
    fault, advice = report.folder.fault, tuple(_advice(report))
    if json:
        print_json(asdict(report) | {"fault": fault, "advice": advice})
    else:
        console = make_console()
        for name, value in _rows(report):
            console.print(f"{name:<14}{printable(value)}", soft_wrap=True)
        console.print("what to do:")
        for line in (*advice, *([] if fault is None else [fault])):
            console.print(f"- {printable(line)}", soft_wrap=True)
    return 0 if fault is None else 1


def examine(path: Path, *, rate_bytes: int) -> Diagnosis:
    """Examine this machine and the folder `path`, which is left unchanged.

    The rates are measured on a file of `rate_bytes`, or less on a small drive. Raises ConfigError if the folder does not
    exist.
    """
    import torch

    folder, memory = examine_folder(path, rate_bytes), read_host_memory()
    match = None
    with contextlib.suppress(OSError):
        match = re.search(r"\[(\w+)\]", Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text())
    return Diagnosis(
        system=f"{platform.platform()}, Python {platform.python_version()}, torch {torch.__version__}, zstore {__version__}",
        devices=tuple(_devices(memory.total_bytes or 0)),
        available_bytes=memory.available_bytes,
        huge_pages=match.group(1) if match else None,
        folder=folder,
    )


def _devices(memory_bytes: int) -> Iterator[Device]:
    """Yield the CPU and the CUDA devices that torch detects."""
    import torch

    from zstore.engine.plan.run import native_types

    def native(*device: Any) -> tuple[str, ...]:
        return tuple(sorted(native_types(torch.device(*device))))

    yield Device(name=f"{platform.machine()}, {num_cores()} cores", memory_bytes=memory_bytes, native=native("cpu"))
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Device(name=properties.name, memory_bytes=properties.total_memory, native=native("cuda", index))


def _advice(report: Diagnosis) -> Iterator[str]:
    """Yield what could be faster, each with its remedy, and what to do next."""
    folder, memory = report.folder, ""
    if folder.direct_io is False:
        yield "no direct I/O here: transfers go through the page cache, which is slower and outside the host budget"
    if folder.hard_links is False:
        yield "no hard links here: checkpoints are copied in the background instead of linked"
    if report.huge_pages == "never":
        yield "no huge pages, which halves the rate of direct I/O: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    if not report.devices[-1].native:
        yield 'no fast bf16 or fp16: train in fp32, which "bf16": {"enabled": "auto"} selects here'
    if folder.fault is not None:
        return
    if report.available_bytes is not None:
        memory = f" --memory {report.available_bytes // 10**9}GB"
    limits = f"{memory} --disk {folder.free_bytes // 10**9}GB"
    command = f"zstore plan --model gpt-base --gpus {len(report.devices) - 1}{limits}"
    yield f"see which config fits here (--model also takes the folder of a transformers model): {command}"


def _rows(report: Diagnosis) -> Iterator[tuple[str, str]]:
    yield "system", report.system
    for device in report.devices:
        native = ", ".join(device.native) or "fp32 only"
        yield "device", f"{device.name}, {format_bytes(device.memory_bytes)}, native types: {native}"
    if report.available_bytes is not None:
        yield "memory", f"{format_bytes(report.available_bytes)} available"
    yield "huge pages", report.huge_pages or "unknown"
    folder, words = report.folder, {True: "yes", False: "no", None: "not tested"}
    yield "folder", f"{folder.path}, {format_bytes(folder.free_bytes)} free"
    yield "direct I/O", words[folder.direct_io]
    yield "hard links", words[folder.hard_links]
    if folder.read_bytes_per_s is not None and folder.write_bytes_per_s is not None:
        read, write = folder.read_bytes_per_s / 1e9, folder.write_bytes_per_s / 1e9
        yield "drive", f"reads {read:.2f} GB/s, writes {write:.2f} GB/s"


def examine_folder(path: Path, rate_bytes: int) -> Folder:
    """Test a folder and its drive, using at most an eighth of the free space. Raises ConfigError if it does not exist."""
    if not path.is_dir():
        raise ConfigError(f"expected an existing folder, got {path}: create it, or pass another --path")
    files, name = Files(), str(path.resolve())
    free_bytes = files.free_bytes(path)
    try:
        with tempfile.TemporaryDirectory(prefix=".zstore-doctor-", dir=path) as scratch:
            sample, link = Path(scratch) / "rated", Path(scratch) / "link"
            num_blocks = min(rate_bytes, free_bytes // 8) // BLOCK_BYTES
            with files.opened(sample, write=True, create=True) as file:
                read, write = _measure(files, file, num_blocks) if num_blocks else (None, None)
            with contextlib.suppress(OSError):
                os.link(sample, link)
            return Folder(
                path=name,
                free_bytes=free_bytes,
                direct_io=file.direct,
                hard_links=link.exists(),
                read_bytes_per_s=read,
                write_bytes_per_s=write,
            )
    except OSError:
        return Folder(path=name, free_bytes=free_bytes)


def _measure(files: Files, file: OpenFile, num_blocks: int) -> tuple[float, float]:
    """Return the rates of reading and overwriting this many blocks of a new file, in bytes per second."""
    # The data is random, since some drives store zeros at no cost. Each thread has one block.
    slab = make_slab(_NUM_THREADS * BLOCK_BYTES)
    slab[:] = np.random.default_rng(0).integers(0, 256, slab.size, dtype=np.uint8)

    def measure(transfer: Callable[[Bytes, int], None], finish: Callable[[], None] = lambda: None) -> float:
        def work(thread: int) -> None:
            for number in range(thread, num_blocks, _NUM_THREADS):
                transfer(slab[thread * BLOCK_BYTES : (thread + 1) * BLOCK_BYTES], number * BLOCK_BYTES)

        start_s = time.perf_counter()
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            list(threads.map(work, range(_NUM_THREADS)))
        finish()
        return num_blocks * BLOCK_BYTES / (time.perf_counter() - start_s)

    files.allocate(file, num_blocks * BLOCK_BYTES)
    for _ in range(2):  # over existing data, as an update writes
        write_rate = measure(partial(files.write_from, file), lambda: files.sync_data(file))
    if hasattr(os, "posix_fadvise"):  # drops cached data, so that it is read from the drive
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return measure(partial(files.read_into, file)), write_rate
