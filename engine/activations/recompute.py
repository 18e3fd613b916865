"""`gradient_checkpointing`: one switch that lets a model's blocks be computed again in the backward."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from zstore.errors import UsageError

from ..config.sections import ActivationCheckpointingSection
from .blocks import find_blocks
from .checkpointing import checkpoint, checkpoint_call, use_section

_ENABLING = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
"""Methods of transformers' models, the newer one first."""


def set_up_checkpointing(model: nn.Module, section: ActivationCheckpointingSection, *, enable: bool) -> None:
    """Let blocks be checkpointed as the section says, and with `enable` the blocks of `model`, which is changed in place.

    Raises UsageError if the model has no blocks.
    """
    use_section(section)
    if enable and not _enable_transformers(model):
        blocks = find_blocks(model)
        if not blocks:
            raise UsageError(
                '"gradient_checkpointing": true: the model has no blocks, which are modules in a ModuleList: put them '
                "there, or call zstore.checkpointing.checkpoint(function, *args) in its forward"
            )
        for block in blocks:
            _checkpoint_block(block)
    if enable or section.synchronize_checkpoint_boundary or section.profile:
        _use_own_function(model)


def _enable_transformers(model: nn.Module) -> bool:
    """Let one of transformers' models checkpoint its layers; return False for any other model."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        return False
    for name in _ENABLING:
        method: Any = getattr(model, name, None)
        if method is not None:
            method(**{name.replace("enable", "kwargs"): {"use_reentrant": False}})
            return True
    return False


def _use_own_function(model: nn.Module) -> None:
    """Let the checkpointed layers of transformers' models use `checkpoint`."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) and hasattr(module, "_gradient_checkpointing_func"):
            vars(module)["_gradient_checkpointing_func"] = checkpoint


def _checkpoint_block(block: nn.Module) -> None:
    """Checkpoint a block's forward; its hooks, which gather its parameters, stay around it."""
    former = block.forward
    if not (isinstance(former, partial) and former.func is checkpoint_call):
        block.forward = partial(checkpoint_call, former)
