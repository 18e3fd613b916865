"""`zstore doctor`: the hardware of this machine, and how well one of its folders suits training from disk."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from zstore._version import __version__
from zstore.io import HUGE_PAGE_BYTES, PinnedSlabs, make_slab, num_cores, read_host_memory
from zstore.sizes import format_bytes

from .drive import BLOCK_BYTES, NUM_THREADS, RATE_BYTES, DriveReport, FolderReport, measure_drive, probe_folder
from .options import Json
from .printing import make_console, print_json, printable

if TYPE_CHECKING:
    from zstore.engine.plan.rates import MatmulRates

_PACKAGES = (
    "torch", "numpy", "zarr", "numcodecs", "ml_dtypes", "crc32c", "safetensors", "fsspec", "pydantic",
    "transformers", "tensorstore",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device that computes."""

    kind: str
    """"cpu" or "cuda"."""
    name: str
    memory_bytes: int
    num_cores: int | None
    """Cores this process may use; None on an accelerator."""
    pinning: bool | None
    """Whether host memory can be registered for it; None on the CPU, which needs none."""
    matmul_flops: Mapping[str, float]
    """Precision -> operations a second in matrix products, of one core of a CPU, of a whole GPU."""
    matmul_text: str
    """The same in words."""
    native: tuple[str, ...]
    """The 16-bit precisions that it computes natively: what "auto" in a config chooses from."""


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Host memory. None: the system does not say."""

    total_bytes: int | None
    available_bytes: int | None
    """Within the control groups' limits."""
    limit_bytes: int | None
    """The least limit of the control groups, if there is one."""
    transparent_huge_pages: str | None
    """The kernel's mode: "always", "madvise" or "never"."""
    huge_pages: bool | None
    """Whether a buffer of ours really came in huge pages, which about doubles the rate of direct reads."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All that `zstore doctor` found out."""

    system: str
    versions: dict[str, str | None]
    """Package -> version; None when it is not installed."""
    devices: tuple[Device, ...]
    memory: MemoryReport
    folder: FolderReport
    drive: DriveReport | None
    """None when nothing can be written there."""
    faults: tuple[str, ...]
    """Reasons why zstore cannot work in the folder."""
    notes: tuple[str, ...]
    """Things that work, but slower than they could, and the remedy."""


def examine(path: Path, *, rate_bytes: int = RATE_BYTES) -> Diagnosis:
    """Look at this machine and at the folder `path`, which is left as it was.

    The rates are measured on a file of `rate_bytes`, or less on a small drive. `ConfigError` if the folder does
    not exist.
    """
    folder = probe_folder(path)
    drive = measure_drive(path, rate_bytes) if folder.writable else None
    memory = _examine_memory()
    devices = tuple(_devices(memory))
    return Diagnosis(
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        versions={
            "python": platform.python_version(),
            "zstore": __version__,
            **{name: _version(name) for name in _PACKAGES},
        },
        devices=devices,
        memory=memory,
        folder=folder,
        drive=drive,
        faults=tuple(_faults(folder, drive)),
        notes=tuple(_notes(folder, memory, devices)),
    )


def doctor_command(
    path: Annotated[Path, typer.Option(help="Folder on the drive to examine.", metavar="P")] = Path(),
    json: Json = False,
) -> int:
    """Print the report on stdout, as JSON or for people; 1 when something keeps zstore from working, else 0."""
    report = examine(path, rate_bytes=RATE_BYTES)
    if json:
        print_json(asdict(report))
    else:
        _print(report)
    return 1 if report.faults else 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _examine_memory() -> MemoryReport:
    memory = read_host_memory()
    mode = re.search(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled"))
    return MemoryReport(
        total_bytes=memory.total_bytes,
        available_bytes=memory.available_bytes,
        limit_bytes=memory.limit_bytes,
        transparent_huge_pages=mode.group(1) if mode else None,
        huge_pages=_gets_huge_pages(),
    )


def _gets_huge_pages() -> bool | None:
    before = _anonymous_huge_bytes()
    if before is None:
        return None
    slab = make_slab(8 * HUGE_PAGE_BYTES)
    slab[:] = 1
    after = _anonymous_huge_bytes() or 0
    return after - before >= slab.size // 2


def _anonymous_huge_bytes() -> int | None:
    found = re.search(r"^AnonHugePages:\s+(\d+) kB", _read("/proc/self/smaps_rollup"), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


def _devices(memory: MemoryReport) -> Iterator[Device]:
    """Yield the CPU, and the CUDA devices that torch sees, with their rates of matrix products."""
    import torch

    from zstore.engine.plan.rates import measure_rates

    name = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    yield Device(
        kind="cpu",
        name=name.group(1) if name else platform.processor() or platform.machine(),
        memory_bytes=memory.total_bytes or 0,
        num_cores=num_cores(),
        pinning=None,
        **_describe_rates(measure_rates(torch.device("cpu"))),
    )
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        yield Device(
            kind="cuda",
            name=properties.name,
            memory_bytes=properties.total_memory,
            num_cores=None,
            pinning=_can_pin(),
            **_describe_rates(measure_rates(torch.device("cuda", index))),
        )


def _describe_rates(rates: MatmulRates) -> dict[str, Any]:
    return {"matmul_flops": rates.flops, "matmul_text": rates.text(), "native": tuple(sorted(rates.native))}


def _can_pin() -> bool:
    """Whether a slab can be registered with CUDA, as the buffer pool does."""
    with contextlib.closing(PinnedSlabs()) as slabs:
        return slabs.make(HUGE_PAGE_BYTES).size > 0 and not slabs.messages


def _faults(folder: FolderReport, drive: DriveReport | None) -> Iterator[str]:
    if not folder.writable:
        yield f"{folder.path} cannot be written: check its permissions, or give another folder"
    elif drive is None:
        yield f"{folder.path} has only {format_bytes(folder.free_bytes)} free: free some space"


def _notes(folder: FolderReport, memory: MemoryReport, devices: tuple[Device, ...]) -> Iterator[str]:
    if folder.direct_io is False:
        yield "no direct I/O here: transfers go through the page cache, slower and not counted in the host budget"
    if folder.hard_links is False:
        yield "no hard links here: checkpoints are copied in the background instead of linked"
    if folder.preallocation is False:
        yield "no preallocation here: a full disk may be noticed only in the middle of a step"
    if memory.huge_pages is False:
        yield (
            f"no huge pages (mode {memory.transparent_huge_pages}): direct I/O runs at about half the rate; "
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
    for device in devices:
        if not device.native:
            yield (
                f"no fast bf16 or fp16 on this {device.kind.upper()}: train in fp32, which "
                '"bf16": {"enabled": "auto"} selects here'
            )
    if any(device.pinning is False for device in devices):
        yield "host memory cannot be pinned: raise the locked-memory limit (ulimit -l unlimited)"


def _read(path: str) -> str:
    """The text of a system file, or nothing if there is no such file."""
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "not tried"}[value]


def _size(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else format_bytes(num_bytes)


def _rows(report: Diagnosis) -> Iterator[tuple[str, str]]:
    yield "system", report.system
    installed = [f"{name} {version}" for name, version in report.versions.items() if version]
    yield "versions", ", ".join(installed)
    missing = [name for name, version in report.versions.items() if not version]
    if missing:
        yield "not installed", ", ".join(missing)
    for device in report.devices:
        extra = f", {device.num_cores} cores" if device.num_cores else f", pinning: {_yes(device.pinning)}"
        yield device.kind, f"{device.name}, {format_bytes(device.memory_bytes)}{extra}"
        yield "matrix products", device.matmul_text
    memory = report.memory
    yield "memory", f"{_size(memory.total_bytes)}, {_size(memory.available_bytes)} available"
    if memory.limit_bytes is not None:
        yield "memory limit", format_bytes(memory.limit_bytes)
    yield "huge pages", f"{_yes(memory.huge_pages)} (mode {memory.transparent_huge_pages})"
    folder = report.folder
    yield "folder", folder.path
    yield "file system", f"{folder.file_system or 'unknown'}, {format_bytes(folder.free_bytes)} free"
    yield "direct I/O", _yes(folder.direct_io)
    yield "hard links", _yes(folder.hard_links)
    yield "preallocation", _yes(folder.preallocation)
    if report.drive is not None:
        yield "drive reads", _rate(report.drive.read_bytes_per_s, report.drive)
        yield "drive writes", _rate(report.drive.write_bytes_per_s, report.drive)
        yield "drive, new files", _rate(report.drive.write_new_bytes_per_s, report.drive)


def _rate(bytes_per_s: float, drive: DriveReport) -> str:
    how = "" if drive.direct_io else ", through the page cache"
    return f"{bytes_per_s / 1e9:.2f} GB/s ({NUM_THREADS} threads x {BLOCK_BYTES // 2**20} MiB{how})"


def _print(report: Diagnosis) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(report):
        table.add_row(name, value)
    make_console().print(table)
    for line in (*(f"fault: {fault}" for fault in report.faults), *(f"note: {note}" for note in report.notes)):
        print(printable(line), file=sys.stderr)
