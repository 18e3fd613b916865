"""The state of a parameter under the optimizers that send signs, as a kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...optim.kernel import Kernel, ParameterStep, Scalars, WholeStep
from ...plan.plan import RanksSlot, Slots
from .rule import SignRule
from .signs import chunk_numel


class OneBitKernel(Kernel):
    """Kernel of parameters that a rule updates: the slots that are the same on every rank are in the store."""

    def __init__(self, rule: SignRule) -> None:
        self.rule = rule
        self.slots = tuple(name for name in rule.slots if name not in rule.own_slots)

    def initial(self) -> Scalars:
        return self.rule.initial()

    def start(self, group: Mapping[str, Any], scalars: Scalars) -> ParameterStep:
        """The step was taken, and counted, before."""
        return WholeStep(scalars)


def planned_slots(kernel: Kernel, shape: Sequence[int]) -> Slots:
    """Return a rank's arrays for a parameter of `shape`, and between ranks the loss of its messages."""
    if not isinstance(kernel, OneBitKernel):
        raise TypeError(f"expected a OneBitKernel, got {type(kernel).__name__}")
    numel = math.prod(shape)
    worker = RanksSlot("worker_error", lambda ranks: (numel,) if ranks > 1 and numel else None)
    server = RanksSlot("server_error", lambda ranks: (chunk_numel(numel, ranks),) if ranks > 1 and numel else None)
    return (*kernel.rule.slots, worker, server)
