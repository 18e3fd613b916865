"""The optimizer state of each parameter, for the optimizer of a config and a model that has no memory yet."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from zstore.engine.config.config import OptimizerConfig
from zstore.engine.optim.optimizer import optimizer_from_config
from zstore.engine.optim.rules import kernels_for, rule_of
from zstore.engine.params.record import named_parameters
from zstore.engine.plan.plan import Slots

ADAM = OptimizerConfig(kind="AdamW", arguments={})
"""Planned if a config leaves the optimizer to the script."""


def slots_of(module: nn.Module, optimizer: OptimizerConfig | None, ema: float | None = None) -> Mapping[str, Slots]:
    """Return the slots of each parameter of a model on the meta device, by its name, with an average of decay `ema`.

    Raises ConfigError for arguments that the optimizer does not take.
    """
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
    decorated = Optimizer.add_param_group
    Optimizer.add_param_group = inspect.unwrap(decorated)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.add_param_group = decorated  # type: ignore[method-assign]
