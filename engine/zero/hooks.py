"""Gathering parameters by unit around forward and backward (stage 3).

[Note: when a unit is gathered and released]
forward   the pre-hook of the first of its modules that is called gathers it; that module's forward hook releases it.
backward  a hook on the output tensors of that call gathers it again: autograd runs nodes in the reverse order of their
          creation. It is released when each of its parameters has its gradient (no remaining node reads them), or when the
          backward reaches a unit that ran before it (unless one is nested in the other, or was called there), or at the end.
A call during the backward (activation checkpointing) gathers the unit if necessary, and never releases it. If a module's
output has no tensor, the unit stays gathered until the end of the backward. Gathering is a collective: every rank runs the
same modules in the same order.

[Note: stray reads]
A forward, or recomputation in a backward, may read a parameter of a released unit, as in `F.linear(x, self.embed.weight)` or a
penalty over `self.parameters()`: its class reports the operation (`ReleasedParameter`). The unit is gathered until the end of
that forward and again for the whole backward, if all such units and one more fit into the live-parameter budget. Otherwise
it is gathered for that operation only, and again before its nodes in the backward, unless the output shares its storage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..params.record import EndRead, ParameterRecord, Residency
from .unshard import ShardedUnit, ShardedUnits, StrayRead

_Inputs = dict[int, Any]
_NOT_AN_INPUT = object()


class Phase(Enum):
    """Parts of an iteration in which modules are called."""

    FORWARD = "forward"
    """A forward that a backward may follow."""
    INFERENCE = "inference"
    """A forward without a backward: a separate iteration."""
    BACKWARD = "backward"
    """Recomputation in a backward."""


class UnitHooks:
    """Keeps units gathered while they are needed. See [Note: when a unit is gathered and released]."""

    def __init__(self, model: nn.Module, sharded: ShardedUnits) -> None:
        self.units = sharded
        self._inputs: dict[nn.Module, _Inputs] = {}
        """The nodes that produced the input tensors of each running module, by the tensors' ids."""
        self._open_modules: list[nn.Module] = []
        """Running modules that contain units."""
        self._in_use_before: list[ShardedUnit] = []
        """Units that were in use before the current forward."""
        self._gathered_for_read: list[ShardedUnit] = []
        """Units gathered for the current operation."""
        self._phase = Phase.FORWARD
        self._handles: list[RemovableHandle] = []
        for unit in (unit for unit in sharded.all if unit.records):
            for record in unit.records:
                record.on_read = self._read
            for module in unit.unit.modules:
                self._register(module, partial(self._before_forward, unit), partial(self._after_forward, unit))
        # Modules that contain units: scripts may call them directly, as `generate` calls an encoder.
        blocks = [unit for unit in sharded.all if unit.records and len(unit.unit.modules) > 1]
        within = {inner for unit in blocks for inner in unit.inner}
        for module in model.modules():
            if module not in within and list(module.children()):
                self._register(module, self._enter, self._leave)

    def _register(self, module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._handles += [
            module.register_forward_pre_hook(ModuleHook(before), prepend=True, with_kwargs=True),
            module.register_forward_hook(ModuleHook(after), always_call=True),
        ]

    def add_handles(self, handles: Iterable[RemovableHandle]) -> None:
        """Treat the engine's other hooks on the same modules like these hooks."""
        self._handles += handles

    @property
    def hook_ids(self) -> frozenset[int]:
        """Ids that modules pass to these hooks."""
        return frozenset(handle.id for handle in self._handles)

    def stay_out_of_graphs(self, modules: Iterable[nn.Module]) -> None:
        """Make torch.compile break its graphs at these hooks, whose state must be neither traced nor guarded."""
        ids = self.hook_ids
        for hooks in (hooks for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks)):
            for hook_id in ids.intersection(hooks):
                if isinstance(hook := hooks[hook_id], ModuleHook):  # otherwise it is disabled already
                    hooks[hook_id] = torch.compiler.disable(hook.__call__)  # type: ignore[no-untyped-call]

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._open_modules.append(module)
        if len(self._open_modules) == 1 and self._phase is not Phase.BACKWARD:
            self._in_use_before, trains = list(self.units.in_use), torch.is_grad_enabled()
            if trains:
                self._change_reads({StrayRead.AFTER_BACKWARD: StrayRead.NONE})
            kind = "training" if trains else "inference"
            if self.units.begin(f"{kind} of {type(module).__name__} {id(module)}") and not trains:
                self._phase = Phase.INFERENCE

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module not in self._open_modules:  # a hook ahead of `_enter` raised, or it was interrupted
            return
        self._open_modules.remove(module)
        if not self._open_modules and self._phase is not Phase.BACKWARD:
            self._end_reads()
            phase, self._phase = self._phase, Phase.FORWARD
            if output is None:
                # A forward that raised has no output; its order is not recorded, and other ranks may be at a different unit.
                for unit in [unit for unit in self.units.in_use if unit not in self._in_use_before]:
                    self.units.reshard(unit)
                self.units.end(failed=True)
            elif phase is Phase.INFERENCE:
                self.units.end()

    def _end_reads(self) -> None:
        """End a forward's stray reads."""
        for unit in self.units.all:
            if unit.is_in_use and unit.stray_read is not StrayRead.NONE:
                self.units.reshard(unit)
        self._change_reads(
            {StrayRead.IN_FORWARD: StrayRead.FOR_BACKWARD if torch.is_grad_enabled() else StrayRead.NONE}
        )

    def end_interrupted(self) -> None:
        """End a forward interrupted by Ctrl-C as if it had raised (called by the engine)."""
        del self._open_modules[1:]
        for module in list(self._open_modules):
            self._leave(module, None, None)

    def _change_reads(self, changes: Mapping[StrayRead, StrayRead]) -> None:
        for unit in self.units.all:
            unit.stray_read = changes.get(unit.stray_read, unit.stray_read)

    def _before_forward(self, unit: ShardedUnit, module: nn.Module, args: Any, kwargs: Any) -> None:
        in_backward = self._phase is Phase.BACKWARD
        if not unit.is_in_use:
            self.units.unshard(unit)
            unit.holder = None if in_backward else module
        if unit.holder is None or unit.holder is module:
            unit.called_within.update(self._running())
        if torch.is_grad_enabled() and (in_backward or unit.holder is module):
            self._inputs[module] = {id(tensor): tensor.grad_fn for tensor in tensors_in((args, kwargs))}

    def _after_forward(self, unit: ShardedUnit, module: nn.Module, args: Any, output: Any) -> None:
        inputs = self._inputs.pop(module, {})
        if self._phase is Phase.BACKWARD:
            self._watch(unit, output, inputs)
            return
        if not unit.is_in_use or unit.holder is not module:
            return
        if not torch.is_grad_enabled() or self._watch(unit, output, inputs):
            self.units.reshard(unit)
        else:
            unit.holder = None
        if not self._open_modules and not self._running():
            self._end_reads()

    def _running(self) -> list[ShardedUnit]:
        """Return the units whose forward is running."""
        return [unit for unit in self.units.in_use if unit.holder is not None]

    def _read(self, record: ParameterRecord, func: Any) -> EndRead | None:
        """Gather the unit of a released parameter for an operation. See [Note: stray reads]."""
        running = self._running()
        if not (running or self._open_modules or self._phase is Phase.BACKWARD):
            raise record.no_values_error(func)
        unit = self.units.values[record].units[0]
        fits = self.units.has_room_for_stray(unit)
        # The backward of one operation may need all of its units at once.
        unit.called_within.update(running, self._gathered_for_read)
        self.units.unshard(unit)
        if not fits:
            self._gathered_for_read.append(unit)
            return partial(self._end_read, unit)
        self._keep_gathered(unit)
        return None

    def _keep_gathered(self, unit: ShardedUnit) -> None:
        if unit.stray_read is StrayRead.NONE:
            unit.stray_read = StrayRead.FOR_BACKWARD if self._phase is Phase.BACKWARD else StrayRead.IN_FORWARD

    def _end_read(self, unit: ShardedUnit, output: Any) -> None:
        """Release a unit that was gathered for one operation, whose backward gathers it again."""
        self._gathered_for_read.remove(unit)
        memory = {record.full.untyped_storage()._cdata for record in unit.records}
        if any(
            tensor.layout is torch.strided and tensor.untyped_storage()._cdata in memory
            for tensor in tensors_in(output)
        ):
            self._keep_gathered(unit)
            return
        self._watch(unit, output, {})
        self.units.reshard(unit)

    def _watch(self, unit: ShardedUnit, output: Any, inputs: _Inputs) -> bool:
        """Gather the unit before the backward of these outputs; return False if they have no tensor.

        A returned tensor that is among the module's `inputs`, like the position bias in T5's blocks, is a different
        unit's output: its gradient arrives after this unit's nodes have run.
        """
        has_tensors = False
        for tensor in tensors_in(output):
            if inputs.get(id(tensor), _NOT_AN_INPUT) is tensor.grad_fn:
                continue
            has_tensors = True
            if tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, unit))  # type: ignore[no-untyped-call]
        return has_tensors

    def _before_backward(self, unit: ShardedUnit, gradient: torch.Tensor) -> None:
        if not unit.is_in_use:
            self.units.unshard(unit)
        if unit.due is not None:
            return
        for earlier in list(self.units.in_use):
            if earlier.due is not None and not earlier.is_stray and not _nested(unit, earlier):
                self.units.reshard(earlier)
        self._open(unit)

    def _open(self, unit: ShardedUnit) -> None:
        unit.due = {record for record in unit.unit.parameters if record.residency is Residency.GATHERED}

    def start_backward(self) -> None:
        """Gather units with stray reads; forwards from now on are recomputation (called by the engine)."""
        self._phase = Phase.BACKWARD
        self.units.fill_own_memory()
        for unit in self.units.all:
            if unit.is_stray:
                if not unit.is_in_use:
                    self.units.unshard(unit)
                self._open(unit)

    def arrived(self, record: ParameterRecord) -> None:
        """Record that the gradient of `record` was accumulated."""
        values = self.units.values.get(record)
        for unit in () if values is None else values.units:
            if unit.due is not None:
                unit.due.discard(record)
                if not unit.due:
                    self.units.reshard(unit)

    def end_backward(self, *, training_follows: bool = False) -> None:
        """Release all units (called by the engine on all ranks). `training_follows`: the training backward comes next."""
        self._release_all()
        if not training_follows:
            self._change_reads({StrayRead.FOR_BACKWARD: StrayRead.AFTER_BACKWARD})
        self.units.end()

    def abandon(self) -> None:
        """Release all units after a failed backward (called by the engine)."""
        self._release_all()
        self._change_reads(dict.fromkeys(StrayRead, StrayRead.NONE))
        self.units.end(failed=True)

    def _release_all(self) -> None:
        self._phase = Phase.FORWARD
        for unit in list(self.units.in_use):
            self.units.reshard(unit)
        self.units.fill_own_memory(fill=False)

    def remove(self) -> None:
        """Remove the hooks from the modules, and drop pending gathers."""
        self.units.close()
        for record in self.units.values:
            record.on_read = record.gather_for_copy = None
        for handle in self._handles:
            handle.remove()


def _nested(unit: ShardedUnit, other: ShardedUnit) -> bool:
    """Return whether one of the units is nested in the other, or was called in it: then one unit's hook does not imply
    that the other's nodes have run. If they share an output, the inner unit's hook runs first."""
    if other in unit.called_within or unit in other.called_within:
        return True
    return unit.unit.modules[0] in other.inner or other.unit.modules[0] in unit.inner


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield the tensors in a module's output: tuples, lists, mappings, dataclasses, other objects' attributes."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield value
        return
    if value is None or isinstance(value, str | bytes | int | float | nn.Module | type) or id(value) in seen:
        return
    seen.add(id(value))
    inner: Iterable[Any]
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        inner = value
    elif dataclasses.is_dataclass(value):
        inner = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        inner = getattr(value, "__dict__", {}).values()
    for item in inner:
        yield from tensors_in(item, seen)


class ModuleHook:
    """A hook of a module; in copies and pickles of the module, a hook that does nothing replaces it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the hook."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (_no_op,)


def _no_op(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""
