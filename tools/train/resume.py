"""Resuming: which checkpoint `--resume` means, and the position in the data that it was saved at."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zstore.checkpoint import step_tag, tags
from zstore.errors import CheckpointExistsError, CheckpointMismatchError, CheckpointNotFoundError
from zstore.io import is_url
from zstore.open.sources import folder_of, open_source, split_location


def resume_source(
    resume: str | None,
    save: str | os.PathLike[str] | None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> tuple[str, str | None] | None:
    """Return (folder or URL, tag or None for the newest) of `DIR`, `DIR:TAG` or `auto`; None to start fresh.

    A DIR may be a URL, which `storage_options` are for.
    """
    if resume is None:
        return None
    save = None if save is None else os.fspath(save)
    if resume == "auto":
        if save is None:
            return None
        return (save, None) if _has_checkpoint(save, storage_options) else None
    folder, tag = split_location(resume)
    if tag is not None:
        return folder, tag
    if is_url(folder) or Path(folder).is_dir():
        return folder, None
    raise CheckpointNotFoundError(
        f"--resume {resume}: expected DIR or DIR:TAG of a saved checkpoint, but there is no such folder"
    )


def _has_checkpoint(folder: str, storage_options: Mapping[str, Any] | None) -> bool:
    try:
        open_source(folder, storage_options=storage_options).close()
    except CheckpointNotFoundError:
        return False
    return True


STATE_KEY = "zstore_train"
"""Of a run's position, in the client state."""


@dataclass(frozen=True)
class Position:
    """Position of a run in its data: the settings that determine the samples, and how many were used."""

    seed: int
    seq_len: int
    samples: int = 0
    split: float = 0.0
    """Part of the data that is held out for evaluation."""


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """The run that a checkpoint belongs to, as the checkpoint records it."""

    id: str
    step: int
    position: Position


def saved_run(folder: str, tag: str | None, *, storage_options: Mapping[str, Any] | None = None) -> SavedRun:
    """Return the run that a checkpoint of `zstore train` belongs to."""
    with open_source(folder, tag, storage_options=storage_options) as checkpoint:
        record = checkpoint.record
        state = record.state.get("client_state", {}).get(STATE_KEY)
    if not isinstance(state, dict) or not {"seed", "seq_len", "samples"} <= state.keys():
        raise CheckpointMismatchError(
            f"{folder}: the checkpoint was not saved by `zstore train`, so its position in the data is unknown; load it "
            "with `engine.load_checkpoint` in the script that made it"
        )
    position = Position(
        int(state["seed"]), int(state["seq_len"]), int(state["samples"]), float(state.get("split", 0.0))
    )
    return SavedRun(id=record.run, step=record.step, position=position)


def start_position(
    seed: int | None, seq_len: int | None, saved: Position | None, split: float | None = None
) -> Position:
    """Return the position to start from; a resumed run keeps its seed, sample length and held out part, since its order of
    data depends on them."""
    if saved is None:
        return Position(seed or 0, seq_len or 128, split=split or 0.0)
    asked_for = (
        ("--seed", seed, saved.seed),
        ("--seq-len", seq_len, saved.seq_len),
        ("--validation-split", split, saved.split),
    )
    for option, asked, kept in asked_for:
        if asked is not None and asked != kept:
            raise CheckpointMismatchError(
                f"{option} {asked}: the checkpoint was trained with {kept}, and the order of its data depends on it; omit "
                "the option to resume, or start a new run"
            )
    return saved


def require_free_tags(
    save: str, steps: range, run: str | None, *, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Raise CheckpointExistsError if a save at one of `steps` in `save` would collide with a checkpoint of another run than
    `run` (None: a new one)."""
    try:
        found = tags(folder_of(save, storage_options))
    except CheckpointNotFoundError:
        return
    foreign = [info for info in found if run is None or info.record.run != run]
    met = [info for info in foreign if info.record.step in steps and info.tag == step_tag(info.record.step)]
    if not met:
        return
    others = f" and {len(met) - 1} more" if len(met) > 1 else ""
    # A resumed run's checkpoint was the newest there, so that auto would find it again.
    resume = (
        "auto to resume from the newest checkpoint there"
        if run is None
        else f"{save}:{foreign[-1].tag} to go on with it"
    )
    raise CheckpointExistsError(
        f"--save {save} holds {met[0].tag}{others} of another run, and this one would save under the same names: pass "
        f"--resume {resume}, name another folder, or remove them (`zstore prune {save}`)"
    )
