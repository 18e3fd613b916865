"""Units: parameters that are gathered together. Pure: reads a module tree, changes nothing.

[Note: how a model falls into units]
- A child of an outermost ModuleList that holds parameters is a unit with all of its subtree: a transformer block. One
  that has more elements than may be gathered at a time falls into its own parameters and its children, and so on.
- A leaf, a module that was marked by `mark_leaves`, is a unit with all of its subtree wherever it is, and never falls into
  others: ranks may call different ones of its modules, as the experts that their tokens go to.
- Every other module with parameters of its own is a unit: an embedding, a final norm, an output head.
- Containers without a forward (ModuleList, ModuleDict, ParameterList) are never called, so they are no units: their
  modules are, and their own parameters go with the module that holds them. nn.MultiheadAttention reads its output
  projection without calling it and is a unit as a whole.
- Parameters that no callable module holds make up a last unit without modules; nothing gathers it, so it stays
  resident.
- A parameter belongs to the first unit that uses it in module order, which reduces its gradient; every unit that uses
  it gathers it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from .record import ParameterRecord


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters that are gathered, released and reduced together."""

    name: str
    modules: tuple[nn.Module, ...]
    """Modules whose forward needs the unit: the unit's own module first, then those of its subtree with parameters."""
    parameters: tuple[ParameterRecord, ...]
    """All parameters that the modules use, in module order."""
    owned: tuple[ParameterRecord, ...]
    """Those that belong to this unit."""


def find_units(
    model: nn.Module, records: Mapping[nn.Parameter, ParameterRecord], live_numel: int | None = None
) -> list[Unit]:
    """Return the units of `model` in module order; every parameter belongs to exactly one.

    A block of more than `live_numel` elements is several units.
    """
    units: list[Unit] = []
    taken: set[ParameterRecord] = set()
    for name, modules, parameters in unit_parameters(model, live_numel):
        used = tuple(records[p] for p in parameters)
        owned = tuple(record for record in used if record not in taken)
        taken.update(owned)
        units.append(Unit(name, modules, used, owned))
    return units


def unit_parameters(
    model: nn.Module, live_numel: int | None = None
) -> list[tuple[str, tuple[nn.Module, ...], list[nn.Parameter]]]:
    """Return (name, modules, parameters that these use, in module order) of each unit, as `find_units` finds them."""
    found = [
        (name, modules, list(dict.fromkeys(p for module in modules for p in _own_parameters(module))))
        for name, modules in _unit_modules(model, "", False, live_numel)
    ]
    called = {p for _, _, parameters in found for p in parameters}
    rest = [p for p in model.parameters() if p not in called]
    if rest:
        found.append(("(in no module that is called)", (), rest))
    return [unit for unit in found if unit[2]]


def called_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that some unit gathers."""
    return {p for _, modules, parameters in unit_parameters(model) for p in parameters if modules}


def _unit_modules(
    module: nn.Module, name: str, in_list: bool, live_numel: int | None
) -> Iterator[tuple[str, tuple[nn.Module, ...]]]:
    """Yield (name, modules) of each unit in the subtree; `in_list` if the parent is a ModuleList, or was split."""
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
        below = isinstance(module, nn.ModuleList) or split or (in_list and not callable_)
        yield from _unit_modules(child, path, below, live_numel)


_leaves: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def mark_leaves(modules: Iterable[nn.Module], *, marked: bool = True) -> None:
    """Let each of these modules be a unit in engines that are made from now on, or no longer."""
    (_leaves.update if marked else _leaves.difference_update)(modules)


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module was marked."""
    return module in _leaves


def of_classes(model: nn.Module, classes: Iterable[type[nn.Module] | str]) -> list[nn.Module]:
    """Return the modules of `model` of these classes, given as types, whose subclasses count, or as names, short or with their
    module's."""
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
    return type(module).forward is not nn.Module.forward
