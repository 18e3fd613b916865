"""The hardware and software that figures were taken on."""

import argparse
import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import zstore
from bench.limits import limit_name


def bench_parser(
    about: str | None, *, path: bool = True, device: bool = False, gib: float | None = None, out: str = "--json"
) -> argparse.ArgumentParser:
    """Return a parser of the options that benchmarks share; `gib` is the default of the file that measures the disk."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if path:
        parser.add_argument("--path", type=Path, default=Path.cwd(), help="folder on the drive to measure")
    if device:
        parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="device to compute on")
    if gib is not None:
        parser.add_argument("--gib", type=float, default=gib, help="GiB of the file that measures the disk's limit")
    parser.add_argument(out, type=Path, help="write the figures to this file, as JSON")
    return parser


def write_figures(path: Path | None, figures: Any) -> None:
    """Write figures to the file that was asked for, if one was."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


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
    for package in ("torch", "transformers", "numpy", "deepspeed"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return facts | cuda_facts()


def cuda_facts() -> dict[str, str | int]:
    """Return what is to be known of the CUDA devices, their driver and libraries; nothing where torch sees none."""
    import torch

    if not torch.cuda.is_available():
        return {}
    device = torch.cuda.get_device_properties(0)
    nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return {
        "device": device.name,
        "devices": torch.cuda.device_count(),
        "device_memory_bytes": device.total_memory,
        "driver": _driver(),
        "cuda": torch.version.cuda or "none",
        "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl),
    }


def _driver() -> str:
    """Return the version of the NVIDIA driver, as the kernel tells it or else nvidia-smi; "unknown" where neither does."""
    first = next(iter(_lines("/proc/driver/nvidia/version")), "")
    found = next((word for word in first.split() if word[:1].isdigit() and "." in word), "")
    if found or not shutil.which("nvidia-smi"):
        return found or "unknown"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip().partition("\n")[0] or "unknown"


def choose_device(choice: str) -> str:
    """Return "cuda" or "cpu" for what a benchmark's `--device` says; "auto" is CUDA where torch sees a device.

    "cpu" hides CUDA devices from this process, whose engines would take one.
    """
    import torch

    if choice == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return choice
    if choice == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch sees no CUDA device here")
    return choice


def _field(path: str, name: str) -> str:
    return next((line.partition(":")[2].strip() for line in _lines(path) if line.startswith(name)), "")


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines() if Path(path).exists() else []


def _drive(folder: Path) -> str:
    """Return the device and file system that hold `folder`."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return ""
    fields = [line.split() for line in mounts.read_text(encoding="utf-8").splitlines()]
    within = [(at, f"{device} ({kind})") for device, at, kind, *_ in fields if folder.resolve().is_relative_to(at)]
    return max(within, key=lambda pair: len(pair[0]))[1] if within else ""
