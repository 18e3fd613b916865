"""The weights that peft saves of a model's adapters."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from zstore.engine.access.module_state import state_entries
from zstore.engine.engine import Engine


def adapter_names(engine: Engine) -> list[str]:
    """Return the names in the state dict of what peft saves of a model's adapters, frozen parameters and buffers among them
    (all ranks)."""
    from peft import get_peft_model_state_dict

    chosen: list[str] = []
    with engine.world.agreeing():
        if engine.global_rank == 0:
            entries = dict(state_entries(engine.access))
            # peft hands out what it was given: each entry is known by its own view.
            views = {name: value.detach() for name, value in entries.items() if isinstance(value, torch.Tensor)}
            ids = {id(views[name]) for name, value in entries.items() if getattr(value, "requires_grad", False)}
            model: Any = engine.module
            for adapter, config in model.peft_config.items():
                if not config.is_prompt_learning:
                    with warnings.catch_warnings(action="ignore"):  # the save itself gives them
                        taken = get_peft_model_state_dict(model, state_dict=views, adapter_name=adapter)
                    ids |= {id(value) for value in taken.values()}
            chosen = [name for name, view in views.items() if id(view) in ids]
    names: list[str] = engine.world.broadcast_object(chosen)
    return names


def adapter_state(engine: Engine, names: Iterable[str]) -> dict[str, Any]:
    """Return those entries of the state dict, whole, on rank 0, and an empty dict on others (all ranks). Floating parameters
    are in fp32, as peft makes adapters, whatever the engine computes in."""
    entries = dict(state_entries(engine.access))
    found: dict[str, Any] = {}
    whole: dict[Any, Any] = {}
    for name in names:
        entry = entries[name]
        if entry not in whole:
            if isinstance(entry, torch.nn.Parameter):
                value = engine.get_full_parameter(name, rank0_only=True)
                whole[entry] = value.float() if value is not None and value.is_floating_point() else value
            else:
                whole[entry] = entry.detach().cpu()
        found[name] = whole[entry]
    return found if engine.global_rank == 0 else {}
