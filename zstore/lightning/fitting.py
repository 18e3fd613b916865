"""What `fit` needs of the module and the Trainer: optimizer, schedules, the size of a micro-batch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from zstore.errors import ConfigError, UsageError

from .settings import Source, check_optimizer


def configured(
    library: str, source: Source, module: Any, raw: Mapping[str, Any]
) -> tuple[torch.optim.Optimizer | None, list[Any]]:
    """Return the optimizer and the schedules of `configure_optimizers`; no optimizer where the config has it.

    Raises UsageError for several optimizers, ConfigError for none, or where the config names another optimizer or schedule.
    """
    made = import_module(f"{library}.core.optimizer")
    with warnings.catch_warnings():
        if "optimizer" in raw:
            warnings.filterwarnings("ignore", ".*returned `None`, this fit will run with no optimizer")
        optimizers, schedules = made._init_optimizers_and_lr_schedulers(module)
    if len(optimizers) > 1:
        raise UsageError(
            f"configure_optimizers() returned {len(optimizers)} optimizers, and the engine has one: return one with a "
            'parameter group for each, or train with strategy="ddp"'
        )
    client = optimizers[0]
    if isinstance(client, made._MockOptimizer):
        if "optimizer" not in raw:
            raise ConfigError(
                f'{source.name}: configure_optimizers() returned None, and there is no "optimizer" section: write '
                "one, or return an optimizer"
            )
        client = None
    else:
        check_optimizer(source, client)
    if schedules and "scheduler" in raw:
        raise ConfigError(
            f"{source.name}: there is a schedule in the config and one of configure_optimizers(): leave one out"
        )
    return client, schedules


def hand_on_settings(client: torch.optim.Optimizer, present: torch.optim.Optimizer) -> None:
    """Let the engine's groups have the settings of a new optimizer, whose schedules drive them from now on.

    Raises UsageError where the groups differ.
    """
    sizes = [[len(group["params"]) for group in one.param_groups] for one in (client, present)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"configure_optimizers() returned groups of {sizes[0]} parameters, and the engine of the earlier fit() has groups "
            f"of {sizes[1]}: return the same groups, or call trainer.strategy.close() and fit a new module"
        )
    for group, fresh in zip(present.param_groups, client.param_groups, strict=True):
        group.update({name: value for name, value in fresh.items() if name != "params"})
    client.param_groups = present.param_groups


def batch_size(trainer: Any) -> int | None:
    """Return the samples of a micro-batch, as the first training loader has them; None where it does not tell."""
    loader = trainer.fit_loop._combined_loader
    for one in [] if loader is None else loader.flattened:
        size = getattr(one, "batch_size", None) or getattr(getattr(one, "batch_sampler", None), "batch_size", None)
        if isinstance(size, int):
            return size
    return None
