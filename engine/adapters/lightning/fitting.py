"""The input of `fit` from the module and the Trainer: optimizer, schedules, the size of a micro-batch; and the features of
Lightning that do not go with the engine, each an error before training that names an alternative."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from zstore.engine.api.engine import Engine
from zstore.engine.checkpoint.rng import load_rng_state
from zstore.errors import ConfigError, UsageError
from zstore.ranks.world import World

from .settings import GivenConfig, check_optimizer

_CALLBACKS: Mapping[str, str] = {
    "StochasticWeightAveraging": "it averages whole copies of the model: average exports of `zstore consolidate`",
    "WeightAveraging": "it keeps a whole copy of the model: average exports of `zstore consolidate`",
    "LearningRateFinder": 'it trains and then takes the steps back: find the rate with strategy="auto" first',
    "BatchSizeFinder": 'it trains and then takes the steps back: find the size with strategy="auto" first',
    "BaseFinetuning": "it adds parameters to the optimizer while training: set requires_grad before fit(), and train each "
    "phase in a fit() of its own module, loaded by load_state_dict",
}


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


def check_trainer(trainer: Any, module: Any, layer_sync: Any) -> None:
    """Raise UsageError for a Trainer, callback or module that asks for things that the engine does not do."""
    if layer_sync is not None:
        raise UsageError(
            "Trainer(sync_batchnorm=True): leave it out, and convert the module itself: "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)"
        )
    algorithm = trainer.gradient_clip_algorithm
    name = getattr(algorithm, "value", algorithm)
    if name not in (None, "norm"):
        raise UsageError(
            f'Trainer(gradient_clip_algorithm="{name}"): the engine clips by the global norm: leave it out'
        )
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if kind.__name__ in _CALLBACKS and kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning"):
                raise UsageError(f"callback {type(callback).__name__}: {_CALLBACKS[kind.__name__]}")
    if _overrides(module, "backward"):
        raise UsageError(
            f"{type(module).__name__}.backward() is overridden, and the engine runs the backward: remove it, and scale or "
            "combine losses in training_step()"
        )


def check_device(root_device: torch.device) -> None:
    """Raise UsageError if the Trainer computes on another device than the engine."""
    device = World.current().device
    if root_device.type != device.type:
        raise UsageError(
            f"the Trainer computes on {root_device}, the engine on {device}: choose Trainer(accelerator="
            f'"{device.type}"), or hide the GPUs with CUDA_VISIBLE_DEVICES='
        )
    if root_device.type == "cuda" and root_device.index != device.index:
        raise UsageError(
            f"the Trainer computes on {root_device}, the engine on {device}, the GPU of this rank's number: pass "
            f"devices=COUNT, and choose GPUs with CUDA_VISIBLE_DEVICES"
        )


def check_predict(engine: Engine, trainer: Any) -> None:
    """Raise UsageError, on every rank, if ranks have different numbers of batches and gather parameters for each."""
    if engine.training_state.hooks is None:
        return
    counts = engine.world.all_gather_object([int(number) for number in trainer.num_predict_batches])
    if any(count != counts[0] for count in counts):
        raise UsageError(
            f"predict(): ranks have {counts} batches, and every batch gathers parameters on all ranks: pass data that the "
            "ranks share evenly, or Trainer(limit_predict_batches=...)"
        )


def _overrides(module: Any, name: str) -> bool:
    """Return whether the module's class has a method of its own in place of Lightning's."""
    kind = next(kind for kind in type(module).__mro__ if name in vars(kind))
    return kind.__module__.partition(".")[0] not in ("lightning", "pytorch_lightning")
