"""`deepspeed.accelerator`: the device that the engine computes on, under the names that scripts ask it by."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from .names import missing


class Accelerator:
    """CUDA where there is a device, else the CPU.

    Beside its own methods it has those of `torch.cuda` (or of `torch.cpu`, as far as those go) and the tensor types of
    either. Memory counters are 0 on the CPU.
    """

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"
        self._module: Any = torch.cuda if self._name == "cuda" else torch.cpu

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cuda" or "cpu"; with an index "cuda:N"."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """Return the device, as an object or a `with` block that makes it the current one."""
        return torch.device(self.device_name(device_index))

    def current_device(self) -> int:
        """Return the index of the current device; 0 on the CPU."""
        return int(torch.cuda.current_device()) if self._name == "cuda" else 0

    def current_device_name(self) -> str:
        """Return "cuda:N" or "cpu"."""
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        """Return the devices of this machine; on the CPU the ranks there."""
        return (
            torch.cuda.device_count()
            if self._name == "cuda"
            else int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE", "1"))
        )

    def set_device(self, device_index: int) -> None:
        """Make a device the current one; nothing on the CPU."""
        if self._name == "cuda":
            torch.cuda.set_device(device_index)

    def is_available(self) -> bool:
        """Return True: the CPU always is."""
        return True

    def is_synchronized_device(self) -> bool:
        """Return whether operations are done when they return: on the CPU."""
        return self._name == "cpu"

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed: "nccl" or "gloo"."""
        return "nccl" if self._name == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        """Return whether the device computes in bf16."""
        return self._name == "cpu" or bool(torch.cuda.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """Return whether the device computes in fp16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the types that a config may ask for."""
        half = [torch.bfloat16] if self.is_bf16_supported() else []
        return [torch.float32, torch.float16, *half]

    def random(self) -> Any:
        """Return torch.random."""
        return torch.random

    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator."""
        torch.cuda.manual_seed(seed) if self._name == "cuda" else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        torch.cuda.manual_seed_all(seed) if self._name == "cuda" else torch.manual_seed(seed)

    def amp(self) -> Any:
        """Return torch.amp."""
        return torch.amp

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on such a device."""
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return a copy of `tensor` in pinned memory; on the CPU the tensor itself."""
        del align_bytes
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in pinned memory."""
        return tensor.is_pinned()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name.endswith("Tensor") and hasattr(torch, name):
            return functools.partial(getattr(torch, name), device=self.current_device_name())
        if hasattr(self._module, name):
            return getattr(self._module, name)
        if self._name == "cpu" and name in _MEMORY:
            return _MEMORY[name]
        raise AttributeError(missing(f"deepspeed.accelerator.get_accelerator().{name}"), name=name, obj=self)


def _nothing(*_: object, **__: object) -> None:
    """Do nothing."""


def _no_bytes(*_: object, **__: object) -> int:
    return 0


_MEMORY: dict[str, Callable[..., Any]] = {
    "memory_allocated": _no_bytes,
    "max_memory_allocated": _no_bytes,
    "memory_reserved": _no_bytes,
    "max_memory_reserved": _no_bytes,
    "memory_cached": _no_bytes,
    "max_memory_cached": _no_bytes,
    "empty_cache": _nothing,
    "reset_peak_memory_stats": _nothing,
    "reset_max_memory_allocated": _nothing,
    "range_push": _nothing,
    "range_pop": _nothing,
    "get_rng_state": torch.get_rng_state,
    "set_rng_state": torch.set_rng_state,
    "initial_seed": torch.initial_seed,
}
"""Of `torch.cuda`'s functions those that have nothing to do or to count on the CPU, and those that torch has for it."""


def is_current_accelerator_supported() -> bool:
    """Return True: there is CUDA, or the CPU."""
    return True


@functools.cache
def get_accelerator() -> Accelerator:
    """Return the device of this process."""
    return Accelerator()
