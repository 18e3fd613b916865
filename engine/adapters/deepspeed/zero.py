"""`deepspeed.zero`: models constructed in shards, gathered parameters in a block, and the attributes by which libraries
recognize sharded parameters.

[Note: marks]
DeepSpeed gives the parameters of a stage 3 model attributes that transformers, peft, trl and scripts read: `ds_id` (a number
in construction order, equal on all ranks), `ds_shape`, `ds_numel`, `ds_status`. They are set by `Init`, and by `initialize`
at stage 3. `ds_status` is AVAILABLE for a parameter that always stays gathered, and for others within `GatheredParameters`;
within a forward, where the engine gathers a parameter for itself, it stays NOT_AVAILABLE, and a script can gather it.
`ds_tensor` has this rank's rows, 1-D, in the engine's memory, read-only; if they are in files, it is a meta tensor of the
same shape. `ds_persist` says that the parameter always stays gathered on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, IntEnum
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from zstore.engine.access.safe_access import gather
from zstore.engine.build.init import Init as PlainInit
from zstore.engine.config.config import load_config
from zstore.errors import UsageError

from .utils import without_ignored_keys


class ZeroParamStatus(Enum):
    """Whether a parameter is materialized."""

    AVAILABLE = 1
    """All values are present."""
    NOT_AVAILABLE = 2
    """Values are sharded; GatheredParameters gathers them."""
    INFLIGHT = 3
    """Values are being gathered; never reported."""


def _string_enum(name: str, words: str) -> Any:
    """Return an enumeration whose values are strings equal to their names."""
    return Enum(name, {word: word for word in words.split()}, type=str, module=__name__)


ZeroStageEnum = IntEnum(
    "ZeroStageEnum",
    {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3},
    module=__name__,
)
OffloadDeviceEnum = _string_enum("OffloadDeviceEnum", "none cpu nvme")
OffloadStateTypeEnum = _string_enum(
    "OffloadStateTypeEnum", "optim_states hp_params lp_params lp_grads contiguous_grad_buffer"
)


_next_id = itertools.count()


def mark(parameter: nn.Parameter, status: ZeroParamStatus, rows: torch.Tensor | None = None) -> None:
    """Set the attributes of [Note: marks] on a parameter, including `ds_tensor` if `rows` is given."""
    attributes: Any = parameter
    if rows is not None:
        attributes.ds_tensor, attributes.ds_persist = rows, status is ZeroParamStatus.AVAILABLE
        attributes.partition_numel = partial(int, rows.numel())  # for Lightning's summary of a model
    if not hasattr(parameter, "ds_id"):
        attributes.ds_id = next(_next_id)
    attributes.ds_shape, attributes.ds_numel, attributes.ds_status = parameter.shape, parameter.numel(), status


def is_zero_param(parameter: object) -> bool:
    """Return whether a parameter belongs to a stage 3 model."""
    return isinstance(parameter, nn.Parameter) and hasattr(parameter, "ds_id")


class Init(PlainInit):
    """`zstore.Init` with DeepSpeed's arguments: within the block, models are constructed in shards (all ranks).

    As in DeepSpeed, parameters have the config's 16-bit type from the start (buffers keep theirs), rank 0's values are used
    if ranks construct different ones, a nested block does nothing, and the values in the state dict of a sharded model are
    NaN. Raises UsageError for process groups of fewer than all ranks, and for arguments about quantization.
    """

    _open_blocks = 0
    """Number of open blocks."""

    def __init__(  # noqa: PLR0913, PLR0917 - DeepSpeed's arguments
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        groups = (data_parallel_group, zero_param_parallel_group, sequence_data_parallel_group)
        if any(group not in (None, torch.distributed.group.WORLD) for group in groups):
            raise UsageError(
                "deepspeed.zero.Init: parameters are sharded as the config says: leave the process groups out"
            )
        if zero_quantized_weights or zero_quantized_nontrainable_weights:
            raise UsageError(
                "deepspeed.zero.Init: the config sets quantized communication (zero_optimization.zero_quantized_weights); "
                "leave zero_quantized_... out of the call"
            )
        if param_swapper is not None:
            raise UsageError(
                "deepspeed.zero.Init(param_swapper=...): the config sets the tier of parameters; leave it out"
            )
        self._hook: RemovableHandle | None = None
        source = config if config is not None else config_dict_or_path
        source = None if source is None else without_ignored_keys(source)
        self._built_dtype = dtype or _dtype_of(source)
        super().__init__(
            module,
            config=source,
            enabled=enabled,
            dtype=dtype,
            remote_device=remote_device,
            pin_memory=pin_memory,
            mpu=mpu,
            mem_efficient_linear=mem_efficient_linear,
            _from_rank_0=True,
        )
        if module is not None and enabled:
            for parameter in module.parameters():
                mark(parameter, ZeroParamStatus.NOT_AVAILABLE)

    def __enter__(self) -> Self:
        self._enabled = self._enabled and not Init._open_blocks
        super().__enter__()
        if self._enabled:
            Init._open_blocks += 1
            self._hook = register_module_parameter_registration_hook(partial(_mark_built, self._built_dtype))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            Init._open_blocks -= 1
        super().__exit__(kind, value, tb)


def _dtype_of(source: Any) -> torch.dtype | None:
    """Return the 16-bit type of a config; None for fp32 or without a config."""
    if source is None:
        return None
    settings = load_config(source).settings
    return torch.bfloat16 if settings.bf16.enabled is True else torch.float16 if settings.fp16.enabled is True else None


def _mark_built(dtype: torch.dtype | None, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    if parameter is None:
        return
    if dtype is not None and parameter.is_floating_point() and parameter.dtype != dtype and not parameter.is_meta:
        parameter.data = parameter.data.to(dtype)
    mark(parameter, ZeroParamStatus.NOT_AVAILABLE)


@contextmanager
def GatheredParameters(  # noqa: N802
    params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
) -> Iterator[None]:
    """Alias of `zstore.gather(params, modifier_rank)`; does nothing unless `enabled` (all ranks).

    `params` is a parameter, a module, or an iterable in any order; other objects in it are ignored. `fwd_module` is
    ignored, since a module's forward gathers the parameters that it reads.
    """
    del fwd_module
    if not enabled:
        yield
        return
    parameters = _in_construction_order(params)
    unavailable: list[Any] = [p for p in parameters if getattr(p, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE]
    with gather(parameters, modifier_rank):
        for parameter in unavailable:
            parameter.ds_status = ZeroParamStatus.AVAILABLE
        try:
            yield
        finally:
            for parameter in unavailable:
                parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE


def _in_construction_order(params: Any) -> list[nn.Parameter]:
    """Return the parameters in construction order, which is equal on all ranks, unlike the order of a set."""
    if isinstance(params, torch.Tensor):
        params = [params]
    elif isinstance(params, nn.Module):
        params = params.parameters()
    if not isinstance(params, Iterable):
        raise UsageError(f"GatheredParameters() expects parameters, or a module, got {type(params).__name__}")
    parameters = [p for p in dict.fromkeys(params) if isinstance(p, nn.Parameter)]
    return sorted(parameters, key=lambda p: getattr(p, "ds_id", -1))


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing, since a forward can read a weight without calling its module."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing."""


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
    """Return `fn`, since `Init` does not replace tensor constructors. transformers patches this function."""
    return fn
