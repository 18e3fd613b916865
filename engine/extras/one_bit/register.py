"""Registers the rule of the optimizers that send signs."""

from collections.abc import Mapping
from typing import Any

import torch

from ...optim.kernel import Kernel
from ...optim.rules import Rule, register
from .adam import AdamRule
from .classes import ONE_BIT, OneBitAdam, OneBitLamb, ZeroOneAdam
from .kernel import OneBitKernel, planned_slots
from .lamb import LambRule
from .rule import SignRule
from .step import OneBitStep
from .zero_one import ZeroOneRule

_RULES: dict[type[torch.optim.Optimizer], type[SignRule]] = {
    OneBitAdam: AdamRule,
    ZeroOneAdam: ZeroOneRule,
    OneBitLamb: LambRule,
}


def sign_rule(kind: type[torch.optim.Optimizer]) -> SignRule:
    """Return the rule of the class."""
    return _RULES[kind]()


def _kernel(kind: type[torch.optim.Optimizer], _group: Mapping[str, Any]) -> Kernel:
    return OneBitKernel(sign_rule(kind))


register(Rule(kinds=ONE_BIT, kernel=_kernel, stepper=OneBitStep, slots=planned_slots))
