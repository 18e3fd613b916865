"""What of a PEFT model's frozen parameters belongs to its adapters, and is saved with them."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zstore.engine.access.module_state import state_entries

if TYPE_CHECKING:
    from zstore.engine.api.engine import Engine


def is_peft(model: nn.Module) -> bool:
    """Return whether a model has adapters of peft, its own class or transformers' own loading of them."""
    peft: Any = sys.modules.get("peft")
    wrapped = peft is not None and isinstance(model, peft.PeftModel | peft.PeftMixedModel)
    return wrapped or bool(getattr(model, "_hf_peft_config_loaded", False))


def adapter_names(engine: Engine) -> list[str]:
    """Return the names in the state dict of what peft saves of a model's adapters, frozen parameters and buffers among them
    (all ranks)."""
    from peft import get_peft_model_state_dict

    chosen: list[str] = []
    with engine.world.agreeing():
        if engine.global_rank == 0:
            entries = dict(state_entries(engine.access))
            # peft hands out what it was given: each entry is known by a tensor of its own.
            views = {name: torch.empty(0) for name, value in entries.items() if isinstance(value, torch.Tensor)}
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
