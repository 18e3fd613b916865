"""Modules that wait for the update of their parameters before they run, for an update behind `step()`.

A hook on all modules of the process, since an optimizer is given parameters and no model. A module waits for its own
parameters; one that FSDP2 gathers for, for all those that it gathers; a graph of torch.export, torch.fx or torch.jit, for all
below it. A module whose state is requested waits too. Graphs that torch.compile made before there was this hook ignore it,
and are compiled anew.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook

from .records import LocalRecord
from .stepping import Stepping


class ForwardHooks:
    """Lets modules wait for the updates of `stepping`, for as long as this lives."""

    def __init__(self, stepping: Stepping, records: Mapping[torch.Tensor, LocalRecord]) -> None:
        self._stepping = stepping
        self._records = records
        self._gathers: weakref.WeakKeyDictionary[nn.Module, list[LocalRecord]] = weakref.WeakKeyDictionary()
        """By module of FSDP2, the records that it gathers."""
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Modules whose state is not read before the updates."""
        this = weakref.ref(self)

        def before(module: nn.Module, args: Any) -> None:
            hooks = this()
            if hooks is not None:
                hooks._before(module)

        _forget_graphs()
        self._handles: list[Any] = [register_module_forward_pre_hook(_not_compiled(before))]

    def _before(self, module: nn.Module) -> None:
        read = self._read_by(module)
        if read and self._stepping.is_behind:
            self._stepping.wait(read)

    def _read_by(self, module: nn.Module) -> list[LocalRecord]:
        if isinstance(module, FSDPModule):
            if _gathers_ahead(module):
                return list(self._records.values())
            known = self._gathers.get(module)
            if known is None:
                known = self._gathers[module] = self._gathered_by(module)
                self._watch(module)
            return known
        if isinstance(module, _GRAPHS):
            return [self._records[p] for p in module.parameters() if p in self._records]
        own = [self._records[p] for p in module._parameters.values() if p is not None and p in self._records]
        if own:
            self._watch(module)
        return own

    def _gathered_by(self, module: nn.Module) -> list[LocalRecord]:
        """Return the parameters below a module of FSDP2 that no module of FSDP2 below it gathers."""
        found: dict[LocalRecord, None] = {}
        waiting = [module]
        while waiting:
            each = waiting.pop()
            for parameter in each._parameters.values():
                if parameter is not None and parameter in self._records:
                    found[self._records[parameter]] = None
            waiting += [child for child in each.children() if not isinstance(child, FSDPModule)]
        return list(found)

    def _watch(self, module: nn.Module) -> None:
        """Let `module.state_dict()`, and that of the modules that hold it, wait for all updates."""
        if module in self._watched:
            return
        self._watched.add(module)
        stepping = weakref.ref(self._stepping)

        def before(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            alive = stepping()
            if alive is not None and alive.is_behind:
                alive.wait()

        watched: Any = module
        self._handles.append(watched.register_state_dict_pre_hook(before))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


_GRAPHS = (torch.fx.GraphModule, torch.jit.ScriptModule)
"""Modules that read parameters of those below them without calling these."""


def _forget_graphs() -> None:
    """Let frames that torch.compile compiled be compiled anew. Without any, nothing is loaded of the compiler, which takes
    seconds on a machine with a CUDA device."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is not None and getattr(frames, "FRAME_COUNTER", True):
        torch.compiler.reset()


def _not_compiled(before: Any) -> Any:
    """Return a hook that ends a graph of torch.compile, so that it runs each time, before the code after it."""
    disable: Any = torch.compiler.disable
    why = "zstore waits here for the updates behind step(): compile without fullgraph=True, or choose another overlap"
    return disable(before, reason=why)


def _gathers_ahead(module: FSDPModule) -> bool:
    """Return whether the module begins to gather for others in its forward (`set_modules_to_forward_prefetch`)."""
    state: Any = module._get_fsdp_state()
    return bool(getattr(state, "_states_to_forward_prefetch", True))
