"""The partition of the training state: over the ranks, by ZeRO stage, with the dtypes of gradients; and into units of
parameters that are gathered together. Pure: reads a module tree, changes nothing. Only functions import torch.

[Note: dtypes of gradients]
Autograd creates a gradient in the parameter's dtype. The mean over ranks is summed in fp32, and rounded once to the dtype in
which it is sent. Several micro-batches accumulate by default in fp32, since in bf16 a sum of equal gradients stops growing
after 256 of them. The accumulated rows may be wider than a first sum needs, and an unexpected second micro-batch widens them:
the bits do not depend on the planned number of micro-batches. See docs/design/0004-gradients.md.

[Note: units of a model]
- A child of an outermost ModuleList that has parameters is a unit with its whole subtree: a transformer block. If it has
  more elements than may be gathered at once, it is split into its own parameters and its children, recursively.
- A leaf, a module marked by `mark_leaves`, is a unit with its whole subtree and is never split: ranks may call different
  modules of it, such as the experts to which their tokens are routed.
- Every other module that owns parameters is a unit: an embedding, a final norm, an output head.
- Containers without a forward (ModuleList, ParameterList) are never called, so they are not units: their own parameters
  belong to the containing module. nn.MultiheadAttention reads its output projection without calling it: it is a whole unit.
- Parameters outside of callable modules form a last unit without modules; nothing gathers it, so it stays resident.
- A parameter belongs to the first unit that uses it, which reduces its gradient; every unit that uses it gathers it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from zstore.format import Grid, make_grid

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .record import ParameterRecord

D = TypeVar("D")
"""A dtype: torch's, or for a plan its name."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The parts of the training state that are sharded over ranks, which is all that a ZeRO stage determines.

    At world size 1 only `parameters` may be true: offloaded parameters are gathered from the store.
    """

    world_size: int
    """Ranks that share the state."""
    optimizer_state: bool
    """Masters and the optimizer's slots (stages 1 to 3)."""
    gradients: bool
    """Gradients, reduced to their owners during every backward (stages 2 and 3); else whole, once per step."""
    parameters: bool
    """Parameters, gathered by unit for forward and backward (stage 3)."""

    @staticmethod
    def of_stage(stage: int, world_size: int, *, offloads_parameters: bool = False) -> Sharding:
        """Return the sharding of `stage` (0 to 3) over `world_size` ranks."""
        has_peers = world_size > 1
        return Sharding(
            world_size=world_size,
            optimizer_state=has_peers and stage >= 1,
            gradients=has_peers and stage >= 2,
            parameters=stage >= 3 and (has_peers or offloads_parameters),
        )

    def state_grid(self, stored_shape: tuple[int, ...]) -> Grid:
        """Return the grid of the state of a parameter of `stored_shape`."""
        return make_grid(stored_shape, self.world_size if self.optimizer_state else 1)

    def state_shard(self, rank: int) -> int:
        """Return the index of the shard of the state that `rank` owns."""
        return rank if self.optimizer_state else 0


@dataclass(frozen=True, kw_only=True)
class GradientTypes(Generic[D]):
    """The gradient dtypes of a run. See [Note: dtypes of gradients]."""

    summed: D
    """Dtype in which several micro-batches accumulate by default: fp32."""
    accumulation: D | None = None
    """Dtype in which gradients accumulate, regardless of the number of micro-batches; None: the default."""
    reduction: D | None = None
    """Dtype in which they are reduced; None: the parameter's dtype. Always None on a single rank."""
    accumulates: bool = False
    """Whether steps are planned to have more than one micro-batch."""

    def reduced(self, dtype: D) -> D:
        """Return the dtype in which gradients of parameters of `dtype` are sent between ranks."""
        return self.reduction or dtype

    def accumulated(self, dtype: D, *, several: bool) -> D:
        """Return the dtype of accumulated gradients of parameters of `dtype`, over one or `several` micro-batches."""
        if self.accumulation is not None:
            return self.accumulation
        return self.summed if several else self.reduced(dtype)

    def planned(self, dtype: D) -> D:
        """Return the dtype in which gradients of parameters of `dtype` wait for the update, as planned."""
        return self.accumulated(dtype, several=self.accumulates)


def add_in(total: torch.Tensor, part: torch.Tensor, dtype: torch.dtype) -> None:
    """Add `part` to `total`, whose dtype can represent any value of `dtype`; the sum is rounded to `dtype`."""
    if total.dtype == dtype:
        total.add_(part)
    else:
        total.copy_(total.to(dtype).add_(part))


def is_narrower(dtype: torch.dtype, required: torch.dtype) -> bool:
    """Return whether `dtype` is too narrow for values of dtype `required`."""
    return dtype.itemsize < required.itemsize


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters that are gathered, released and reduced together."""

    name: str
    modules: tuple[nn.Module, ...]
    """Modules whose forward needs the unit: its root first, then the modules of its subtree with parameters."""
    parameters: tuple[ParameterRecord, ...]
    """All parameters that the modules use, in module order."""
    owned: tuple[ParameterRecord, ...]
    """The parameters that belong to this unit."""


def find_units(
    model: nn.Module, records: Mapping[nn.Parameter, ParameterRecord], live_numel: int | None = None
) -> list[Unit]:
    """Return the units of `model` in module order; every parameter belongs to exactly one.

    A block of more than `live_numel` elements is several units.
    """
    units: list[Unit] = []
    assigned: set[ParameterRecord] = set()
    for name, modules, parameters in unit_parameters(model, live_numel):
        used = tuple(records[p] for p in parameters)
        owned = tuple(record for record in used if record not in assigned)
        assigned.update(owned)
        units.append(Unit(name, modules, used, owned))
    return units


def unit_parameters(
    model: nn.Module, live_numel: int | None = None
) -> list[tuple[str, tuple[nn.Module, ...], list[nn.Parameter]]]:
    """Return (name, modules, parameters that these use, in module order) of each unit, as in `find_units`."""
    units = [
        (name, modules, list(dict.fromkeys(p for module in modules for p in _own_parameters(module))))
        for name, modules in _unit_modules(model, "", False, live_numel)
    ]
    in_units = {p for _, _, parameters in units for p in parameters}
    outside = [p for p in model.parameters() if p not in in_units]
    if outside:
        units.append(("(in no module that is called)", (), outside))
    return [unit for unit in units if unit[2]]


def _unit_modules(
    module: nn.Module, name: str, in_list: bool, live_numel: int | None
) -> Iterator[tuple[str, tuple[nn.Module, ...]]]:
    """Yield (name, modules) of each unit in the subtree; `in_list`: the parent is a ModuleList, or was split."""
    from torch import nn

    callable_ = _has_forward(module)
    whole = isinstance(module, nn.MultiheadAttention) or module in _leaves
    split = (
        in_list and not whole and live_numel is not None and sum(p.numel() for p in module.parameters()) > live_numel
    )
    if callable_ and (whole or (in_list and not split)):
        yield name, tuple(dict.fromkeys(m for m in module.modules() if m is module or _own_parameters(m)))
        return
    if callable_ and _own_parameters(module):
        yield name, (module,)
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        # A ModuleDict in a ModuleList is not called either: its children are the blocks.
        child_in_list = isinstance(module, nn.ModuleList) or split or (in_list and not callable_)
        yield from _unit_modules(child, path, child_in_list, live_numel)


_leaves: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def mark_leaves(modules: Iterable[nn.Module], *, marked: bool = True) -> None:
    """Make each of these modules a unit in engines created from now on; `marked=False` undoes that."""
    (_leaves.update if marked else _leaves.difference_update)(modules)


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module was marked."""
    return module in _leaves


def modules_of_classes(model: nn.Module, classes: Iterable[type[nn.Module] | str]) -> list[nn.Module]:
    """Return the modules of `model` of these classes, given as types (including subclasses) or as names, short or qualified."""
    kinds = tuple(kind for kind in classes if isinstance(kind, type))
    names = {kind for kind in classes if isinstance(kind, str)}
    return [
        module
        for module in model.modules()
        if isinstance(module, kinds)
        or names & {type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}"}
    ]


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a call of `module` itself may read: its own and those of its parameter lists."""
    return list(_with_uncallable(module)) if _has_forward(module) else []


def _with_uncallable(module: nn.Module) -> Iterator[nn.Parameter]:
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not _has_forward(child):
            yield from _with_uncallable(child)


def _has_forward(module: nn.Module) -> bool:
    from torch import nn

    return type(module).forward is not nn.Module.forward
