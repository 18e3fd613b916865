"""`initialize`: creates an engine from a model and a config."""

from __future__ import annotations

import logging
import weakref
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from zstore.errors import ConfigError, UsageError
from zstore.io import Files
from zstore.ranks.world import World

from ..access.access import live_runs
from ..build.builder import mark_trained, outside_block
from ..build.model import mark_leaves_of, require_shapes, warn_of_float64
from ..config.config import Config, load_config
from ..config.resolve import ResolveContext, precision_note, read_auto_values
from ..extras import register_parts
from ..optim.optimizer import LossScaler, NoOptimizer, ZeroOptimizer, optimizer_from_config
from ..optim.rules import rule_of
from ..plan.plan import hidden_size
from ..plan.run import agree_on_native_types
from ..report.monitors import open_monitors
from ..runtime.device import Streams
from ..runtime.process import init_distributed, show_messages, warn_once
from ..training.loader import Collate, TrainingLoader
from ..training.lr_schedules import LRSchedule, named_schedule
from ..training.wiring import wire
from .engine import Engine

_log = logging.getLogger("zstore")

_engines: list[weakref.ref[Engine]] = []
"""All engines of the process, in the order of their creation."""


@outside_block()
def initialize(  # noqa: PLR0913, PLR0917 - DeepSpeed's signature
    args: Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Collate | None = None,
    config: Any = None,
    config_params: Any = None,
    *,
    auto: Mapping[str, Any] | None = None,
    frozen: bool = False,
    _files: Files | None = None,
    _streams: Streams | None = None,
    _engine: type[Engine] = Engine,
) -> tuple[Engine, Any, TrainingLoader | None, Any]:
    """Return (engine, optimizer, loader, scheduler) to train `model` as the config says (all ranks).

    The config is a dict or a path, in `config`, `config_params` or `args.deepspeed_config`. `auto` gives the values for its
    "auto" keys and of missing batch sizes, by dotted key (`{"optimizer.params.lr": 1e-4}`) or nested as in a config; other
    keys are ignored. An "auto" key without a value is derived from the model (bucket sizes) or gets its default, with a log
    message.

    The model is changed in place: moved to its device, cast to its dtype, and sharded at stage 3; all ranks get rank 0's
    values. It must be complete: a `zstore.Init` block that is still open applies only to models created later. If another
    engine holds the model, that engine is closed; its trained values are kept, but not its optimizer state. `optimizer` is an
    element-wise torch optimizer over the model's parameters; the default is the config's. `lr_scheduler` is a scheduler, or a
    function that creates one from the returned optimizer; the engine steps it. The loader or scheduler may be None.

    With `frozen` the engine is inference-only, for evaluation, generation, or a reference model. It has only the parameters,
    in their compute dtype, on the tier of `offload_param`; none requires gradients. Training settings are ignored, and batch
    sizes may be missing. Optimizer and scheduler are None. An engine is also frozen, with a log message, if neither the
    arguments nor the config specify an optimizer or a scheduler.

    Raises ConfigError, UsageError, and RunFolderError for an `nvme_path` that cannot be used.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"initialize(model=...): expected a torch.nn.Module, got {type(model).__name__}")
    if mpu is not None:
        raise UsageError("initialize(mpu=...): model parallelism is not supported; omit mpu")
    if frozen and (optimizer is not None or lr_scheduler is not None):
        raise UsageError("initialize(frozen=True) creates an inference-only engine: omit optimizer and lr_scheduler")
    require_shapes(model)
    compiler: Any = None
    if "_orig_mod" in model._modules and hasattr(model, "dynamo_ctx"):
        # `torch.compile(model)`: without the wrapper, parameters have the same names whether compiled or not.
        wrapper: Any = model
        model, compiler = wrapper._orig_mod, wrapper.dynamo_ctx
    show_messages()
    register_parts()
    auto_values = read_auto_values(auto)
    loaded = load_config(config_source(args, config, config_params)).with_auto_values(auto_values)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    world = World.current()
    frozen = frozen or _has_no_optimizer(loaded, optimizer, lr_scheduler)
    native = agree_on_native_types(world)
    needs_whole_tensors = optimizer is not None and rule_of(type(optimizer)).stepper is not None
    resolved = loaded.resolve(
        ResolveContext(
            world_size=world.world_size,
            hidden_size=hidden_size(model),
            native=native,
            client_optimizer=optimizer is not None,
            optimizer_name=type(optimizer).__name__ if needs_whole_tensors else "",
            client_scheduler=lr_scheduler is not None,
            frozen=frozen,
            auto_values=auto_values,
        )
    )
    if resolved.settings.log_level is not None:
        _log.setLevel(resolved.settings.log_level.upper())
    if world.rank == 0:
        device = "GPU" if world.device.type == "cuda" else "CPU"
        if (note := precision_note(loaded.settings, resolved.precision, native, device)) is not None:
            _log.log(*note)
        _log_choices(loaded, resolved)
    for _, section in resolved.settings.enabled_sections():
        section.prepare(model)
    warn_of_float64(model, resolved)
    if resolved.stage == 3:
        mark_leaves_of(resolved, model)
    with _watched(world, resolved.zstore.silent_rank_s or None):
        _close_engines_of(model, loaded)
        zero_optimizer = _optimizer(resolved, optimizer, model_parameters, model)
        schedule = _schedule(resolved, lr_scheduler, zero_optimizer)
        loader = None if training_data is None else _loader(resolved, world, training_data, collate_fn)
        monitors = open_monitors(resolved, world)
        try:
            training = wire(model, resolved, world, zero_optimizer, files=_files, streams=_streams)
            training.schedule, training.loader = schedule, loader
            engine = _engine(training, monitors)
            _engines.append(weakref.ref(engine))
            if compiler is not None:
                training.compile(compiler)
        except BaseException:
            monitors.close()
            raise
        mark_trained(model)
        return engine, engine.optimizer, loader, engine.lr_scheduler


def _close_engines_of(model: nn.Module, config: Config) -> None:
    """Close the engines that have parameters of the model: their hooks would conflict with the next engine's (all ranks)."""
    engines = [engine for reference in _engines if (engine := reference()) is not None and engine.access in live_runs]
    _engines[:] = map(weakref.ref, engines)
    parameters = set(model.parameters())
    for engine in engines:
        if not parameters.isdisjoint(records := engine.access.guard.records):
            _log.warning("the model belongs to another engine, which is being closed: its optimizer state is dropped")
            # The next engine takes over the store and closes it, so parameters outside the model must not be in it.
            engine.hand_back(config if parameters.issuperset(records) else None)


def _log_choices(loaded: Config, resolved: Config) -> None:
    """Log the config's notices, and that gradient clipping is on by default."""
    for line in resolved.report():
        _log.warning("%s: %s", resolved.source, line)
    clips = resolved.gradient_clipping > 0 and not resolved.frozen
    if clips and "gradient_clipping" not in loaded.settings.model_fields_set:
        _log.info(
            "%s: gradient_clipping is not set: gradients are clipped to a norm of %g, DeepSpeed's default; 0 turns it off",
            resolved.source,
            resolved.gradient_clipping,
        )


def _has_no_optimizer(config: Config, optimizer: Any, scheduler: Any) -> bool:
    """Return whether neither an argument nor the config has an optimizer or a scheduler, and log it."""
    given = config.settings.optimizer, config.settings.scheduler, optimizer, scheduler
    if any(value is not None for value in given):
        return False
    warn_once(
        "%s names no optimizer: the engine can evaluate, load and save, but not train; to train, add an "
        '"optimizer" section or pass optimizer=...',
        config.source,
    )
    return True


@contextmanager
def _watched(world: World, silent_s: float | None) -> Iterator[None]:
    """Start to watch the ranks, and stop if the block fails."""
    try:
        world.begin_watch(silent_s)
        with world.calling("initialize"):
            yield
    except BaseException:
        world.watch.close()
        raise


def config_source(args: Any, config: Any, config_params: Any = None, call: str = "initialize()") -> Any:
    """Return the config that was passed to a call; `args` is any object with attributes. Raises ConfigError if there is none,
    or if two differ."""
    given = {"config": config, "config_params": config_params}
    given |= {f"args.{name}": getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config")}
    configs = {name: value for name, value in given.items() if value is not None}
    if not configs:
        raise ConfigError(f"{call} got no config: pass config=dict or path, or --deepspeed_config FILE in args")
    first, *rest = configs.values()
    if any(config != first for config in rest):
        raise ConfigError(f"{call} got different configs in {' and '.join(configs)}: pass one")
    return first


def _optimizer(
    config: Config, client: torch.optim.Optimizer | None, parameters: Any, model: nn.Module
) -> ZeroOptimizer:
    scaler = LossScaler(settings=config.loss_scaling, non_finite=config.non_finite_gradients)
    if config.frozen:
        return NoOptimizer(scaler)
    if client is not None:
        if not isinstance(client, torch.optim.Optimizer):
            raise UsageError(f"initialize(optimizer=...): expected a torch optimizer, got {type(client).__name__}")
        return ZeroOptimizer(client, scaler)
    if config.settings.optimizer is None:
        raise ConfigError(
            f'{config.source}: there is no optimizer: add an "optimizer" section to the config, or pass optimizer=...; '
            "for evaluation, generation or a reference model leave the scheduler out too, or pass frozen=True"
        )
    return ZeroOptimizer(optimizer_from_config(config.settings.optimizer, parameters, model), scaler)


def _schedule(config: Config, client: Any, optimizer: ZeroOptimizer) -> LRSchedule | None:
    if client is None:
        section = config.settings.scheduler
        return None if section is None else LRSchedule(named_schedule(section, optimizer))
    if hasattr(client, "step") and not isinstance(client, type):
        return LRSchedule(client)
    if callable(client):
        scheduler = client(optimizer)
        return None if scheduler is None else LRSchedule(scheduler)
    raise UsageError(
        f"initialize(lr_scheduler=...): expected a scheduler or a function of the optimizer, got {type(client).__name__}"
    )


def _loader(config: Config, world: World, data: Dataset[Any], collate_fn: Collate | None) -> TrainingLoader:
    return TrainingLoader(
        data,
        batch=config.batch,
        rank=world.rank,
        world_size=world.world_size,
        seed=config.settings.seed,
        drop_last=config.settings.dataloader_drop_last,
        collate_fn=collate_fn,
    )
