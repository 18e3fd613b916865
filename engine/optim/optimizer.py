"""The optimizer as a training loop sees it: parameter groups with their settings. The update itself is `state`'s."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zstore.errors import ConfigError, UsageError

from ..config.config import OptimizerConfig
from ..runtime.messages import warn_once
from .loss_scale import LossScaler
from .rules import CLIENT, Groups, classes, rule_of


class ZeroOptimizer(torch.optim.Optimizer):
    """Parameter groups, shared with the client's optimizer if there is one: setting `lr` in a group, or a torch
    scheduler on this object or on the client's, takes effect at the next `engine.step()`.

    Its state is in the engine's store: `state` and `state_dict()` read a slot from it on demand. `step` from the training
    loop changes nothing; the engine updates.
    """

    def __init__(self, client: torch.optim.Optimizer) -> None:
        super().__init__(client.param_groups, client.defaults)
        self.kind = type(client)
        """Class whose update is carried out."""
        for name in ("train", "eval"):  # of schedule-free optimizers, which exchange the weights
            if callable(change := getattr(client, name, None)):
                setattr(self, name, change)
        self.param_groups = client.param_groups
        self.client = client
        """The given object, or one made from the config."""
        self.state = client.state
        self.scaler: LossScaler | None = None
        """The engine's loss scale; None until there is an engine."""
        self._client_steps = rule_of(self.kind, whole=True) is CLIENT
        """Whether the object that was given takes the steps itself."""
        self._in_engine_step = False
        self._warned = False

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Change nothing: `engine.step()` updates the parameters."""
        if not (self._in_engine_step or self._warned):
            self._warned = True
            warn_once("engine.step() updates the parameters; remove optimizer.step() from the loop")

    def load_state_dict(self, state_dict: Any) -> None:
        """Raise UsageError: the state is in the engine's store."""
        raise UsageError(
            "optimizer.load_state_dict(): load the whole state with engine.load_checkpoint(), or set a slot with "
            "engine.set_optimizer_state(name, slot, values)"
        )

    @property
    def loss_scale(self) -> float:
        """Factor of the loss; always 1 except in fp16."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def cur_scale(self) -> float:
        """Another name of `loss_scale`."""
        return self.loss_scale

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group; a schedule sets it again as it advances."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        """Return the learning rate of the first group."""
        return float(self.param_groups[0]["lr"])

    def note_step(self) -> None:
        """Let torch's schedulers see that a step was taken, so that they do not warn (the engine's call)."""
        self._in_engine_step = True
        try:
            self.step()
            if not self._client_steps:
                # No parameter has a gradient now, so this changes nothing; a scheduler on the client's object counts it.
                self.client.step()
        finally:
            self._in_engine_step = False


class NoOptimizer(ZeroOptimizer):
    """The optimizer of a frozen engine: it has no groups, and updates nothing."""

    def __init__(self) -> None:
        # Not torch's `__init__`: it refuses to be without parameters.
        self.param_groups, self.defaults, self.state = [], {}, defaultdict(dict)
        self.kind = torch.optim.AdamW
        self.scaler = None


def optimizer_from_config(config: OptimizerConfig, parameters: Any, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that a config names, over `parameters` (parameters, or group dicts; None: all of the model).

    Groups keep the settings that they have.
    """
    groups, arguments = _as_groups(model.parameters() if parameters is None else parameters), dict(config.arguments)
    kind: Any = classes()[config.kind]
    if (make := rule_of(kind).make) is not None:
        return make(kind, groups, arguments, model)
    for group in groups if "bias_correction" in arguments and config.kind != "Lamb" else ():
        group.setdefault("bias_correction", arguments["bias_correction"])
    arguments = {
        name: value for name, value in arguments.items() if name in inspect.signature(kind.__init__).parameters
    }
    try:
        made: torch.optim.Optimizer = kind(groups, **arguments)
    except ValueError as error:
        raise ConfigError(f"optimizer.params: {config.kind} does not take these arguments: {error}") from error
    return made


def _as_groups(parameters: Iterable[Any]) -> Groups:
    """Return group dicts, for torch to make the groups that it would: frozen parameters and empty groups stay, since schedules
    count groups. Parameters alone, or with names, make one group; of those listed twice the first counts."""
    items = list(parameters)
    are_groups = bool(items) and isinstance(items[0], Mapping)
    groups = [dict(group) for group in items] if are_groups else [{"params": items}]
    for group in groups:
        listed = group["params"]
        group["params"] = [listed] if isinstance(listed, torch.Tensor) else list(dict.fromkeys(listed))
    return groups


def group_of_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[nn.Parameter, int]:
    """Return the index of the group of each parameter that the optimizer updates.

    Raises UsageError for a parameter that is not the model's, and if none is trainable.
    """
    known = set(model.parameters())
    groups: dict[nn.Parameter, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter not in known:
                raise UsageError(
                    f"parameter {position} of group {number}, of shape {tuple(parameter.shape)}, is not one of the model's: "
                    "make the optimizer from the parameters of the model that is passed to initialize()"
                )
            if parameter.requires_grad:
                groups[parameter] = number
    if not groups:
        raise UsageError("there is no trainable parameter: expected at least one with requires_grad=True")
    return groups
