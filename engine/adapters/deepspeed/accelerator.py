"""`deepspeed.accelerator`: the device that the engine computes on, under the names by which scripts ask for it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from .names import missing

_HAS_CUDA = torch.cuda.is_available()


def _device_name(index: int | None = None) -> str:
    """Return "cuda" or "cpu"; with an index "cuda:N"."""
    if not _HAS_CUDA:
        return "cpu"
    return "cuda" if index is None else f"cuda:{index}"


def _current_name() -> str:
    return _device_name(torch.cuda.current_device() if _HAS_CUDA else None)


def _dtypes() -> list[torch.dtype]:
    """Return the types that a config may ask for."""
    bf16 = [torch.bfloat16] if not _HAS_CUDA or torch.cuda.is_bf16_supported() else []
    return [torch.float32, torch.float16, *bf16]


_BOTH: dict[str, Callable[..., Any]] = {
    "device_name": _device_name,
    "device": lambda index=None: torch.device(_device_name(index)),
    "current_device_name": _current_name,
    "is_available": lambda: True,
    "is_fp16_supported": lambda: True,
    "supported_dtypes": _dtypes,
    "random": lambda: torch.random,
    "amp": lambda: torch.amp,
    "is_synchronized_device": lambda: not _HAS_CUDA,
    "communication_backend_name": lambda: "nccl" if _HAS_CUDA else "gloo",
    "on_accelerator": lambda tensor: tensor.device.type == _device_name(),
    "pin_memory": lambda tensor, align_bytes=1: tensor.pin_memory() if _HAS_CUDA else tensor,
    "is_pinned": torch.Tensor.is_pinned,
}


def _nothing(*_: object, **__: object) -> None:
    """Do nothing."""


def _zero(*_: object, **__: object) -> int:
    return 0


_CPU: dict[str, Callable[..., Any]] = {
    "current_device": _zero,
    "device_count": lambda: int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE", "1")),
    "set_device": _nothing,
    "is_bf16_supported": lambda: True,
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "get_rng_state": torch.get_rng_state,
    "set_rng_state": torch.set_rng_state,
    "initial_seed": torch.initial_seed,
    **{f"{most}memory_{what}": _zero for most in ("", "max_") for what in ("allocated", "reserved", "cached")},
    **dict.fromkeys(("empty_cache", "reset_peak_memory_stats", "reset_max_memory_allocated"), _nothing),
    **dict.fromkeys(("range_push", "range_pop"), _nothing),
}
"""Names that torch.cuda has and torch.cpu lacks: ranks count as devices, memory is not counted."""


class TorchAccelerator:
    """CUDA if there is a device, else the CPU.

    It has the functions of `torch.cuda`, or of `torch.cpu` and the missing ones, those of `_BOTH`, and types of tensors.
    """

    def __getattr__(self, name: str) -> Any:
        if name in _BOTH:
            return _BOTH[name]
        if name.endswith("Tensor") and hasattr(torch, name):
            return functools.partial(getattr(torch, name), device=_current_name())
        if not _HAS_CUDA and name in _CPU:
            return _CPU[name]
        module: Any = torch.cuda if _HAS_CUDA else torch.cpu
        if not name.startswith("_") and hasattr(module, name):
            return getattr(module, name)
        raise AttributeError(missing(f"deepspeed.accelerator.get_accelerator().{name}"), name=name, obj=self)


def is_current_accelerator_supported() -> bool:
    """Return True: there is CUDA, or the CPU."""
    return True


@functools.cache
def get_accelerator() -> TorchAccelerator:
    """Return the device of this process."""
    return TorchAccelerator()
