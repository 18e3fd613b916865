"""What is kept of a parameter that a rule updates, as a kernel says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..kernel import ParameterStep, Scalars, SlotArray, WholeStep, fp32_arrays
from .rule import Rule


class OneBitKernel:
    """Of parameters that a rule updates: the slots that are the same on every rank are in the store."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.slots = tuple(name for name in rule.slots if name not in rule.own_slots)

    def arrays(self, numel: int) -> Sequence[SlotArray]:
        """See Kernel."""
        return fp32_arrays(self.slots)

    def initial(self) -> Scalars:
        """See Kernel."""
        return self.rule.initial()

    def start(self, group: Mapping[str, Any], scalars: Scalars) -> ParameterStep:
        """See Kernel; the step was taken, and counted, before."""
        return WholeStep(scalars)
