"""The arguments of an offloaded optimizer: valid settings, and its parameters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from zstore.errors import UsageError
from zstore.io import user_path

from .registry import require_known


def check_kind(kind: Any) -> None:
    """Raise UsageError for anything but a class of optimizers that can be offloaded."""
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        got = f"an optimizer of class {type(kind).__name__}" if isinstance(kind, torch.optim.Optimizer) else repr(kind)
        raise UsageError(f"kind: expected a class derived from torch.optim.Optimizer, as torch.optim.AdamW, got {got}")
    require_known(kind)


def check_budget(nbytes: Any) -> None:
    """Raise UsageError for an invalid host budget."""
    if nbytes is not None and (not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes <= 0):
        raise UsageError(
            f"host_budget_bytes: expected a positive number of bytes, or None for no limit, got {nbytes!r}"
        )


def check_settings(device: str, path: Any, max_grad_norm: float | None) -> None:
    """Raise UsageError for invalid settings, alone or together."""
    if device not in ("nvme", "cpu"):
        raise UsageError(f'device: expected "nvme" or "cpu", where the state is kept, got {device!r}')
    if device == "nvme" and path is None:
        raise UsageError('device="nvme" needs a path: give an existing folder on the drive to use')
    if path is not None and not user_path(path).is_dir():
        raise UsageError(f"path: expected an existing folder, got {os.fspath(path)!r}; make it on the drive to use")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise UsageError(
            f"max_grad_norm: expected a positive number, or None to leave gradients as they are, got {max_grad_norm}"
        )


def groups_of(params: Any) -> tuple[Any, torch.Tensor]:
    """Return the parameters or groups as lists, and the first parameter. Raises UsageError if devices differ."""
    if isinstance(params, torch.Tensor):
        raise UsageError("params: expected an iterable of tensors or of group dicts, got a single tensor")
    if isinstance(params, torch.nn.Module):
        raise UsageError(
            "params: expected an iterable of tensors or of group dicts, got a module: give model.parameters()"
        )
    groups = [_group(each) if isinstance(each, Mapping) else each for each in params]
    members = chain.from_iterable(each["params"] if isinstance(each, dict) else [each] for each in groups)
    tensors = [member[1] if isinstance(member, tuple) else member for member in members]
    found = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    if not found:
        raise UsageError("params: expected at least one parameter, got none")
    devices = {tensor.device for tensor in found}
    if len(devices) > 1:
        raise UsageError(
            f"params: expected all on one device, got {', '.join(sorted(map(str, devices)))}: make an optimizer for each device"
        )
    return groups, found[0]


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    members = group["params"]
    return {**group, "params": [members] if isinstance(members, torch.Tensor) else list(members)}
