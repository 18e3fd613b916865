"""The blocks of a model: the modules in its outermost ModuleLists. Pure: reads a module tree, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the callable modules with parameters in the outermost ModuleLists of `model`, in module order."""
    return list(dict.fromkeys(_blocks(model, in_list=False)))


def _blocks(module: nn.Module, *, in_list: bool) -> Iterator[nn.Module]:
    is_callable = type(module).forward is not nn.Module.forward
    if in_list and is_callable:
        if any(True for _ in module.parameters()):
            yield module
        return
    for child in module.children():
        # A ModuleDict in a ModuleList is not called either: its children are the blocks.
        yield from _blocks(child, in_list=isinstance(module, nn.ModuleList) or in_list)
