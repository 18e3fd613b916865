"""The config and the arguments of a loop: those that zstore does not serve, and those that belong together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, TorchDynamoPlugin
from accelerate.utils.deepspeed import DummyOptim
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zstore.engine.config.config import CONFIG_VARIABLE, read_given
from zstore.errors import ConfigError, UsageError

_REFUSED = {
    "deepspeed_plugin": "pass the DeepSpeed JSON as zstore_config",
    "deepspeed_plugins": "pass the DeepSpeed JSON as zstore_config",
    "fsdp_plugin": "zstore shards the model itself, by zero_optimization.stage of the config",
    "megatron_lm_plugin": "zstore has no tensor or pipeline parallelism",
    "torch_tp_plugin": "zstore has no tensor parallelism",
    "parallelism_config": "zstore is data parallel alone; zero_optimization.stage of the config shards the model",
}
"""Arguments of accelerate's Accelerator, and why each is refused."""
_DEFAULTS = (None, False, "default")
"""Arguments of torch.compile."""
_LAUNCHERS = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}
"""Variables that `accelerate launch` sets, and the request of each."""


def read_source(given: Any, argument: str, *, default: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], str]:
    """Return the config as a dict of its own, and its source, for messages.

    `given` is a dict, a path or JSON text; None: the variable ZSTORE_CONFIG, and without it the `default`. Raises ConfigError
    if there is none.
    """
    found = read_given(given, argument)
    if found is None and default is None:
        raise ConfigError(
            f"there is no config: pass {argument}=dict or path of a DeepSpeed JSON, or set {CONFIG_VARIABLE}"
        )
    return found or (dict(default or {}), "the default config")


def written(raw: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path of a config as it was read; None if there is none."""
    value: Any = raw
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


def section(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section of a config as it was read, made if there is none; a dict of no config if the section is not a
    dict, which the config's own check reports."""
    found = raw.setdefault(name, {})
    return found if isinstance(found, dict) else {}


def ask_for_precision(raw: dict[str, Any]) -> None:
    """Leave the precision to the loop if the config names none."""
    if not {"fp16", "bf16", "bfloat16"} & raw.keys():
        raw["bf16"], raw["fp16"] = {"enabled": "auto"}, {"enabled": "auto"}


def refuse_launchers(source: str) -> None:
    """Raise UsageError if `accelerate launch` was told to shard in another way."""
    for variable, what in _LAUNCHERS.items():
        if os.environ.get(variable, "false").lower() == "true":
            raise UsageError(
                f"{source}: accelerate was started for {what} ({variable}=true), and zstore shards the model itself: run "
                "`accelerate config` anew without it, or start with torchrun"
            )


def mismatch_text(source: str, differing: Iterable[str]) -> str:
    """Return the message about values of a config that contradict the loop's."""
    lines = "".join(f"\n  - {line}" for line in differing)
    return f'{source} contradicts the arguments; write "auto" into the config, or make both equal:{lines}'


def refuse(named: Mapping[str, Any]) -> None:
    """Raise UsageError for arguments that zstore does not serve."""
    for name, why in _REFUSED.items():
        if named.get(name) is not None:
            raise UsageError(f"Accelerator({name}=...): {why}")


def compiling(named: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Take the arguments of torch.compile out of the arguments; return the backend and its arguments, or None."""
    plugin, backend = named.pop("dynamo_plugin", None), named.pop("dynamo_backend", None)
    if plugin is None:
        plugin = TorchDynamoPlugin() if backend is None else TorchDynamoPlugin(backend=str(backend))
    backend = plugin.backend.value.lower()
    how = {name: getattr(plugin, name) for name in ("mode", "fullgraph", "dynamic", "options")}
    return None if backend == "no" else (backend, {key: value for key, value in how.items() if value not in _DEFAULTS})


def communication_type(named: Mapping[str, Any]) -> str | None:
    """Return the type that a communication hook of DistributedDataParallel sends gradients in; None without a hook.

    Raises UsageError for hooks that do more.
    """
    kinds = DDPCommunicationHookType
    types = {kinds.FP16: "fp16", kinds.BF16: "bf16"}
    for one in named.get("kwargs_handlers") or ():
        if not isinstance(one, DistributedDataParallelKwargs) or (hook := kinds(one.comm_hook)) == kinds.NO:
            continue
        wrapper = kinds(one.comm_wrapper)
        if hook not in types or wrapper not in (kinds.NO, hook):
            raise UsageError(
                f"DistributedDataParallelKwargs(comm_hook={hook.value!r}, comm_wrapper={wrapper.value!r}): of hooks, fp16 and "
                'bf16 alone are served; "zero_quantized_gradients" of the config sends less than these'
            )
        return types[hook]
    return None


def refuse_placed(model: nn.Module) -> None:
    """Raise UsageError for a model that others have placed or sharded."""
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise UsageError(
            "the model is spread over devices by device_map: load it without, zstore places it; models larger than memory "
            "by zstore.from_pretrained"
        )


def is_schedule(one: Any) -> bool:
    """Return whether it is a schedule of torch's, which the loop steps."""
    return isinstance(one, LRScheduler | ReduceLROnPlateau)


def owns(model: nn.Module, optimizer: Any) -> bool:
    """Return whether the optimizer's first parameter is one of the model's."""
    if isinstance(optimizer, DummyOptim):
        # Its parameters may be an iterator, which the engine takes.
        optimizer.params = list(optimizer.params)
        first = next(iter(optimizer.params), None)
        first = next(iter(first["params"]), None) if isinstance(first, Mapping) else first
    else:
        first = next((one for group in optimizer.param_groups for one in group["params"]), None)
    return any(one is first for one in model.parameters())


def batch_size(loader: Any) -> int | None:
    """Return the samples of a loader's batch on one rank; None if it does not say."""
    size = loader.batch_size
    if size is None:
        size = getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None
