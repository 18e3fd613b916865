"""The 16-bit types that a device computes natively: what "auto" takes, and a warning of a demanded type that is slow.

A CPU without 16-bit instructions multiplies in bf16 a hundred times slower than in fp32, and torch does so without a word.
A CPU with instructions for fp16 alone sums up in fp16 too, so there neither counts.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from ..config.config import Config

if TYPE_CHECKING:
    import torch

    from zstore.ranks.world import World

_FIRST_TENSOR_CORES = 7
"""Compute capability of the first GPUs that multiply fp16 faster than fp32 whatever the model (V100)."""


def native_types(device: torch.device | None = None) -> frozenset[str]:
    """Return which of "bf16" and "fp16" a device, by default this machine's first, has instructions for, as torch may use
    them."""
    import torch

    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
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
        found.get("architecture") == "x86_64" and not (found["avx512_bf16"] or found["amx_bf16"])
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


def precision_note(config: Config, chosen: str, native: Collection[str], device: str) -> tuple[int, str] | None:
    """Return the level and the text of a line about the precision that a config resolved to: the choice of "auto"
    and why, or a warning of a demanded type that the device ("CPU" or "GPU") has no instructions for."""
    switches = _switches(config)
    if True in switches.values():
        if chosen in native:
            return None
        return logging.WARNING, (
            f"config: {chosen}.enabled: this {device} has no fast {chosen}, so that matrix products are many times slower than "
            f'in fp32; write "{chosen}": {{"enabled": "auto"}}, which takes it only where it is fast, or false'
        )
    asked = " or ".join(name for name, switch in switches.items() if switch == "auto")
    reason = f"has no fast {asked}" if chosen == "fp32" else f"computes {chosen} natively"
    return (logging.INFO, f'precision: "auto" takes {chosen}, since this {device} {reason}') if asked else None


def _switches(config: Config) -> dict[str, bool | str]:
    return {"bf16": config.settings.bf16.enabled, "fp16": config.settings.fp16.enabled}
