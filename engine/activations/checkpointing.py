"""Activation checkpointing: torch's, under DeepSpeed's names, and a switch for all blocks of a model, the modules in its
outermost ModuleLists.

[Note: a checkpointed block]
`checkpoint(function, *args)` saves the tensors in `args`, and recomputes those of `function` in the backward pass. It is
torch's non-reentrant checkpointing, with the same random numbers and autocast state, so results are bit-identical. Autograd
saves the tensors, so the engine's saved-tensor hooks can offload them (see `offload`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from zstore.errors import UsageError

from ..config.config import load_config, read_config
from .offload import active_offload, find_blocks

_log = logging.getLogger("zstore")


class _ProcessSettings:
    """Settings of this process."""

    in_cpu: bool | None = None
    """Whether inputs go to host memory if no engine offloads them; None if `configure` was not called."""


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
    """Set whether `checkpoint` keeps the inputs of blocks in host memory in this process, until the next call.

    `deepspeed_config`, a dict or a path, has defaults in its `activation_checkpointing` section. Only `checkpoint_in_cpu` has
    an effect. Raises ConfigError for a wrong config.
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    is_path = isinstance(deepspeed_config, str | os.PathLike)
    raw = read_config(deepspeed_config) if is_path else {} if deepspeed_config is None else deepspeed_config
    if isinstance(raw, Mapping):  # other sections are not read
        section = raw.get("activation_checkpointing") or {}
        if isinstance(section, Mapping):
            section = {**section, **{key: value for key, value in given.items() if value is not None}}
        raw = {"activation_checkpointing": section}
    config = load_config(raw, name="zstore.checkpointing.configure(...)")
    for line in config.report():
        _log.warning("zstore.checkpointing.configure: %s", line)
    _ProcessSettings.in_cpu = config.settings.activation_checkpointing.cpu_checkpointing


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return _ProcessSettings.in_cpu is not None


def reset() -> None:
    """Do nothing, since there are no buffers to free. DeepSpeed's scripts call it."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, whose activations are recomputed in the backward. See [Note: a checkpointed block].

    Tensors that are not directly in `args` are saved unchanged.
    """
    offloading: AbstractContextManager[object] = nullcontext()
    if _ProcessSettings.in_cpu and torch.is_grad_enabled() and active_offload.get() is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        offloading = torch.autograd.graph.save_on_cpu(pin_memory=device_type == "cuda", device_type=device_type)
    with offloading:
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint
"""DeepSpeed's other name: `checkpoint` is not reentrant either."""


def checkpoint_blocks(model: nn.Module) -> None:
    """Checkpoint the blocks of `model`, in place, or use a transformers model's own method. Raises UsageError if the
    model has no blocks."""
    if getattr(model, "supports_gradient_checkpointing", False):
        for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):  # the newer one first
            method: Any = getattr(model, name, None)
            if method is not None:
                method(**{name.replace("enable", "kwargs"): {"use_reentrant": False}})
                return
    blocks = find_blocks(model)
    if not blocks:
        raise UsageError(
            '"gradient_checkpointing": true: the model has no blocks, which are modules in a ModuleList: put them '
            "there, or call zstore.checkpointing.checkpoint(function, *args) in its forward"
        )
    for block in blocks:
        forward = block.forward
        # The block's hooks, which gather its parameters, stay around it.
        if not (isinstance(forward, partial) and forward.func is _checkpoint_call):
            block.forward = partial(_checkpoint_call, forward)


def _checkpoint_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)` through `checkpoint`, with the tensors of `kwargs` as arguments."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return checkpoint(partial(_with_names, function, tuple(kwargs), len(args)), *args, *kwargs.values())


def _with_names(function: Callable[..., Any], names: tuple[str, ...], num_positional: int, *values: Any) -> Any:
    return function(*values[:num_positional], **dict(zip(names, values[num_positional:], strict=True)))
