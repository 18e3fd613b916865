"""State dicts of models whose parameters are sharded: an error that says what to do, in place of NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from zstore.errors import UsageError

from .parameters import ParameterRecord, Residency


class StateDictGuard:
    """Lets `state_dict()` and `load_state_dict()` of a model with sharded parameters raise rather than give NaN."""

    def __init__(self, model: nn.Module, record_of: Callable[[nn.Parameter], ParameterRecord | None]) -> None:
        self._record_of = record_of
        self._is_suspended = False
        self._handles: list[RemovableHandle] = []
        for module in model.modules():
            self._handles += [
                module.register_state_dict_pre_hook(self._before),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(self._before_load),  # type: ignore[no-untyped-call]
            ]

    def _released(self, module: nn.Module) -> bool:
        for _, parameter in module.named_parameters(recurse=False):
            record = self._record_of(parameter)
            if record is not None and record.residency is Residency.RELEASED:
                return not self._is_suspended
        return False

    def _before(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self._released(module):
            raise UsageError(
                "state_dict() of a model whose parameters are sharded: call engine.module_state_dict(), "
                "engine.save_16bit_model(folder) or engine.save_checkpoint(folder) on all ranks, or "
                "`with zstore.gather(model):` around it"
            )

    def _before_load(self, module: nn.Module, *others: Any) -> None:
        if self._released(module):
            raise UsageError(
                "load_state_dict() of a model whose parameters are sharded: load before initialize(), or on all ranks "
                "`with zstore.gather(model, modifier_rank=0):` around it, or engine.load_checkpoint(folder)"
            )

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let everything pass for the length of a `with` block."""
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = False

    def remove(self) -> None:
        """Take the hooks off the modules; a second call does nothing."""
        for handle in self._handles:
            handle.remove()
