"""The optimizer as a training loop sees it: parameter groups with their settings, and the loss scale of fp16."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from zstore.errors import ConfigError, NonFiniteError, UsageError

from ..config.optimizers import OptimizerSection
from ..config.sections import Fp16Section
from ..runtime.process import warn_once
from .rules import CLIENT, Groups, classes, rule_of

_RULES = ("loss_scale_window", "hysteresis", "min_loss_scale", "consecutive_hysteresis", "raise_error_at_min_scale")
_STATE = {"scale": float, "hysteresis_left": int, "iteration": int, "last_overflow": int}
"""The fields of a loss scale that change, with their types in a checkpoint."""


@dataclass(kw_only=True)
class LossScaler:
    """Factor of the loss; call `update` after every step. If `settings` is None, the factor is always 1.

    A dynamic scale halves at the `hysteresis`-th overflow, and from then on at every overflow, until the hysteresis
    is restored: when the scale doubles, or with `consecutive_hysteresis` by any step without overflow. It doubles at a
    step without overflow if a multiple of `loss_scale_window` such steps have preceded it since the last overflow. Source:
    DeepSpeed's DynamicLossScaler (deepspeed/runtime/fp16/loss_scaler.py of 0.19).
    """

    settings: Fp16Section | None
    non_finite: Literal["error", "skip", "apply"]
    """Policy for a step whose gradients are not finite."""
    scale: float = 1.0
    hysteresis_left: int = 1
    """Overflows until the scale halves, including the one that halves it."""
    iteration: int = 0
    """Steps taken, including skipped ones."""
    last_overflow: int = -1
    """Iteration of the last overflow."""

    def __post_init__(self) -> None:
        if self.settings is not None:
            self.scale = self.settings.loss_scale or 2.0**self.settings.initial_scale_power
            self.hysteresis_left = self.settings.hysteresis

    def accepts(self, norm: float, step: int, changed: str) -> bool:
        """Return whether step number `step` is taken with gradients of this norm; otherwise it is skipped. Depending on the
        policy, raises NonFiniteError, which says what has been `changed`."""
        if math.isfinite(norm) or self.non_finite == "apply":
            return True
        if self.non_finite == "error":
            raise NonFiniteError(
                f"step {step}: the norm of the gradients is {norm}; {changed}. "
                "Look for a loss that is NaN or infinite, or lower the learning rate; "
                '"zstore": {"non_finite_gradients": "skip"} continues without such steps'
            )
        return False

    def update(self, overflow: bool) -> None:
        """Record a step. If configured, raises NonFiniteError at an overflow with the scale at its minimum."""
        settings = self.settings
        if settings is None or settings.loss_scale:
            return
        if overflow:
            self._shrink(settings)
            self.last_overflow = self.iteration
        else:
            if settings.consecutive_hysteresis:
                self.hysteresis_left = settings.hysteresis
            stable = self.iteration - self.last_overflow - 1
            if stable > 0 and stable % settings.loss_scale_window == 0:
                self.hysteresis_left = settings.hysteresis
                self.scale *= 2
        self.iteration += 1

    def _shrink(self, settings: Fp16Section) -> None:
        if settings.hysteresis > 1 and self.hysteresis_left > 1:
            self.hysteresis_left -= 1
            return
        if self.scale == settings.min_loss_scale and settings.raise_error_at_min_scale:
            raise NonFiniteError(
                f"the gradients overflow in fp16 although the loss scale is at its minimum of {settings.min_loss_scale}: the "
                "training diverged; lower the learning rate, use bf16, or look for a loss that is NaN"
            )
        self.scale = max(self.scale / 2, settings.min_loss_scale)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {name: getattr(self, name) for name in _STATE}

    def rules(self) -> dict[str, Any] | None:
        """Return the settings of a dynamic scale, for software that loads the checkpoint; None if it is constant."""
        if self.settings is None or self.settings.loss_scale:
            return None
        return {name: getattr(self.settings, name) for name in _RULES}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; a constant scale stays as configured."""
        if self.settings is None or self.settings.loss_scale:
            return
        for name, kind in _STATE.items():
            setattr(self, name, kind(state[name]))


class ZeroOptimizer(torch.optim.Optimizer):
    """Parameter groups, shared with the client's optimizer if there is one: setting `lr` in a group, or a torch
    scheduler on this object or on the client's, takes effect at the next `engine.step()`.

    Its state is in the engine's store: `state` and `state_dict()` read a slot from it on demand. Calling `step` from the
    training loop changes nothing: the engine updates.
    """

    def __init__(self, client: torch.optim.Optimizer, scaler: LossScaler) -> None:
        super().__init__(client.param_groups, client.defaults)
        self.kind = type(client)
        """Class whose update is carried out."""
        for name in ("train", "eval"):  # schedule-free optimizers swap the weights in these
            if callable(change := getattr(client, name, None)):
                setattr(self, name, change)
        self.param_groups = client.param_groups
        self.client = client
        """The given object, or one created from the config."""
        self.state = client.state
        self.scaler = scaler
        self._client_steps = rule_of(self.kind, whole=True) is CLIENT
        """Whether the client's object takes the steps itself."""
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
        return self.scaler.scale

    @property
    def cur_scale(self) -> float:
        """Alias of `loss_scale`."""
        return self.loss_scale

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group; a schedule sets it again as it advances."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        """Return the learning rate of the first group."""
        return float(self.param_groups[0]["lr"])

    def note_step(self) -> None:
        """Count a step for torch's schedulers, which otherwise warn (called by the engine)."""
        self._in_engine_step = True
        try:
            self.step()
            if not self._client_steps:
                # No parameter has a gradient now: this changes nothing, but a scheduler of the client's object counts it.
                self.client.step()
        finally:
            self._in_engine_step = False


class NoOptimizer(ZeroOptimizer):
    """The optimizer of a frozen engine: it has no groups and updates nothing."""

    def __init__(self, scaler: LossScaler) -> None:
        # Not torch's `__init__`, which raises without parameters.
        self.param_groups, self.defaults, self.state = [], {}, defaultdict(dict)
        self.kind, self.scaler = torch.optim.AdamW, scaler


def optimizer_from_config(config: OptimizerSection, parameters: Any, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that a config names, over `parameters` (parameters, or group dicts; None: all of the model's).

    Groups keep their own settings.
    """
    groups, arguments = _as_groups(model.parameters() if parameters is None else parameters), config.arguments()
    kind: Any = classes()[config.kind]
    if (make := rule_of(kind).make) is not None:
        return make(kind, groups, arguments, model)
    for group in groups if "bias_correction" in arguments and config.kind != "Lamb" else ():
        group.setdefault("bias_correction", arguments["bias_correction"])
    arguments = {
        name: value for name, value in arguments.items() if name in inspect.signature(kind.__init__).parameters
    }
    try:
        optimizer: torch.optim.Optimizer = kind(groups, **arguments)
    except ValueError as error:
        raise ConfigError(f"optimizer.params: {config.kind} does not accept these arguments: {error}") from error
    return optimizer


def _as_groups(parameters: Iterable[Any]) -> Groups:
    """Return group dicts from which torch makes the same groups: frozen parameters and empty groups stay, since schedules
    count groups. Parameters without groups, or with names, form one group; for duplicates the first entry counts."""
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
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter not in known:
                raise UsageError(
                    f"parameter {position} of group {index}, of shape {tuple(parameter.shape)}, is not one of the model's: "
                    "create the optimizer from the parameters of the model that is passed to initialize()"
                )
            if parameter.requires_grad:
                groups[parameter] = index
    if not groups:
        raise UsageError("there is no trainable parameter: expected at least one with requires_grad=True")
    return groups
