"""The input of `fit` from the module and the Trainer: optimizer, schedules, the size of a micro-batch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from zstore.engine.checkpoint.rng import load_rng_state
from zstore.errors import ConfigError, UsageError

from .settings import GivenConfig, check_optimizer


def configured(
    library: str, source: GivenConfig, module: Any, raw: Mapping[str, Any]
) -> tuple[torch.optim.Optimizer | None, list[Any]]:
    """Return the optimizer and the schedules of `configure_optimizers`; no optimizer if the config has it.

    Raises UsageError for several optimizers, ConfigError for none, or if the config names another optimizer or schedule.
    """
    made = import_module(f"{library}.core.optimizer")
    with warnings.catch_warnings():
        if "optimizer" in raw:
            warnings.filterwarnings("ignore", ".*returned `None`, this fit will run with no optimizer")
        optimizers, schedules = made._init_optimizers_and_lr_schedulers(module)
    if len(optimizers) > 1:
        raise UsageError(
            f"configure_optimizers() returned {len(optimizers)} optimizers, and the engine has one: return one with a "
            "parameter group for each; if they step apart, as a GAN's do, make each a zstore.optim.Offloaded(...), which keeps "
            'its state off the device, and train with strategy="auto" or "ddp"'
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

    Raises UsageError if the groups differ.
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


def resumable(library: str, trainer: Any, loader: Any) -> Any:
    """Return a loader whose random choices for several ranks follow from the seed and the epoch, and that is at that epoch.

    Lightning spreads torchdata's RandomSampler over ranks by a wrapper: each process would draw its own order, and another
    one after a resume.
    """
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    inner = getattr(getattr(sampler, "dataset", None), "_sampler", None)
    if type(sampler).__name__ == "DistributedSamplerWrapper" and type(inner).__module__.startswith("torchdata."):
        seed = int(os.getenv("PL_GLOBAL_SEED", "0"))
        spread: DistributedSampler[Any] = DistributedSampler(
            loader.dataset, shuffle=True, seed=seed, **trainer.distributed_sampler_kwargs
        )
        loader = import_module(f"{library}.utilities.data")._update_dataloader(loader, spread)
    if trainer.training:
        # Before its iterator is made, which skips the samples given before the save.
        _set_epoch(library, trainer, loader)
    return loader


def resume_data(library: str, trainer: Any, generators: dict[str, Any]) -> None:
    """Go on with the random numbers of a checkpoint, and with the next epoch's data if it was saved at the end of one."""
    loop = trainer.fit_loop
    at_end = loop._data_fetcher is not None and loop.epoch_loop.batch_progress.current.ready >= loop.max_batches
    left, loop._combined_loader_states_to_load = loop._combined_loader_states_to_load, []
    if at_end and left:  # Lightning forgets these after a save at an epoch's end
        loop._combined_loader._load_state_dicts(left)
        iter(loop._data_fetcher)
    load_rng_state(generators)
    if at_end:
        for loader in loop._combined_loader.flattened:
            _set_epoch(library, trainer, loader)
        iter(loop._data_fetcher)


def _set_epoch(library: str, trainer: Any, loader: Any) -> None:
    processed = trainer.fit_loop.epoch_progress.current.processed
    import_module(f"{library}.loops.fit_loop")._set_sampler_epoch(loader, processed)


def batch_size(trainer: Any) -> int | None:
    """Return the samples of a micro-batch, as the first training loader has them; None if it does not tell."""
    loader = trainer.fit_loop._combined_loader
    for one in [] if loader is None else loader.flattened:
        size = getattr(one, "batch_size", None) or getattr(getattr(one, "batch_sampler", None), "batch_size", None)
        if isinstance(size, int):
            return size
    return None
