"""The arguments of an Accelerator: those that zstore does not serve, and those that belong together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, TorchDynamoPlugin
from accelerate.utils.deepspeed import DummyOptim
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zstore.errors import UsageError

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
