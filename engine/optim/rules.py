"""Rules: how the parameters of an optimizer's class are updated, over tiles or by a stepper.

[Note: rules]
A rule names optimizer classes and has the kernel for each of their parameter groups, and the stepper. Without a stepper,
steps run over tiles. `register` adds further rules, such as those in `engine/extras`.

[Note: the client's own step]
An optimizer that is not known to update each element independently cannot run over tiles. If every rank's device has
all state (stage 0 without offload) the client's own object takes the step. Meanwhile each parameter with a gradient is
its fp32 master, and its gradient is the averaged one in fp32, unscaled and clipped; then the master is cast into the
parameter. The object keeps its state itself, which may have any shape; a checkpoint stores it with the client's
state, by parameter name. Every rank takes the same step.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from zstore.errors import UsageError
from zstore.format import model_array
from zstore.ranks.world import World

from ..config.config import Config
from ..params.record import ParameterRecord
from ..plan.plan import Slots
from ..runtime.device import GradientTiles
from .changes import Changes
from .kernel import ELEMENT_WISE, Kernel, ParameterStep, Scalars, SlotCodec, kernel_for
from .state import OptimizerState

STATE_KEY = "zstore.client_optimizer"
"""Key, in a checkpoint's client state, of the state that a stepper keeps outside the store."""
Kind = type[torch.optim.Optimizer]
Groups = list[dict[str, Any]]
"""Groups of parameters with settings, as torch's optimizers take them."""


class Stepper(ABC):
    """Takes the steps of a run (all ranks). The methods that handle state are called only if it `keeps_state`."""

    keeps_state: ClassVar[bool] = False
    """Whether it keeps state outside the store, saved in a checkpoint with the client's state."""
    needs_saved: ClassVar[bool] = False
    """Whether a load without that state would restart the optimizer."""
    owns_gradients: ClassVar[bool] = False
    """Whether ranks may keep their own gradients until it exchanges them; `averaged` returns the remaining parameters."""
    name: str
    """Name of the optimizer's class."""

    @abstractmethod
    def run(self, changes: Changes) -> None:
        """Carry out an update."""

    @property
    def records(self) -> list[ParameterRecord]:
        """The parameters whose state it keeps."""
        return []

    def averaged(self) -> set[ParameterRecord]:
        """Begin a step, if it `owns_gradients`; return the parameters whose gradients the engine averages over ranks."""
        return set()

    def agreed_norm(self, norm: float) -> float:
        """Return the norm that all ranks use, given the norm of this rank's gradients (all ranks)."""
        return norm

    def state(self) -> dict[str, Any]:
        """Return its state, by parameter name, for rank 0 to copy into a checkpoint (all ranks)."""
        return {}

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:  # noqa: B027 - most keep nothing
        """Replace its state with the `state` of an earlier run, on any number of ranks."""


def whole_gradient(
    state: OptimizerState, changes: Changes, record: ParameterRecord, master: torch.Tensor
) -> torch.Tensor:
    """Return a parameter's gradient, 1-D, fp32, multiplied by its factor, on the device of its whole `master`."""
    (rows,) = changes.rows([record])
    if rows is None:
        raise UsageError(f"the gradient of parameter {record.name!r} is not in memory")
    gradient = GradientTiles(state.transfers, rows).tile(0, master.numel(), master)
    factor = changes.settings.factor_of(record)
    return gradient if factor == 1.0 else gradient.mul_(factor)


class WholeKernel(Kernel):
    """Kernel of parameters that the client's own object updates; its state is not in the store."""

    def initial(self) -> Scalars:
        return {"updates": 0.0}

    def start(self, group: Mapping[str, Any], scalars: Scalars) -> ParameterStep:
        return ParameterStep({"updates": scalars["updates"] + 1})


class ClientStep(Stepper):
    """Steps the client's optimizer. See [Note: the client's own step]."""

    keeps_state = needs_saved = True

    def __init__(self, client: torch.optim.Optimizer, state: OptimizerState) -> None:
        self._client = client
        self._state = state
        self.name = type(client).__name__

    @property
    def records(self) -> list[ParameterRecord]:
        return list(self._state.scalars)

    def run(self, changes: Changes) -> None:
        records = [record for record in changes.records if record.numel]
        groups = [[model_array(record.name)] for record in records]
        self._state.change_in_one_pass(groups, lambda: self._step(records, changes))

    def _step(self, records: Sequence[ParameterRecord], changes: Changes) -> None:
        masters = [self._state.whole_master(record) for record in records]
        gradients = [whole_gradient(self._state, changes, *pair) for pair in zip(records, masters, strict=True)]
        parameters = [record.parameter for record in records]
        values = [parameter.data for parameter in parameters]
        try:
            for parameter, master, gradient in zip(parameters, masters, gradients, strict=True):
                shape = parameter.shape
                parameter.data = master.view(shape)
                parameter.grad = gradient.view(shape)
            self._client.step()
            for parameter, master in zip(parameters, masters, strict=True):
                if parameter.data.data_ptr() != master.data_ptr():  # the step replaced it
                    master.copy_(parameter.data.reshape(-1))
        finally:
            for parameter, data in zip(parameters, values, strict=True):
                parameter.grad = None
                parameter.data = data
        for record, master in zip(records, masters, strict=True):
            if not self._state.is_master(record):
                self._state.transfers.copy_into(record.owned(), master)

    def state(self) -> dict[str, Any]:
        states = self._client.state
        return {r.name: dict(states[r.parameter]) for r in self._state.scalars if states.get(r.parameter)}

    def load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        for record in self._state.scalars:
            state = dict(saved.get(record.name, {}))
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():  # torch keeps scalars in host memory
                    state[name] = value.to(record.parameter.device)
            self._client.state.pop(record.parameter, None)
            if state:
                self._client.state[record.parameter] = state


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How optimizers of some classes update. See [Note: rules]."""

    kinds: tuple[Kind, ...]
    """The classes, which a config names."""
    kernel: Callable[[Kind, Mapping[str, Any]], Kernel]
    """Returns the kernel for a parameter group with these settings; parameters may be on the meta device."""
    stepper: Callable[[torch.optim.Optimizer, OptimizerState, World], Stepper] | None = None
    """Creates the stepper (all ranks). None: steps run over tiles."""
    slots: Callable[[Kernel, Sequence[int], int], Slots] = lambda kernel, *_: kernel.slots
    """Returns a kernel's arrays for a parameter of a shape, at a world size, for the plan."""
    make: Callable[[Any, Groups, Mapping[str, Any], nn.Module], torch.optim.Optimizer] | None = None
    """Creates an optimizer from groups, which keep their settings, and a config's arguments. None: the class does."""


TILES = Rule(kinds=ELEMENT_WISE, kernel=kernel_for)
"""Updates run over tiles."""
CLIENT = Rule(
    kinds=(), kernel=lambda _kind, _group: WholeKernel(), stepper=lambda client, state, _: ClientStep(client, state)
)
"""The client's own object takes the steps; see [Note: the client's own step]."""
_rules: dict[Kind, Rule] = {}


def register(rule: Rule) -> None:
    """Let engines accept optimizers of the rule's classes; the last rule registered for a class applies."""
    _rules.update(dict.fromkeys(rule.kinds, rule))


register(TILES)


MakeCodec = Callable[[Sequence[Kernel], str], SlotCodec]
"""Returns the codec for the slots of these kernels and an optimizer of this name."""
codecs: dict[str, MakeCodec] = {"fp32": lambda _kernels, _kind: SlotCodec()}
"""Codecs by the config's dtype of moments."""


def classes() -> dict[str, Kind]:
    """Return the classes that have a rule, by name."""
    return {kind.__name__: kind for kind in _rules}


def rule_of(kind: Kind, *, whole: bool = False) -> Rule:
    """Return the rule of a class. An optimizer without a rule takes its own steps if every rank's device has the `whole`
    state; else it gets the rule of tiles, whose kernel refuses it."""
    return _rules.get(kind, CLIENT if whole else TILES)


def check_client(client: torch.optim.Optimizer, config: Config) -> None:
    """Raise UsageError if the client's own object cannot take the steps: its step needs a closure, although the engine
    has run forward and backward before it, or the config does not allow it."""
    closure = inspect.signature(type(client).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"optimizer {type(client).__name__} is not known to update elements independently, and its step needs a "
            "closure, which the engine cannot call: use an optimizer whose step() needs none"
        )
    if config.step_overlap == "backward":
        raise UsageError(
            f"optimizer {type(client).__name__} steps whole fp32 tensors, all at once: remove step_overlap from the config's "
            '"zstore" section'
        )
