"""Steppers: they take the steps of an optimizer whose update does not run over tiles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from zstore.errors import UsageError

from ..device import GradientTiles
from ..params.record import ParameterRecord
from .state import OptimizerState
from .update import Update

STATE_KEY = "zstore.client_optimizer"
"""Key of a checkpoint's client state with a stepper's state beside the store."""


class Stepper(ABC):
    """Takes the steps of a run (all ranks). The methods about state are called if it `keeps_state`."""

    keeps_state: ClassVar[bool] = False
    """Whether it keeps state beside the store's, which a checkpoint has among the client's."""
    needs_saved: ClassVar[bool] = False
    """Whether a load without that state would go on from nothing."""
    owns_gradients: ClassVar[bool] = False
    """Whether ranks may keep gradients of their own until it exchanges them; `averaged` says which."""
    name: str
    """Name of the optimizer's class."""

    @abstractmethod
    def run(self, update: Update) -> None:
        """Carry out an update."""

    @property
    def records(self) -> list[ParameterRecord]:
        """The parameters that it keeps state of."""
        return []

    def averaged(self) -> set[ParameterRecord]:
        """Begin a step, if it `owns_gradients`; return the parameters whose gradients are averaged over the ranks in it."""
        return set()

    def agreed_norm(self, norm: float) -> float:
        """Return the norm that all ranks go by, of that of this rank's gradients (all ranks)."""
        return norm

    def collect(self) -> None:  # noqa: B027 - most keep the same on every rank
        """Bring to rank 0 the state that ranks keep for themselves, for `state` (all ranks)."""

    def state(self) -> dict[str, Any]:
        """Return its state, by parameter name, for a checkpoint to copy."""
        return {}

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:  # noqa: B027 - most keep nothing
        """Replace its state by the `state` of a former run, on any number of ranks."""


def whole_gradient(
    state: OptimizerState, update: Update, record: ParameterRecord, master: torch.Tensor
) -> torch.Tensor:
    """Return a parameter's gradient, 1-D, fp32, multiplied by its factor, in the memory of its whole `master`."""
    rows = update.rows(record)
    if rows is None:
        raise UsageError(f"the gradient of parameter {record.name!r} is not in memory")
    gradient = GradientTiles(state.transfers, rows).tile(0, master.numel(), master)
    factor = update.settings.factor_of(record)
    return gradient if factor == 1.0 else gradient.mul_(factor)
