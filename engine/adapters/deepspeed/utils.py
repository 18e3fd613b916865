"""`deepspeed.utils`, `deepspeed.runtime.utils` and `deepspeed.comm`: the functions that scripts import, except for access to
state and torch.distributed's own; `deepspeed.accelerator`; and configs in all forms that DeepSpeed accepts."""

from __future__ import annotations

import base64
import binascii
import copy
import functools
import json
import logging
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import nn

from zstore.engine.config.config import read_config
from zstore.engine.params.sharding import is_leaf, mark_leaves, modules_of_classes
from zstore.engine.runtime.process import show_messages
from zstore.errors import UsageError, format_bytes
from zstore.io import resident_bytes

from .names import missing_text

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("zstore")
"""zstore's logger, whose messages are shown from this import on."""
show_messages()


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on the given ranks; on every rank if none are given or -1 is among them."""
    rank = torch_dist.get_rank() if torch_dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[rank %d] %s", rank, message)


def instrument_w_nvtx(func: F) -> F:
    """Return the function unchanged, since torch.profiler has its own ranges."""
    return func


class RepeatingLoader:
    """Repeats the batches of a loader endlessly."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


class OnDevice(AbstractContextManager["OnDevice"]):
    """Within the block, tensors are created on `device`, with `dtype` as the default floating-point type."""

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, device, enabled
        self._exit_stack = ExitStack()

    def __enter__(self) -> Self:
        if self._enabled:
            self._exit_stack.enter_context(torch.device(self._device))
            self._exit_stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
        return self

    def __exit__(self, *_: object) -> None:
        self._exit_stack.close()


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return copies on `device` of the tensors in lists, tuples and dicts, which share no memory."""
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, Mapping):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())  # type: ignore[call-arg]
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Return the object with a dotted name."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Replace the object with a dotted name."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether a module is marked as a leaf, which is gathered as a whole at stage 3."""
    return is_leaf(model)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model` that are marked as leaves."""
    return [module for module in model.modules() if is_leaf(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark a module as a leaf, or remove its mark."""
    mark_leaves([model], marked=flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes (types including subclasses, or names), before `initialize`; return them.

    Raises UsageError if no module is found.
    """
    return _mark_all(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the mark of the modules of these classes, and return them. Raises UsageError if there are none."""
    return _mark_all(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules with these names in `named_modules()`; return them and, unless it raises, the missing names."""
    found = {name: [module for path, module in model.named_modules() if path == name] for name in module_names}
    return _mark_found(found, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules with these name suffixes; return them and, unless it raises, the missing suffixes."""
    modules = list(model.named_modules())
    found = {end: [module for path, module in modules if path.endswith(end)] for end in module_name_suffixes}
    return _mark_found(found, flag, raise_if_not_found)


def _mark_found(found: Mapping[str, list[nn.Module]], flag: bool, raises: bool) -> tuple[list[nn.Module], list[str]]:
    missing = [name for name, modules in found.items() if not modules]
    modules = list(dict.fromkeys(module for modules in found.values() for module in modules))
    mark_leaves(modules, marked=flag)
    if missing and raises:
        raise UsageError(f"the model has no module {', '.join(missing)}")
    return modules, missing


def _mark_all(model: nn.Module, classes: Sequence[type[nn.Module] | str], flag: bool, raises: bool) -> list[nn.Module]:
    modules = modules_of_classes(model, classes)
    if not modules and raises:
        named = ", ".join(kind if isinstance(kind, str) else kind.__name__ for kind in classes)
        raise UsageError(f"the model has no module of the classes {named}")
    mark_leaves(modules, marked=flag)
    return modules


def set_random_seed(seed: int) -> None:
    """Seed the generators of random, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Return whether torch's version is within the bounds."""
    from packaging.version import parse

    version = parse(torch.__version__)
    return (min_version is None or parse(str(min_version)) <= version) and (
        max_version is None or version <= parse(str(max_version))
    )


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    """Return `item` with the values for which `criterion_func` is true, through lists, tuples and dicts, on `device`."""
    if criterion_func(item):
        return item.to(device)
    if isinstance(item, list | tuple):
        return type(item)([move_to_device(each, device, criterion_func) for each in item])
    if isinstance(item, dict):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    return item


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return torch_dist.group.WORLD


def get_local_rank() -> int:
    """Return this rank's local rank, as set by the launcher; -1 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "-1"))


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory used by rank 0's process and by its tensors on the CUDA device; as in DeepSpeed, only with `force`."""
    if not force or (torch_dist.is_initialized() and torch_dist.get_rank() != 0):
        return
    device = f", CUDA {format_bytes(torch.cuda.memory_allocated())}" if torch.cuda.is_available() else ""
    logger.info("%s: process %s%s", message, format_bytes(resident_bytes()), device)


_HAS_CUDA = torch.cuda.is_available()


def _device_name(index: int | None = None) -> str:
    """Return "cuda" or "cpu", or "cuda:N" with an index."""
    if not _HAS_CUDA:
        return "cpu"
    return "cuda" if index is None else f"cuda:{index}"


def _current_name() -> str:
    return _device_name(torch.cuda.current_device() if _HAS_CUDA else None)


def _dtypes() -> list[torch.dtype]:
    """Return the types that a config may use."""
    bf16 = [torch.bfloat16] if not _HAS_CUDA or torch.cuda.is_bf16_supported() else []
    return [torch.float32, torch.float16, *bf16]


_COMMON: dict[str, Callable[..., Any]] = {
    "device_name": _device_name,
    "device": lambda index=None: torch.device(_device_name(index)),
    "current_device_name": _current_name,
    "is_available": lambda: True,
    "is_fp16_supported": lambda: True,
    "supported_dtypes": _dtypes,
    "random": lambda: torch.random,
    "amp": lambda: torch.amp,
    "is_synchronized_device": lambda: not _HAS_CUDA,
    "communication_backend_name": lambda: "nccl" if _HAS_CUDA else "gloo",
    "on_accelerator": lambda tensor: tensor.device.type == _device_name(),
    "pin_memory": lambda tensor, align_bytes=1: tensor.pin_memory() if _HAS_CUDA else tensor,
    "is_pinned": torch.Tensor.is_pinned,
}


def _no_op(*_: object, **__: object) -> None:
    """Do nothing."""


def _zero(*_: object, **__: object) -> int:
    return 0


_CPU: dict[str, Callable[..., Any]] = {
    "current_device": _zero,
    "device_count": lambda: int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE", "1")),
    "set_device": _no_op,
    "is_bf16_supported": lambda: True,
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "get_rng_state": torch.get_rng_state,
    "set_rng_state": torch.set_rng_state,
    "initial_seed": torch.initial_seed,
    **{f"{peak}memory_{kind}": _zero for peak in ("", "max_") for kind in ("allocated", "reserved", "cached")},
    **dict.fromkeys(("empty_cache", "reset_peak_memory_stats", "reset_max_memory_allocated"), _no_op),
    **dict.fromkeys(("range_push", "range_pop"), _no_op),
}
"""Names of torch.cuda that torch.cpu lacks; ranks count as devices, and memory is not tracked."""


class TorchAccelerator:
    """CUDA if there is a CUDA device, else the CPU.

    It has the functions of `torch.cuda`, or of `torch.cpu` and `_CPU`, those of `_COMMON`, and the tensor types.
    """

    def __getattr__(self, name: str) -> Any:
        if name in _COMMON:
            return _COMMON[name]
        if name.endswith("Tensor") and hasattr(torch, name):
            return functools.partial(getattr(torch, name), device=_current_name())
        if not _HAS_CUDA and name in _CPU:
            return _CPU[name]
        module: Any = torch.cuda if _HAS_CUDA else torch.cpu
        if not name.startswith("_") and hasattr(module, name):
            return getattr(module, name)
        raise AttributeError(missing_text(f"deepspeed.accelerator.get_accelerator().{name}"), name=name, obj=self)


def is_current_accelerator_supported() -> bool:
    """Return True, since both CUDA and the CPU are supported."""
    return True


@functools.cache
def get_accelerator() -> TorchAccelerator:
    """Return the accelerator of this process."""
    return TorchAccelerator()


def without_ignored_keys(source: Any) -> Any:
    """Return a config, read as by `raw_config`, without the keys that DeepSpeed ignores; a copy, if it is a dict.

    Those are an infinite `steps_per_print` and `zero_allow_untested_optimizer`, which accelerate adds, and top-level keys with
    a dot, which trl adds.
    """
    raw = raw_config(source)
    if not isinstance(raw, Mapping):
        return raw
    config = {key: value for key, value in raw.items() if "." not in key}
    config.pop("zero_allow_untested_optimizer", None)
    steps = config.get("steps_per_print")
    if isinstance(steps, float) and math.isinf(steps):
        config["steps_per_print"] = 0
    return config


def raw_config(source: Any) -> Any:
    """Return a copy of the dict in `source` (a dict, a file, or base64-encoded JSON); return anything else unchanged."""
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    if isinstance(source, str) and not os.path.exists(source):
        decoded = _decode_base64(source)
        if decoded is not None:
            return decoded
    if isinstance(source, str | os.PathLike):
        return read_config(source)
    return source


def _decode_base64(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(base64.urlsafe_b64decode(text))
    except (binascii.Error, ValueError):
        return None
    return value if isinstance(value, dict) else None
