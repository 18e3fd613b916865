"""Registers the rules of the optimizers whose step needs a whole tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...optim.kernel import Kernel, kernel_for
from ...optim.lamb import Lamb
from ...optim.rules import Kind, Rule, register
from ...plan.plan import Slots, TensorSlot
from .kernel import TensorKernel
from .muon import MuonWithAdam, muon_from_config
from .step import TensorStep


def _kernel(kind: Kind, group: Mapping[str, Any]) -> Kernel:
    if kind is MuonWithAdam:
        return TensorKernel(torch.optim.Muon, group) if group["use_muon"] else kernel_for(torch.optim.AdamW, group)
    return TensorKernel(kind, group)


def _slots_of(kernel: Kernel, shape: Sequence[int]) -> Slots:
    if isinstance(kernel, TensorKernel):
        return tuple(TensorSlot(slot.name, slot.shape) for slot in kernel.arrays(0, shape))
    return kernel.slots


_TENSORS = Rule(
    kinds=(Lamb, torch.optim.Adafactor, MuonWithAdam),
    kernel=_kernel,
    slots=_slots_of,
    stepper=lambda _, state, world: TensorStep(state, world),
)
register(_TENSORS)
register(replace(_TENSORS, kinds=(torch.optim.Muon,), make=muon_from_config))
