"""`deepspeed.utils`, `deepspeed.runtime.utils` and `deepspeed.comm`: the functions that scripts import, besides the access to
state and torch.distributed's own."""

from __future__ import annotations

import functools
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import nn

from zstore.engine.params.units import is_leaf, mark_leaves, of_classes
from zstore.engine.runtime.messages import show_messages
from zstore.errors import UsageError
from zstore.io import resident_bytes
from zstore.sizes import format_bytes

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger("zstore")
"""The logger of zstore's messages, which are seen from the import on."""
show_messages()


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on the given ranks; without any, or with -1 among them, on every rank."""
    rank = torch_dist.get_rank() if torch_dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[rank %d] %s", rank, message)


def instrument_w_nvtx(func: F) -> F:
    """Return the function as it is: ranges for a profiler are torch.profiler's."""
    return func


class RepeatingLoader:
    """Gives the batches of a loader over and over."""

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
    """Within the block, tensors are made on `device`, floating ones that name no type in `dtype`."""

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, device, enabled
        self._ends = ExitStack()

    def __enter__(self) -> Self:
        if self._enabled:
            self._ends.enter_context(torch.device(self._device))
            self._ends.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return a copy of tensors in lists, tuples and dicts on `device`, each with memory of its own."""
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, Mapping):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())  # type: ignore[call-arg]
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Return the object that a dotted name leads to."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Replace the object that a dotted name leads to."""
    above, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, above) if above else model, name, module)


# -- leaf modules -----------------------------------------------------------------------------------------------------


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether a module was marked as a leaf, which `initialize` lets be gathered as a whole at stage 3."""
    return is_leaf(model)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model` that were marked as leaves."""
    return [module for module in model.modules() if is_leaf(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or take its mark away."""
    mark_leaves([model], marked=flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, given as types, whose subclasses count, or as names, before `initialize`; return them.

    Raises UsageError if there is none.
    """
    return _marked(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark off the modules of these classes, and return them. Raises UsageError if there is none."""
    return _marked(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules that `named_modules()` calls so; return them, and the names that none has, which are an error else."""
    found = {name: [one for path, one in model.named_modules() if path == name] for name in module_names}
    return _marked_by(found, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names end so; return them, and the endings that none has, which are an error else."""
    found = {end: [one for path, one in model.named_modules() if path.endswith(end)] for end in module_name_suffixes}
    return _marked_by(found, flag, raise_if_not_found)


def _marked_by(found: Mapping[str, Sequence[nn.Module]], flag: bool, raises: bool) -> tuple[list[nn.Module], list[str]]:
    missing = [name for name, modules in found.items() if not modules]
    modules = list(dict.fromkeys(module for modules in found.values() for module in modules))
    mark_leaves(modules, marked=flag)
    if missing and raises:
        raise UsageError(f"the model has no module {', '.join(missing)}")
    return modules, missing


def _marked(model: nn.Module, classes: Sequence[type[nn.Module] | str], flag: bool, raises: bool) -> list[nn.Module]:
    found = of_classes(model, classes)
    if not found and raises:
        named = ", ".join(kind if isinstance(kind, str) else kind.__name__ for kind in classes)
        raise UsageError(f"the model has no module of the classes {named}")
    mark_leaves(found, marked=flag)
    return found


def set_random_seed(seed: int) -> None:
    """Seed the generators of random, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Return whether torch's version is within the bounds."""
    from packaging.version import parse

    found = parse(torch.__version__)
    return (min_version is None or parse(str(min_version)) <= found) and (
        max_version is None or found <= parse(str(max_version))
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
    """Return this rank's number on its machine, as the launcher says; -1 without one."""
    return int(os.environ.get("LOCAL_RANK", "-1"))


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log on rank 0 the memory that the process uses, and its tensors on the CUDA device; nothing unless `force`, as in
    DeepSpeed."""
    if not force or (torch_dist.is_initialized() and torch_dist.get_rank() != 0):
        return
    device = f", CUDA {format_bytes(torch.cuda.memory_allocated())}" if torch.cuda.is_available() else ""
    logger.info("%s: process %s%s", message, format_bytes(resident_bytes()), device)
