"""Saves behind training, as libraries see them that call `save_checkpoint` and look at its folder at once; and what of a PEFT
model's frozen parameters is saved with its adapters.

[Note: what waits for a commit]
With `checkpoint.writer.decoupled` a save is committed while training goes on. Loops of libraries do not know that: they
remove the oldest checkpoint (`save_total_limit`), upload the newest, or copy it in a callback. So while a save of this
process is under way, a listing of its folder by any thread but zstore's own waits for the commit, and so does the removal
of a folder that holds it. A checkpoint beside it is removed after the commit, behind the caller: it is renamed first, since
removing files would make it the newest by modification time. If the save fails the older checkpoint stays.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zstore.checkpoint import SaveHandle
from zstore.engine.access.module_state import state_entries
from zstore.io import Ticket, run_in_thread

if TYPE_CHECKING:
    from zstore.engine.api.engine import Engine

_log = logging.getLogger("zstore")

_REMOVED = ".removed"
_saves: dict[str, SaveHandle] = {}
"""Absolute folder -> the save in it that was begun last."""
_removals: list[Ticket[None]] = []
_rmtree: Callable[..., Any] = shutil.rmtree


def watch(folder: str, handle: SaveHandle) -> None:
    """Let whoever lists or removes the folder of a save wait for its commit. See [Note: what waits for a commit]."""
    for ended in [each for each, save in _saves.items() if save.done()]:
        del _saves[ended]
    _saves[os.path.abspath(folder)] = handle
    _begin_watching()


@functools.cache
def _begin_watching() -> None:
    sys.addaudithook(_heard)
    shutil.rmtree = _remove  # type: ignore[assignment]


def complete() -> None:
    """Wait until the saves and removals of this process that are under way have ended."""
    for handle in list(_saves.values()):
        handle.wait_for_end()
    while _removals:
        _removals.pop().wait_for_end()


def _is_own() -> bool:
    return threading.current_thread().name.startswith("zstore")


def _heard(
    event: str,
    args: tuple[Any, ...],
    listings: frozenset[str] = frozenset({"os.listdir", "os.scandir"}),
    saves: dict[str, SaveHandle] = _saves,
) -> None:
    """Hold up a listing: `listings` are the events of all ways to do it. An audit hook hears of every event to the end of the
    process, when the module's own names are gone already."""
    if event not in listings or not saves or isinstance(args[0], int) or _is_own():
        return
    listed = os.path.abspath(os.fsdecode(args[0] or "."))
    for folder, handle in list(saves.items()):
        if _contains(folder, listed):
            handle.wait_for_end()


def _remove(path: Any, *args: Any, **options: Any) -> None:
    """Remove a folder as `shutil.rmtree` does, except for checkpoints next to a save under way."""
    saves = {} if isinstance(path, int) or _is_own() else dict(_saves)
    removed = os.path.abspath(os.fsdecode(path)) if saves else ""
    for folder, handle in saves.items():
        if _contains(removed, folder):
            handle.wait_for_end()
        elif os.path.dirname(folder) == os.path.dirname(removed) and Path(removed, "latest").is_file():  # saved to
            _removals.append(run_in_thread(partial(_remove_after, handle, Path(removed)), "zstore-remove"))
            return
    _rmtree(path, *args, **options)


def _contains(folder: str, path: str) -> bool:
    return f"{path}{os.sep}".startswith(f"{folder.rstrip(os.sep)}{os.sep}")


def _remove_after(handle: SaveHandle, folder: Path) -> None:
    try:
        handle.wait()
    except Exception as error:
        _log.warning("%s is not removed: the save of the newer checkpoint failed: %s", folder, error)
        return
    aside = folder.with_name(f".{folder.name}{_REMOVED}")
    try:
        os.replace(folder, aside)
    except FileNotFoundError:  # asked for twice
        return
    for left in folder.parent.glob(f".*{_REMOVED}"):  # also those of a process that was killed
        _rmtree(left, ignore_errors=True)


# -- adapters of peft -----------------------------------------------------------------------------------------------------


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
            entries = state_entries(engine.access)
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
