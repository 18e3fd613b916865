"""A model's weights as files of safetensors, in place of those in a folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from zstore.engine.access.module_state import state_entries
from zstore.engine.engine import Engine
from zstore.weights.layout import MAX_FILE_BYTES

_PATTERNS = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
"""Files of weights that `from_pretrained` finds."""
_TEMPORARY = ".zstore-weights"


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights in a folder, the index last."""
    found = {path for pattern in _PATTERNS for path in folder.glob(pattern)}
    return sorted(found, key=lambda path: (path.suffix == ".json", path.name))


def replace_weights(engine: Engine, folder: Path, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Write the weights, as the engine computes with them, into `folder`, in place of present ones; see
    `Engine.save_16bit_model` (all ranks; rank 0 writes)."""
    own = folder / _TEMPORARY
    leader = engine.global_rank == 0
    with engine.world.agreeing():
        if leader:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(own, ignore_errors=True)
    engine.save_16bit_model(own, max_file_bytes=max_file_bytes)
    with engine.world.agreeing():
        if leader:
            move_weights(weight_files(own), folder)
            config = own / "config.json"
            if config.exists() and not (folder / config.name).exists():
                config.replace(folder / config.name)
            shutil.rmtree(own)


def move_weights(files: Iterable[Path], folder: Path, *, link: bool = False) -> None:
    """Give `folder` these files of weights, the index last, and remove earlier ones under other names; with `link`
    they stay in their place too."""
    files = list(files)
    kept = {path.name for path in files}
    for path in files:
        target = folder / path.name
        if link:
            staged = folder / f"{_TEMPORARY}-{path.name}"
            staged.unlink(missing_ok=True)
            _link(path, staged)
            staged.replace(target)
        else:
            path.replace(target)
    for path in weight_files(folder):
        if path.name not in kept:
            path.unlink()


def _link(path: Path, target: Path) -> None:
    with contextlib.suppress(OSError):
        os.link(path, target)
        return
    shutil.copyfile(path, target)  # a file system without hard links


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
