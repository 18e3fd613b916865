"""State dicts of a model in training: an error with advice, in place of NaN or of values that the next step would
replace."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zstore.errors import UsageError

from ..params.record import ParameterRecord, Residency

_log = logging.getLogger("zstore")
_INSTEAD = (
    "call engine.module_state_dict(), engine.save_16bit_model(folder) or engine.save_checkpoint(folder) on all ranks, or "
    "`with zstore.gather(model):` around it"
)


class StateDictGuard:
    """Lets `state_dict()` raise if parameters are sharded, and `load_state_dict()` also if masters would not follow.

    `loses(parameter)` says whether values that are loaded into a parameter would be lost. Copies of the model are not
    watched.
    """

    def __init__(
        self,
        model: nn.Module,
        record_of: Callable[[nn.Parameter], ParameterRecord | None],
        loses: Callable[[ParameterRecord], bool],
    ) -> None:
        self._record_of = record_of
        self._loses = loses
        self._is_suspended = False
        self._gives_empties = False
        """Whether a state dict has empty tensors for sharded parameters."""
        self._whole: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()
        self._handles: list[RemovableHandle] = []
        for module in model.modules():
            self._handles += [
                module.register_state_dict_pre_hook(self._before),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(self._before_load),  # type: ignore[no-untyped-call]
            ]

    def give_empties(self, model: nn.Module, *, logs: bool) -> None:
        """Let sharded parameters be empty tensors in a state dict, and log that once if `logs` is set."""
        self._gives_empties, self._told = True, not logs
        for module in model.modules():
            # An object of its own, on which torch leaves a mark.
            hook = partial(self._after)
            self._handles.append(module.register_state_dict_post_hook(hook))  # type: ignore[no-untyped-call]

    def give_whole(self, state: Mapping[str, Any]) -> None:
        """Let sharded parameters have the values of this state dict of the model, as long as it is alive, in place of empty
        tensors."""
        self._whole.update({name: value for name, value in state.items() if isinstance(value, torch.Tensor)})

    def _records(self, module: nn.Module) -> Iterator[tuple[str, ParameterRecord]]:
        for name, parameter in module.named_parameters(recurse=False):
            record = None if self._is_suspended else self._record_of(parameter)
            if record is not None:
                yield name, record

    def _released(self, module: nn.Module) -> list[ParameterRecord]:
        return [record for _, record in self._records(module) if record.residency is Residency.RELEASED]

    def _before(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        released = self._released(module)
        if released and not self._gives_empties:
            raise UsageError(f"state_dict() of a model whose parameters are sharded: {_INSTEAD}")
        for record in released:
            record.detaches_empty = True

    def _after(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        released = self._released(module)
        empty = False
        for record in released:
            record.detaches_empty = False
            whole = next((self._whole[one] for one in (record.name, *record.aliases) if one in self._whole), None)
            empty |= whole is None
            for name, parameter in module.named_parameters(recurse=False) if whole is not None else ():
                if parameter is record.parameter and prefix + name in state:
                    state[prefix + name] = whole
        if empty and not self._told:
            self._told = True
            _log.warning(
                "state_dict() has sharded parameters as empty tensors, as in DeepSpeed; for whole ones %s", _INSTEAD
            )

    def _before_load(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *others: Any) -> None:
        loaded = (record for name, record in self._records(module) if prefix + name in state)
        if any(record.residency is Residency.RELEASED or self._loses(record) for record in loaded):
            raise UsageError(
                "load_state_dict() of a model in training: its values are in shards, or in fp32 masters that would overwrite "
                "them at the next step. Call engine.load_module_state_dict(state) on all ranks, or load before "
                "initialize(), or `with zstore.gather(model, modifier_rank=0):` around it"
            )

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Allow everything for the length of a `with` block."""
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = False

    def remove(self) -> None:
        """Take the hooks off the modules; a second call does nothing."""
        for handle in self._handles:
            handle.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies and pickles of the model have hooks that do nothing."""
        return _watches_nothing, ()


def _watches_nothing() -> StateDictGuard:
    return StateDictGuard(nn.Module(), lambda _: None, lambda _: False)
