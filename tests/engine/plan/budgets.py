"""Configs with everything on disk, whose host budget a test chooses; what autograd keeps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.engine import runs


def make_config(nvme: str, **keys: Any) -> dict[str, Any]:
    zero = {"stage3_param_persistence_threshold": 1000} | keys.pop("zero", {})
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    usual = {"gradient_accumulation_steps": 1, "gradient_clipping": 0.5, "optimizer": optimizer, "scheduler": None}
    config = runs.make_config(3, "nvme", nvme, "nvme", **(usual | keys))
    config["zero_optimization"] |= zero
    return config


def kept_by_autograd(model: nn.Module, forward: Callable[[], object]) -> int:
    """Return the bytes that a forward keeps for its backward, beside the parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
