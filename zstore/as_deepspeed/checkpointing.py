"""`deepspeed.checkpointing`: torch's activation checkpointing, with the inputs in host memory where that is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from zstore.errors import UsageError

from .config import raw_config

_log = logging.getLogger("zstore")


class _Choice:
    """What `configure` was told; None before."""

    in_cpu: bool | None = None


def configure(  # noqa: PLR0913, PLR0917 - DeepSpeed's arguments
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say where `checkpoint` keeps the inputs of a block: in host memory with `checkpoint_in_cpu`, or the config's
    `activation_checkpointing.cpu_checkpointing`.

    The other arguments are not needed, and one line says so. Raises UsageError for `mpu_`.
    """
    if mpu_ is not None:
        raise UsageError("deepspeed.checkpointing.configure(mpu_=...): there is no model parallelism; pass None")
    if checkpoint_in_cpu is None and deepspeed_config is not None:
        checkpoint_in_cpu = raw_config(deepspeed_config).get("activation_checkpointing", {}).get("cpu_checkpointing")
    _Choice.in_cpu = bool(checkpoint_in_cpu)
    others = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "synchronize": synchronize,
        "profile": profile,
    }
    idle = [name for name, asked in others.items() if asked]
    if idle:
        _log.warning(
            "deepspeed.checkpointing.configure: no effect of %s; torch checkpoints the blocks", ", ".join(idle)
        )


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return _Choice.in_cpu is not None


def reset() -> None:
    """Do nothing: torch keeps no buffers between iterations."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, whose activations are computed again in the backward."""
    with torch.autograd.graph.save_on_cpu() if _Choice.in_cpu else nullcontext():
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Do as `checkpoint`, which is not reentrant either."""
    return checkpoint(function, *args)
