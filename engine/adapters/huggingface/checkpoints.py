"""The folders `checkpoint-N` of a Trainer: which of them hold a committed checkpoint, the data for a resume, and
the weights of adapters."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.trainer_utils import sort_checkpoints

from zstore.checkpoint import TagInfo, list_tags, resolve
from zstore.engine.access.export import weight_files
from zstore.engine.access.module_state import state_entries
from zstore.engine.api.engine import Engine
from zstore.errors import CheckpointError, CheckpointNotFoundError, CorruptionError
from zstore.io import Ticket, run_in_thread

STATE_KEY = "trainer"
"""Key of this package's data in the client state of a checkpoint."""
_FOLDER = re.compile(r"checkpoint-(\d+)")
_REMOVED = ".removed"
_CLIENT = "client_state"
_STAND_INS = ("optimizer.pt", "scheduler.pt")
"""Files that make a Trainer without zstore resume the optimizer: if they are missing, it begins with a fresh one, without
a word."""
_STAND_IN = """czstore: the state of optimizer and schedule is in step-N in this folder, which a plain Trainer cannot read
Resume with zstore.hf.Trainer, or begin anew from the weights with from_pretrained()
.
"""
"""Text that `torch.load` refuses with these words: to a pickle it is the name of a class ("c") that does not exist."""


def is_converted(model: nn.Module) -> bool:
    """Return whether transformers writes other tensors into files than the model has."""
    if not isinstance(model, transformers.PreTrainedModel):
        return False
    found = getattr(model, "_weight_conversions", None)
    return bool(get_model_conversion_mapping(model, add_legacy=False) if found is None else found)


def tag_of(step: int) -> str:
    """Return the tag of the checkpoint within `checkpoint-N`."""
    return f"step-{step}"


def committed(folder: str | os.PathLike[str]) -> TagInfo | None:
    """Return the newest committed checkpoint in a folder `checkpoint-N`, None if there is none."""
    try:
        return resolve(os.fspath(folder))
    except (CheckpointError, CorruptionError, OSError):
        return None


def newest_folder(output_dir: str) -> str | None:
    """Return the folder `checkpoint-N` of the highest N whose checkpoint is committed; None if there is none."""
    try:
        names = [name for name in os.listdir(output_dir) if _FOLDER.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return None
    for name in sorted(names, key=lambda name: int(name.partition("-")[2]), reverse=True):
        path = os.path.join(output_dir, name)
        if committed(path) is not None:
            return path
    return None


def require_committed(folder: str) -> Mapping[str, Any]:
    """Return this package's data in the checkpoint of a folder; an empty dict for another maker's.

    Raises CheckpointNotFoundError, with the way out, if none is committed.
    """
    info = committed(folder)
    if info is not None:
        state = info.record.state.get(_CLIENT)
        kept = state.get(STATE_KEY) if isinstance(state, Mapping) else None
        return kept if isinstance(kept, Mapping) else {}
    newest = newest_folder(os.path.dirname(os.path.abspath(folder)))
    advice = "start from its weights with from_pretrained(), without resume_from_checkpoint"
    if newest is not None:
        advice = f"the newest that is whole is {newest}"
    raise CheckpointNotFoundError(
        f"Can't find a valid checkpoint at {folder}: it has none of zstore that is committed{_refusals(folder)}. It was made "
        f"without zstore or with save_only_model, or its save did not end; {advice}"
    )


def _refusals(folder: str) -> str:
    try:
        return "".join(f"; {one.location}: {one.reason}" for one in list_tags(folder).refusals)
    except (CheckpointError, CorruptionError, OSError):
        return ""


def link_weights(folder: Path, tag: str) -> None:
    """Give `checkpoint-N` the weights of its checkpoint of zstore, as links (rank 0)."""
    files = weight_files(folder / tag)
    for path in files:
        staged = folder / f".zstore-weights-{path.name}"
        staged.unlink(missing_ok=True)
        try:
            os.link(path, staged)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, staged)
        staged.replace(folder / path.name)
    kept = {path.name for path in files}
    for path in weight_files(folder) if files else ():
        if path.name not in kept:
            path.unlink()


def begin_folder(engine: Engine, folder: Path) -> None:
    """Put the run's journal into the folder of a checkpoint, and files that other Trainers refuse (rank 0)."""
    for name in _STAND_INS:
        (folder / name).write_text(_STAND_IN, encoding="utf-8")
    engine.journal.file.follow(folder)


def move_journal(engine: Engine | None, folder: Path) -> None:
    """Have the run's journal in a folder, if there is one."""
    if engine is not None and engine.journal.file.current is not None:
        engine.journal.file.follow(folder)


def _oldest(folder: str, limit: int, best: str | None) -> list[str]:
    """Return the checkpoints that transformers' `rotate_checkpoints` would delete."""
    found = sort_checkpoints(folder, use_mtime=True)
    protected = {*found[-1:], *([] if best is None else [str(Path(best))])}
    num_doomed = len(found) - max(limit, len(protected))
    return [path for path in found if path not in protected][: max(num_doomed, 0)]


def _set_aside(paths: list[str]) -> list[Path]:
    """Rename folders, so that nobody takes their remains for checkpoints while they are removed."""
    found = [(Path(path), Path(path).with_name(f".{os.path.basename(path)}{_REMOVED}")) for path in paths]
    for path, aside in found:
        os.replace(path, aside)
    return [aside for _, aside in found]


def _left(folder: str) -> list[Path]:
    """Return the folders that a killed process had set aside."""
    return list(Path(folder).glob(f".checkpoint-*{_REMOVED}"))


_removals: list[Ticket[None]] = []
"""Under way: at most one."""


def _remove(paths: list[Path]) -> None:
    """Remove folders behind the caller: to unlink their files takes longer than all else in a small save."""
    wait_for_removal()
    if paths:
        _removals.append(run_in_thread(partial(_remove_all, paths), "zstore-rotate"))


def _remove_all(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def wait_for_removal() -> None:
    """Wait until no folder is being removed."""
    while _removals:
        _removals.pop().wait_for_end()


def rotate(trainer: Any, folder: str) -> None:
    """Delete the oldest checkpoints in a folder, as `save_total_limit` has it, and no journal with them (rank 0)."""
    limit = trainer.args.save_total_limit
    if not limit:
        return
    best = trainer.state.best_model_checkpoint
    if best is not None:  # which may be kept in place of the newest
        move_journal(trainer.engine, Path(folder))
    _remove([*_left(folder), *_set_aside(_oldest(folder, limit, best))])
    if best is not None and (newest := newest_folder(folder)) is not None:
        move_journal(trainer.engine, Path(newest))


def adapter_names(engine: Engine) -> list[str]:
    """Return the names in the state dict of what peft saves of a model's adapters, frozen parameters and buffers among them
    (all ranks)."""
    from peft import get_peft_model_state_dict

    chosen: list[str] = []
    with engine.world.agreeing():
        if engine.global_rank == 0:
            entries = dict(state_entries(engine.access))
            # peft hands out what it was given: each entry is known by its own view.
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
