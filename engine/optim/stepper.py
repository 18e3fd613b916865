"""Steppers: they take the steps of an optimizer whose update does not run over tiles, as the client's own object does.

[Note: the client's own step]
An optimizer that is not known to update each element by itself cannot run over tiles. If all state is whole on every
rank's device (stage 0 without offload) its own object takes the step. Meanwhile each parameter with a gradient is its
fp32 master, and its gradient is the averaged one in fp32, unscaled and clipped; then the master is cast
into the parameter's memory. The optimizer's state is its own, so that it may have any shape; a checkpoint has it
beside the client's state, by parameter name. Every rank takes the same step.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from zstore.errors import UsageError
from zstore.format import model_array

from ..params.record import ParameterRecord
from ..runtime.device import GradientTiles
from .kernel import Kernel, ParameterStep, Scalars, WholeStep
from .state import OptimizerState
from .update import Changes

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
    def run(self, changes: Changes) -> None:
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

    def state(self) -> dict[str, Any]:
        """Return its state, by parameter name, for rank 0's part of a checkpoint to copy (all ranks)."""
        return {}

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:  # noqa: B027 - most keep nothing
        """Replace its state by the `state` of a former run, on any number of ranks."""


def whole_gradient(
    state: OptimizerState, changes: Changes, record: ParameterRecord, master: torch.Tensor
) -> torch.Tensor:
    """Return a parameter's gradient, 1-D, fp32, multiplied by its factor, in the memory of its whole `master`."""
    rows = changes.rows(record)
    if rows is None:
        raise UsageError(f"the gradient of parameter {record.name!r} is not in memory")
    gradient = GradientTiles(state.transfers, rows).tile(0, master.numel(), master)
    factor = changes.settings.factor_of(record)
    return gradient if factor == 1.0 else gradient.mul_(factor)


class WholeKernel(Kernel):
    """Kernel of parameters that the client's own object updates: nothing of its state is in the store."""

    def initial(self) -> Scalars:
        return {"updates": 0.0}

    def start(self, group: Mapping[str, Any], scalars: Scalars) -> ParameterStep:
        return WholeStep({"updates": scalars["updates"] + 1})


def require_no_closure(client: torch.optim.Optimizer) -> None:
    """Raise UsageError for an optimizer whose step needs a closure: the engine has run forward and backward by then."""
    closure = inspect.signature(type(client).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"optimizer {type(client).__name__} is not known to update each element by itself, and takes its step with a "
            "closure, which the engine cannot call: use one whose step() needs none"
        )


class ClientStep(Stepper):
    """The client's optimizer at work. See [Note: the client's own step]."""

    keeps_state = needs_saved = True

    def __init__(self, client: torch.optim.Optimizer, state: OptimizerState) -> None:
        self._client = client
        self._state = state
        self.name = type(client).__name__

    @property
    def records(self) -> list[ParameterRecord]:
        return list(self._state.scalars)

    def run(self, changes: Changes) -> None:
        mine = [record for record in changes.records if record.numel]
        groups = [[model_array(record.name)] for record in mine]
        self._state.change_whole(groups, lambda: self._step(mine, changes))

    def _step(self, records: Sequence[ParameterRecord], changes: Changes) -> None:
        masters = [self._state.whole_master(record) for record in records]
        gradients = [whole_gradient(self._state, changes, *each) for each in zip(records, masters, strict=True)]
        parameters = [record.parameter for record in records]
        own = [parameter.data for parameter in parameters]
        try:
            for parameter, master, gradient in zip(parameters, masters, gradients, strict=True):
                shape = parameter.shape
                parameter.data = master.view(shape)
                parameter.grad = gradient.view(shape)
            self._client.step()
            for parameter, master in zip(parameters, masters, strict=True):
                if parameter.data.data_ptr() != master.data_ptr():  # it was replaced, not changed
                    master.copy_(parameter.data.reshape(-1))
        finally:
            for parameter, values in zip(parameters, own, strict=True):
                parameter.grad = None
                parameter.data = values
        for record, master in zip(records, masters, strict=True):
            if not self._state.is_master(record):
                self._state.transfers.copy_into(record.owned(), master)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {r.name: dict(self._client.state[r.parameter]) for r in self._state.scalars if self._kept(r.parameter)}

    def _kept(self, parameter: nn.Parameter) -> bool:
        return bool(self._client.state.get(parameter))

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        for record in self._state.scalars:
            kept = {name: self._placed(record, value) for name, value in saved.get(record.name, {}).items()}
            self._client.state.pop(record.parameter, None)
            if kept:
                self._client.state[record.parameter] = kept

    def _placed(self, record: ParameterRecord, value: Any) -> Any:
        """Return a value of the state on the device that the optimizer expects: torch's scalars stay in host memory."""
        if isinstance(value, torch.Tensor) and value.dim():
            return value.to(record.parameter.device)
        return value
