"""DeepSpeed's names for reading and changing state by parameter, as `deepspeed.utils` has them.

All are collectives: every rank calls them for the same parameters, in the same order. For a parameter that is not trained,
or that no open engine has, getters return None.
"""

from __future__ import annotations

import torch
from torch import nn

from zstore.errors import UsageError

from ..params.record import ParameterRecord
from .access import Access, live


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the fp32 master of a parameter, whole, on the CPU."""
    found = _find(param)
    return None if found is None else found[0].parameter(found[1].name, rank0_only=False)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return what the optimizer keeps of a parameter, as "exp_avg", whole, on the CPU."""
    found = _find(param)
    return None if found is None else found[0].optimizer_state(found[1].name, optim_state_key, rank0_only=False)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return a parameter's gradient in the step under way, averaged over ranks and unscaled, fp32, on the CPU."""
    found = _find(param)
    return None if found is None else found[0].gradient(found[1].name, rank0_only=False)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace a parameter and its fp32 master; rank 0's values count."""
    access, record = _required(param)
    access.set_parameter(record.name, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace what the optimizer keeps of a parameter; rank 0's values count."""
    access, record = _required(param)
    access.set_optimizer_state(record.name, optim_state_key, value)


def _find(param: nn.Parameter) -> tuple[Access, ParameterRecord] | None:
    for access in live():
        record = access.record_of(param)
        if record is not None and record.group is not None:
            return access, record
    return None


def _required(param: nn.Parameter) -> tuple[Access, ParameterRecord]:
    found = _find(param)
    if found is None:
        raise UsageError(f"a parameter of shape {tuple(param.shape)} is trained by no open engine")
    return found
