"""The 16-bit types that a device computes natively: what "auto" takes, and a warning of a demanded type that is slow.

A CPU without 16-bit instructions multiplies in bf16 a hundred times slower than in fp32, and torch does so without a word.
A CPU with instructions for fp16 alone sums up in fp16 too, so there neither counts.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch

from zstore.ranks.world import World

from ..config.config import Config

_log = logging.getLogger("zstore")

_FIRST_TENSOR_CORES = 7
"""Compute capability of the first GPUs that multiply fp16 faster than fp32 whatever the model (V100)."""


def native_types(device: torch.device) -> frozenset[str]:
    """Return which of "bf16" and "fp16" a device has instructions for, as torch may use them."""
    if device.type == "cuda":
        has = {
            "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
            "fp16": torch.cuda.get_device_capability(device)[0] >= _FIRST_TENSOR_CORES,
        }
        return frozenset(name for name, found in has.items() if found)
    found = torch.cpu.get_capabilities()
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    # oneDNN emulates bf16 on any x86 CPU with AVX-512, but asks an Arm CPU for its instructions.
    if not (has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()) or (
        found["architecture"] == "x86_64" and not (found["avx512_bf16"] or found["amx_bf16"])
    ):
        return frozenset()
    has_fp16 = found.get("avx512_fp16") or found.get("amx_fp16")
    return frozenset({"bf16", "fp16"} if has_fp16 else {"bf16"})


def find_native(config: Config, world: World) -> frozenset[str]:
    """Return the types that a run's precision is chosen by: rank 0's; none if the config leaves 16-bit types alone (all
    ranks)."""
    if not any(_switches(config).values()):
        return frozenset()
    return frozenset(world.broadcast_object(sorted(native_types(world.device)) if world.rank == 0 else None))


def choice_text(config: Config, chosen: str, device: str) -> str | None:
    """Return the line that names the precision that "auto" in `config` chose and why; None if a precision is demanded."""
    switches = _switches(config)
    if True in switches.values() or "auto" not in switches.values():
        return None
    asked = " or ".join(name for name, switch in switches.items() if switch == "auto")
    reason = f"has no fast {asked}" if chosen == "fp32" else f"computes {chosen} natively"
    return f'precision: "auto" takes {chosen}, since this {device} {reason}'


def slow_text(config: Config, native: Collection[str], device: str) -> str | None:
    """Return a warning of the 16-bit precision that `config` demands and the device has no instructions for."""
    for name, switch in _switches(config).items():
        if switch is True and name not in native:
            return (
                f"config: {name}.enabled: this {device} has no fast {name}, so that matrix products are many times slower than "
                f'in fp32; write "{name}": {{"enabled": "auto"}}, which takes it only where it is fast, or false'
            )
    return None


def log_precision(config: Config, chosen: str, native: Collection[str], device: torch.device) -> None:
    """Log the precision that "auto" resolved to, or warn of a demanded type that this device is slow in."""
    kind = "GPU" if device.type == "cuda" else "CPU"
    if (choice := choice_text(config, chosen, kind)) is not None:
        _log.info("%s", choice)
    if (warning := slow_text(config, native, kind)) is not None:
        _log.warning("%s", warning)


def _switches(config: Config) -> dict[str, bool | str]:
    return {"bf16": config.settings.bf16.enabled, "fp16": config.settings.fp16.enabled}
