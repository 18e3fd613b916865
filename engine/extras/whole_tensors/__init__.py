"""Optimizers whose step needs a whole tensor: Adafactor, LAMB and Muon."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...optim.classes.lamb import Lamb
from ...optim.classes.muon import MuonWithAdam
from ...optim.kernel import Kernel, kernel_for
from ...optim.rules import Kind, Rule, register
from ...plan.plan import Slots, TensorSlot
from .kernel import TensorKernel
from .step import TensorStep


def _kernel(kind: Kind, group: Mapping[str, Any]) -> Kernel:
    if kind is MuonWithAdam:
        return TensorKernel(torch.optim.Muon, group) if group["use_muon"] else kernel_for(torch.optim.AdamW, group)
    return TensorKernel(kind, group)


def _slots_of(kernel: Kernel, shape: Sequence[int]) -> Slots:
    if isinstance(kernel, TensorKernel):
        return tuple(TensorSlot(slot.name, slot.shape) for slot in kernel.arrays(0, shape))
    return kernel.slots


register(
    Rule(
        kinds=(Lamb, torch.optim.Adafactor, torch.optim.Muon, MuonWithAdam),
        kernel=_kernel,
        slots=_slots_of,
        stepper=lambda _, state, world: TensorStep(state, world),
    )
)
