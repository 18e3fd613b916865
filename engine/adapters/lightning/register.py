"""The names under which `Trainer(strategy=...)` finds the strategy."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .files import loader_of_folders

_OFFLOADED = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
}
NAMES: dict[str, dict[str, Any]] = {
    "zstore": {},
    "zstore_stage_1": {"stage": 1},
    "zstore_stage_2": {"stage": 2},
    "zstore_stage_3": {"stage": 3},
    "zstore_stage_3_offload": {"config": _OFFLOADED},
    "zstore_spawn": {"start_method": "spawn"},
    "zstore_fork": {"start_method": "fork"},
}
"""Name -> arguments of the strategy."""


def register(registry: Any, strategy: Any) -> None:
    """Enter the strategy into Lightning's registry, and let `MODULE.load_from_checkpoint` read the folders that it saves."""
    saving: Any = import_module(f"{strategy.library}.core.saving")
    saving.pl_load = loader_of_folders(saving.pl_load)
    for name, arguments in NAMES.items():
        description = f"zstore's engine ({arguments})" if arguments else "zstore's engine"
        registry.register(name, strategy, description=description, override=True, **arguments)
