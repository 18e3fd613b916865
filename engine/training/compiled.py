"""Compiles units with torch while their parameters are gathered and released.

[Note: compiled units]
A unit's gather and release stay outside of graphs: the hooks of its module run as usual, and only the module's forward is
compiled. Values are gathered into one storage (see [Note: the storage of a parameter]), which a graph's saved tensors alias;
a graph depends only on a parameter's dtype and shape: new values and addresses cause no recompilation.

Within a compiled forward all parameters of the unit are gathered, so the hooks on inner modules are disabled: they would be
traced, and they differ between blocks. Blocks whose forward is the same function share its graphs.

A unit that contains another unit is not compiled, since the inner unit's gather would be in its graph; nor is a single layer of
torch.nn, which is one operator.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from zstore.errors import UsageError

from ..params.sharding import Unit
from ..zero.hooks import ModuleHook, UnitHooks

_log = logging.getLogger("zstore")

Forward = Callable[..., Any]
Compiler = Callable[[Forward], Forward]
"""Like `torch.compile(backend=...)` without a function: compiles the function that is passed to it."""


def make_compiler(backend: Any, options: dict[str, Any]) -> Compiler:
    """Return `torch.compile` with these arguments. Raises UsageError for invalid ones, and if inductor has no C++ compiler on
    a machine without CUDA."""
    compiler = functools.partial(torch.compile, backend=backend, **options)
    try:
        compiler(_noop)
    except Exception as error:
        raise UsageError(f"engine.compile(): torch.compile refuses these arguments: {error}") from error
    cxx = os.environ.get("CXX", "g++")
    if backend == "inductor" and not torch.cuda.is_available() and not any(map(shutil.which, (cxx, "clang++"))):
        raise UsageError(
            f"engine.compile(): without a GPU, inductor compiles C++, and there is no compiler {cxx!r}: install g++, "
            'set the variable CXX to a different compiler, or pass backend="aot_eager", which needs none'
        )
    return compiler


def _noop() -> None:
    """Do nothing: compiled only to check the arguments."""


class CompiledUnits:
    """The units whose forward is compiled. See [Note: compiled units]."""

    def __init__(self, model: nn.Module, hooks: UnitHooks, compiler: Compiler) -> None:
        """Compile the units that can be compiled. Raises UsageError for a compiler that captures CUDA graphs."""
        _require_no_cuda_graphs(compiler)
        hooks.stay_out_of_graphs(model.modules())
        self._originals: list[tuple[nn.Module, Any]] = []
        """Modules, each with the original forward in its `__dict__`, or None."""
        self.names: list[str] = []
        """Names of the compiled units."""
        units = [sharded.unit for sharded in hooks.units.all]
        chosen = [unit for unit in units if _can_be_compiled(unit, units)]
        forwards = {unit: _function_of(unit.modules[0]) for unit in chosen}
        num_sharing = Counter(forwards.values())
        compiled = {forward: compiler(forward) for forward in num_sharing}
        for unit, forward in forwards.items():
            self._replace(unit, compiled[forward], hooks.hook_ids, num_sharing[forward])
        num_uncompiled = len(units) - len(self.names)
        if chosen:
            _log.info("compile: %d units, %d are not compiled", len(chosen), num_uncompiled)
        else:
            _log.warning(
                "compile: none of the %d units is compiled: each is one layer of torch.nn or contains other units. Put "
                "the model's blocks into a ModuleList",
                num_uncompiled,
            )

    def _replace(self, unit: Unit, compiled: Forward, hook_ids: frozenset[int], num_sharing: int) -> None:
        module = unit.modules[0]
        original = module.__dict__.get("forward")
        self._originals.append((module, original))
        if original is None or _is_method_of(original, module):
            compiled = MethodType(compiled, module)
        module.__dict__["forward"] = _CompiledForward(module, compiled, hook_ids, num_sharing)
        self.names.append(unit.name)

    def remove(self) -> None:
        """Restore the modules' forwards."""
        while self._originals:
            module, original = self._originals.pop()
            if isinstance(module.__dict__.get("forward"), _CompiledForward):
                del module.__dict__["forward"]
                if original is not None:
                    module.__dict__["forward"] = original


def _require_no_cuda_graphs(compiler: Compiler) -> None:
    settings = cast("Any", compiler(_noop)).get_compiler_config()
    if settings and settings.get("triton.cudagraphs"):
        raise UsageError(
            "compile: CUDA graphs need parameters at fixed addresses, but sharded and offloaded ones move: omit "
            'mode="reduce-overhead", mode="max-autotune" or options={"triton.cudagraphs": True}, or use '
            'mode="max-autotune-no-cudagraphs"'
        )


def _can_be_compiled(unit: Unit, units: Sequence[Unit]) -> bool:
    if not unit.modules:
        return False
    module, inside = unit.modules[0], set(unit.modules[0].modules())
    if any(other is not unit and other.modules and other.modules[0] in inside for other in units):
        return False
    return any(module.children()) or not type(module).__module__.startswith("torch.nn.")


def _function_of(module: nn.Module) -> Forward:
    """Return the function of the module's forward, which instances of a class usually share."""
    own = module.__dict__.get("forward")
    if own is None:
        return type(module).forward
    return cast("Forward", own.__func__) if _is_method_of(own, module) else cast("Forward", own)


def _is_method_of(forward: Any, module: nn.Module) -> bool:
    return isinstance(forward, MethodType) and forward.__self__ is module


class _CompiledForward:
    """A module's compiled forward. Copies and pickles of the module have the original forward."""

    def __init__(self, module: nn.Module, compiled: Forward, hook_ids: frozenset[int], num_sharing: int) -> None:
        functools.update_wrapper(self, module.forward)  # for code that inspects its arguments
        self._module = module
        self._compiled = compiled
        self._modules = list(module.modules())
        self._hook_ids = hook_ids
        self._num_sharing = num_sharing
        """Modules whose forward is the same function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled forward, while the module's parameters are gathered."""
        with _without_hooks(self._modules, self._hook_ids), _more_graphs(self._num_sharing):
            return self._compiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._module)]
        return MethodType(type(copied).forward, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")


@contextmanager
def _without_hooks(modules: Sequence[nn.Module], hook_ids: frozenset[int]) -> Iterator[None]:
    """Remove the engine's hooks from the modules within the block."""
    originals = []
    for module in modules:
        attributes = module.__dict__
        before, after = attributes["_forward_pre_hooks"], attributes["_forward_hooks"]
        originals.append((attributes, before, after))
        attributes["_forward_pre_hooks"] = _without_ids(before, hook_ids)
        attributes["_forward_hooks"] = _without_ids(after, hook_ids)
    try:
        yield
    finally:
        for attributes, before, after in originals:
            attributes["_forward_pre_hooks"], attributes["_forward_hooks"] = before, after


def _without_ids(hooks: OrderedDict[int, Any], hook_ids: frozenset[int]) -> OrderedDict[int, Any]:
    # Also without a `ReadGuard`'s hook: the hook of the unit's module checks all its parameters.
    remaining = {n: hook for n, hook in hooks.items() if n not in hook_ids and not isinstance(hook, ModuleHook)}
    return OrderedDict(remaining)


@contextmanager
def _more_graphs(num_sharing: int) -> Iterator[None]:
    """Allow a forward shared by several blocks, which may differ in a constant, as many graphs as separate forwards."""
    config = torch._dynamo.config
    limits = config.recompile_limit, config.accumulated_recompile_limit
    config.recompile_limit, config.accumulated_recompile_limit = (limit * num_sharing for limit in limits)
    try:
        yield
    finally:
        config.recompile_limit, config.accumulated_recompile_limit = limits
