"""`deepspeed.initialize`, with DeepSpeed's arguments."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn

from zstore.engine.api.initialize import config_source
from zstore.engine.api.initialize import initialize as zstore_initialize
from zstore.engine.config.config import add_config_arguments
from zstore.engine.runtime.process import init_distributed
from zstore.errors import UsageError

from .engine import DeepSpeedEngine
from .names import VERSION
from .saves import complete
from .utils import cleaned, log_dist, raw_config

__all__ = ["add_config_arguments", "init_distributed", "initialize"]


def initialize(  # noqa: PLR0913, PLR0917 - DeepSpeed's signature
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Return (engine, optimizer, loader, scheduler), as `zstore.initialize` does (all ranks).

    `optimizer` may be a function that makes one of `model_parameters`. If neither it nor the config names one, the
    engine is for evaluation: it has none, and the optimizer and scheduler returned are None. The process group is started
    if a launcher set its variables. Raises UsageError for `mpu` and `mesh_param`, and if accelerate counts other ranks than
    there are.
    """
    if mesh_param is not None:
        raise UsageError("deepspeed.initialize(mesh_param=...): there is no sequence parallelism; leave it out")
    _require_agreement()
    source = config_source(args, config if config is not None else config_params, call="deepspeed.initialize()")
    given = cleaned(source)
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model_parameters)
    complete()  # of an engine before this one: a resume looks for its checkpoint now
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad] if model is not None else []
    frozen = optimizer is None and (not isinstance(given, Mapping) or given.get("optimizer") is None)
    engine, *others = zstore_initialize(
        args=None,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=None if frozen else lr_scheduler,
        distributed_port=distributed_port,
        mpu=mpu,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=given,
        frozen=frozen,
        _engine=DeepSpeedEngine,
    )
    if not isinstance(engine, DeepSpeedEngine):
        raise UsageError(f"initialize() made a {type(engine).__name__}")
    for parameter in trainable:  # of a model that is evaluated first: its optimizer is made of those
        parameter.requires_grad_(True)
    log_dist(f"DeepSpeed info: version={VERSION}", ranks=[0])
    engine.config = raw_config(source)
    return engine, *others


def _require_agreement() -> None:
    """Raise UsageError if accelerate counts other ranks than there are: each would train on all of the data."""
    module = sys.modules.get("accelerate.state")
    state = {} if module is None else module.PartialState._shared_state
    known = state.get("num_processes")
    prepares = str(state.get("distributed_type")).endswith("DEEPSPEED")
    if not prepares or not torch_dist.is_initialized() or known == torch_dist.get_world_size():
        return
    raise UsageError(
        f"there are {torch_dist.get_world_size()} ranks, and accelerate knows of {known}: with DeepSpeed it finds several "
        "only on GPUs, and on CPUs if it is told: TrainingArguments(use_cpu=True), or accelerate.PartialState(cpu=True) before "
        "the Accelerator"
    )
