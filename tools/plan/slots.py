"""The optimizer state of each parameter, for the optimizer of a config and a model that has no memory yet."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zstore.engine.config.config import OptimizerConfig
from zstore.engine.plan.plan import ADAM_SLOTS, EMA, Slots

from .model import ModelShape

if TYPE_CHECKING:
    from torch import nn

ADAM = OptimizerConfig(kind="AdamW", arguments={})
"""Planned if a config leaves the optimizer to the script."""


def slots_of(model: ModelShape, optimizer: OptimizerConfig | None, ema: float | None = None) -> Mapping[str, Slots]:
    """Return the slots of each parameter of a model, by its name, with an average of decay `ema`. Only for optimizers other
    than a usual Adam that loads torch, whose classes tell their slots.

    Raises ConfigError for arguments that the optimizer does not take.
    """
    kind = optimizer or ADAM
    if kind.kind in ("Adam", "AdamW") and not (kind.arguments.get("amsgrad") or kind.arguments.get("maximize")):
        return dict.fromkeys((one.name for one in model.shapes), ADAM_SLOTS if ema is None else (*ADAM_SLOTS, EMA))
    return slots_of_module(model.module, kind, ema)


def slots_of_module(
    module: nn.Module, optimizer: OptimizerConfig | None, ema: float | None = None
) -> Mapping[str, Slots]:
    """Return the same for a model on the meta device, as its optimizer has them."""
    import zstore.engine.extras  # noqa: F401 - the rules of 1-bit optimizers
    from zstore.engine.optim.optimizer import optimizer_from_config
    from zstore.engine.optim.rules import kernels_for, rule_of
    from zstore.engine.params.record import named_parameters

    with _without_compiler():
        made = optimizer_from_config(optimizer or ADAM, None, module)
    rule = rule_of(type(made))
    kernels = kernels_for(rule, type(made), made.param_groups, ema)
    of = {
        parameter: kernel
        for group, kernel in zip(made.param_groups, kernels, strict=True)
        for parameter in group["params"]
    }
    return {name: rule.slots(of[parameter], parameter.shape) for name, _, parameter in named_parameters(module)}


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Let optimizers take groups of parameters undecorated: torch's decorator imports its compiler, for a second."""
    from torch.optim import Optimizer

    decorated = Optimizer.add_param_group
    Optimizer.add_param_group = inspect.unwrap(decorated)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.add_param_group = decorated  # type: ignore[method-assign]
