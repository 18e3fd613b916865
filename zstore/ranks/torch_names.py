"""Names of torch that are not the same in all versions from 2.9 on."""

import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed

all_gather_single: Callable[..., Any] = (
    getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = (
    getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
)
"""By their former names, now deprecated, in torch 2.9."""


def cpu_capabilities() -> Mapping[str, Any]:
    """Return what this machine's CPU has, by torch's names: `torch.cpu.get_capabilities`, or in torch 2.9, which
    has none, the part of it that zstore asks for."""
    if hasattr(torch.cpu, "get_capabilities"):
        return torch.cpu.get_capabilities()
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\nflags")[2].partition("\n")[0].split()
    names = ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16")
    return {"architecture": platform.machine(), **{name: name in flags for name in names}}
