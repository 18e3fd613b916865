"""The hardware and software that figures were taken on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import zstore
from bench.limits import limit_name


def machine(folder: Path) -> dict[str, str | int]:
    """Return what a reader of figures must know of this machine and of the drive below `folder`."""
    facts: dict[str, str | int] = {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": os.cpu_count() or 0,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "drive": _drive(folder),
        "system": platform.platform(),
        "limit": limit_name(),
        "python": platform.python_version(),
        "zstore": zstore.__version__,
    }
    for package in ("torch", "transformers", "numpy"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return facts


def _field(path: str, name: str) -> str:
    lines = Path(path).read_text(encoding="utf-8").splitlines() if Path(path).exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _drive(folder: Path) -> str:
    """Return the device and file system that hold `folder`."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return ""
    fields = [line.split() for line in mounts.read_text(encoding="utf-8").splitlines()]
    within = [(mount, f"{device} ({kind})") for device, mount, kind, *_ in fields if _holds(mount, folder.resolve())]
    return max(within, key=lambda pair: len(pair[0]))[1] if within else ""


def _holds(mount: str, folder: Path) -> bool:
    return folder.is_relative_to(mount)
