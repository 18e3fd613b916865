"""`deepspeed.zero`: models built in shards, whole parameters in a block, and the attributes by which libraries recognize
sharded parameters.

[Note: marks]
DeepSpeed gives the parameters of a stage 3 model attributes that transformers, peft, trl and scripts read: `ds_id` (a number,
in the order of construction, equal on all ranks), `ds_shape`, `ds_numel`, `ds_status`. `Init` sets them, and `initialize`
at stage 3. `ds_status` is AVAILABLE for a parameter that is kept whole on every rank, and for others within
`GatheredParameters`; within a forward, where the engine gathers a parameter for itself, it stays NOT_AVAILABLE, and a script
can gather it. `ds_tensor` has this rank's rows, 1-D, in the engine's memory, read-only; if they are in files it has their
shape and no values (meta). `ds_persist`: the parameter is always whole on every rank.
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

from .utils import cleaned


class ZeroParamStatus(Enum):
    """Whether a parameter is materialized."""

    AVAILABLE = 1
    """It has all of them."""
    NOT_AVAILABLE = 2
    """They are sharded; GatheredParameters gathers them."""
    INFLIGHT = 3
    """They are being gathered; never reported."""


def _string_enum(name: str, words: str) -> Any:
    """Return an enumeration of strings equal to their names."""
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


_numbers = itertools.count()


def mark(parameter: nn.Parameter, status: ZeroParamStatus, rows: torch.Tensor | None = None) -> None:
    """Give a parameter the attributes of [Note: marks], with `rows` also `ds_tensor`."""
    marked: Any = parameter
    if rows is not None:
        marked.ds_tensor, marked.ds_persist = rows, status is ZeroParamStatus.AVAILABLE
        marked.partition_numel = partial(int, rows.numel())  # for Lightning's summary of a model
    if not hasattr(parameter, "ds_id"):
        marked.ds_id = next(_numbers)
    marked.ds_shape, marked.ds_numel, marked.ds_status = parameter.shape, parameter.numel(), status


def is_zero_param(parameter: object) -> bool:
    """Return whether a parameter belongs to a stage 3 model."""
    return isinstance(parameter, nn.Parameter) and hasattr(parameter, "ds_id")


class Init(PlainInit):
    """`zstore.Init` with DeepSpeed's arguments: within the block models are built in shards (all ranks).

    As in DeepSpeed, parameters have the 16-bit type of the config from the start (buffers keep theirs), rank 0's values
    count if ranks build different ones, a block within a block does nothing, and the state dict of a sharded model has NaN
    for its values. Raises UsageError for process groups of fewer than all ranks, and for arguments about quantization.
    """

    _blocks = 0
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
        self._marking: RemovableHandle | None = None
        source = config if config is not None else config_dict_or_path
        source = None if source is None else cleaned(source)
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
        self._enabled = self._enabled and not Init._blocks
        super().__enter__()
        if self._enabled:
            Init._blocks += 1
            self._marking = register_module_parameter_registration_hook(partial(_mark_built, self._built_dtype))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._marking is not None:
            self._marking.remove()
            self._marking = None
            Init._blocks -= 1
        super().__exit__(kind, value, tb)


def _dtype_of(source: Any) -> torch.dtype | None:
    """Return the 16-bit type of a config; None for fp32, and without a config."""
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

    `params` is a parameter, a module, or an iterable in any order, in which other objects are ignored. `fwd_module` is
    ignored: a module's forward gathers the parameters that it reads.
    """
    del fwd_module
    if not enabled:
        yield
        return
    parameters = _listed(params)
    hidden: list[Any] = [p for p in parameters if getattr(p, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE]
    with gather(parameters, modifier_rank):
        for parameter in hidden:
            parameter.ds_status = ZeroParamStatus.AVAILABLE
        try:
            yield
        finally:
            for parameter in hidden:
                parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE


def _listed(params: Any) -> list[nn.Parameter]:
    """Return the parameters in the order of their construction, equal on all ranks: a set's order differs."""
    if isinstance(params, torch.Tensor):
        params = [params]
    elif isinstance(params, nn.Module):
        params = params.parameters()
    if not isinstance(params, Iterable):
        raise UsageError(f"GatheredParameters() expects parameters, or a module, got {type(params).__name__}")
    found = [p for p in dict.fromkeys(params) if isinstance(p, nn.Parameter)]
    return sorted(found, key=lambda p: getattr(p, "ds_id", -1))


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: within a forward, a weight can be read without calling its module."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing."""


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
    """Return `fn`: `Init` does not replace the constructors of tensors. transformers patches this function."""
    return fn
