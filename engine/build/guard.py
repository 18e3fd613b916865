"""Modules whose parameters were released while they were built: an error with advice, in place of NaN."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from zstore.errors import UsageError


class BuildingGuard:
    """Lets a call, `state_dict()` and `load_state_dict()` of such modules raise.

    `holds(parameter)`, a method, says whether a parameter was released. The modules keep its object alive.
    """

    def __init__(self, holds: Callable[[nn.Parameter], bool]) -> None:
        self._holds = weakref.WeakMethod(holds)
        self._suspended = 0
        self.lets_state_dicts_pass = False
        """Whether released parameters may be in a state dict, as NaN."""
        self._handles: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Watch over these modules too."""
        holds = self._holds()  # also keeps the builder alive

        def before(module: nn.Module, *others: Any) -> None:
            self._check(module, holds)

        def before_state_dict(module: nn.Module, *others: Any) -> None:
            if not self.lets_state_dicts_pass:
                self._check(module, holds)

        for module in modules:
            if module not in self._handles:
                self._handles[module] = [
                    module.register_forward_pre_hook(before),
                    module.register_state_dict_pre_hook(before_state_dict),  # type: ignore[no-untyped-call]
                    module.register_load_state_dict_pre_hook(before),  # type: ignore[no-untyped-call]
                ]

    def _check(self, module: nn.Module, holds: Callable[[nn.Parameter], bool] | None) -> None:
        if self._suspended or holds is None:
            return
        for name, parameter in module.named_parameters(recurse=False):
            if holds(parameter):
                raise UsageError(
                    f"parameter {name!r} of this {type(module).__name__} was built within zstore.Init, so its values rest "
                    "in shards: give the model to zstore.initialize() first, or read and change it within "
                    "`with zstore.gather(model, modifier_rank=0):` or the same `with init:`"
                )

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Allow everything for the length of a `with` block."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    def let_go(self, model: nn.Module) -> None:
        """Take the hooks off the modules of `model`."""
        for module in model.modules():
            for handle in self._handles.pop(module, []):
                handle.remove()
