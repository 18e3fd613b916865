"""What `--resume` means: a folder, a folder and a tag, or whatever is there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zstore.errors import CheckpointMismatchError, CheckpointNotFoundError
from zstore.remote import is_url
from zstore.sources import open_source, split_location


def resume_source(
    resume: str | None,
    save: str | os.PathLike[str] | None,
    steps: Path | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> tuple[str, str | None] | None:
    """Return (folder or URL, tag or None for the newest) of `DIR`, `DIR:TAG` or `auto`; None to start fresh.

    A DIR may be a URL, which `storage_options` are for.
    `steps` is where the run has snapshots of its steps: the last of them, where it is newer than what `DIR` or `save`
    has.
    """
    if resume is None:
        return None
    save = None if save is None else os.fspath(save)
    if resume == "auto":
        if save is None:
            return None
        snapshot = _snapshot(steps, save, storage_options)
        return snapshot if snapshot is not None or not _has_checkpoint(save, storage_options) else (save, None)
    folder, tag = split_location(resume)
    if tag is not None:
        return folder, tag
    if is_url(resume) or Path(resume).is_dir():
        return _snapshot(steps, resume, storage_options) or (resume, None)
    raise CheckpointNotFoundError(
        f"--resume {resume}: expected DIR or DIR:TAG of a saved checkpoint, but there is no such folder"
    )


def _snapshot(
    steps: Path | None, checkpoints: str, storage_options: Mapping[str, Any] | None
) -> tuple[str, str] | None:
    """Return folder and tag of the snapshot that the run goes on from; None where the newest checkpoint is as new."""
    from zstore.engine.step_folder import boot_id, choose_snapshot

    if steps is None:
        return None
    found = choose_snapshot(steps, checkpoints, {boot_id()}, storage_options=storage_options)
    return None if found is None else (str(found.path.parent), found.tag)


def _has_checkpoint(folder: str, storage_options: Mapping[str, Any] | None) -> bool:
    try:
        open_source(folder, storage_options=storage_options).close()
    except CheckpointNotFoundError:
        return False
    return True


def saved_position(
    folder: str, tag: str | None, key: str, *, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what `zstore train` kept under `key` of the checkpoint's client state."""
    with open_source(folder, tag, storage_options=storage_options) as checkpoint:
        state = checkpoint.record.state.get("client_state", {}).get(key)
    if not isinstance(state, dict) or not {"seed", "seq_len", "samples"} <= state.keys():
        raise CheckpointMismatchError(
            f"{folder}: the checkpoint was not saved by `zstore train`, so its place in the data is not known; load it "
            "with `engine.load_checkpoint` in the script that made it"
        )
    return state
