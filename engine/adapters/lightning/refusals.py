"""Features of Lightning that do not go with the engine: errors before training that name an alternative."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zstore.engine.engine import Engine
from zstore.errors import UsageError
from zstore.ranks.world import World

_CALLBACKS: Mapping[str, str] = {
    "StochasticWeightAveraging": 'it averages whole copies of the model: write "zstore": {"ema": 0.999} into the config of '
    "ZstoreStrategy for an average over the steps, or average checkpoints that `zstore consolidate` exported",
    "WeightAveraging": 'it keeps a whole copy of the model: write "zstore": {"ema": DECAY} into the config of '
    "ZstoreStrategy, which averages the same beside the optimizer's state; `trainer.strategy.engine.averaged_weights()` and "
    "`zstore consolidate --ema` give the averages",
    "LearningRateFinder": 'it trains and then takes the steps back: find the rate with strategy="auto" first',
    "BatchSizeFinder": 'it trains and then takes the steps back: find the size with strategy="auto" first',
    "BaseFinetuning": "it adds parameters to the optimizer while training: set requires_grad before fit(), and train each "
    "phase in a fit() of its own module, loaded by load_state_dict",
}


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
