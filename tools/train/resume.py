"""Resuming: which checkpoint `--resume` means, and the position in the data that it was saved at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zstore.checkpoint import tags
from zstore.errors import CheckpointExistsError, CheckpointMismatchError, CheckpointNotFoundError
from zstore.io import is_url
from zstore.open.sources import folder_of, open_source, split_location

STATE_KEY = "zstore_train"
"""Of a run's position, in the client state."""

Source = tuple[str, str | None]
"""A folder or URL of checkpoints, and a tag; None: the newest."""


@dataclass(frozen=True)
class Position:
    """Position of a run in its data: the settings that determine the samples, and how many were used."""

    seed: int
    seq_len: int
    samples: int = 0


def resume_source(
    resume: str | None, save: str | None, *, storage_options: Mapping[str, Any] | None = None
) -> Source | None:
    """Return what `DIR`, `DIR@TAG` or `auto` names; None to start fresh. Raises CheckpointNotFoundError for a DIR that is not
    there."""
    if resume is None:
        return None
    if resume == "auto":
        try:
            open_source(save or "", storage_options=storage_options).close()
        except CheckpointNotFoundError:
            return None
        return save or "", None
    folder, tag = split_location(resume)
    if tag is not None or is_url(folder) or Path(folder).is_dir():
        return folder, tag
    raise CheckpointNotFoundError(
        f"--resume {resume}: expected DIR or DIR@TAG of a saved checkpoint, but there is no such folder"
    )


def start_position(
    seed: int | None, seq_len: int | None, source: Source | None, *, storage_options: Mapping[str, Any] | None = None
) -> Position:
    """Return the position to start from; a resumed run keeps its seed and sample length, since its order of data depends on
    them."""
    if source is None:
        return Position(seed or 0, seq_len or 128)
    with open_source(*source, storage_options=storage_options) as checkpoint:
        state = checkpoint.record.state.get("client_state", {}).get(STATE_KEY)
    if not isinstance(state, dict) or not {"seed", "seq_len", "samples"} <= state.keys():
        raise CheckpointMismatchError(
            f"{source[0]}: the checkpoint was not saved by `zstore train`, so its position in the data is unknown; load it "
            "with `engine.load_checkpoint` in the script that made it"
        )
    saved = Position(int(state["seed"]), int(state["seq_len"]), int(state["samples"]))
    for option, asked, kept in (("--seed", seed, saved.seed), ("--seq-len", seq_len, saved.seq_len)):
        if asked is not None and asked != kept:
            raise CheckpointMismatchError(
                f"{option} {asked}: the checkpoint was trained with {kept}, and the order of its data depends on it; omit "
                "the option to resume, or start a new run"
            )
    return saved


def require_own_folder(save: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Raise CheckpointExistsError if `save` has checkpoints: a new run would save under the same names."""
    try:
        found = tags(folder_of(save, storage_options))
    except CheckpointNotFoundError:
        return
    if found:
        raise CheckpointExistsError(
            f"--save {save} holds {found[-1].tag} of another run, and this one would save under the same names: pass --resume "
            f"auto to go on from there, name another folder, or remove them (`zstore prune {save}`)"
        )
