"""What `--resume` means: a folder, a folder and a tag, or whatever is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zstore.checkpoint import open_checkpoint
from zstore.errors import CheckpointMismatchError, CheckpointNotFoundError


def resume_source(resume: str | None, save: Path | None, steps: Path | None = None) -> tuple[Path, str | None] | None:
    """Return (folder, tag or None for the newest) of `DIR`, `DIR:TAG` or `auto`; None to start fresh.

    `steps` is where the run has snapshots of its steps: the last of them, where it is newer than what `DIR` or `save`
    has.
    """
    if resume is None:
        return None
    if resume == "auto":
        if save is None:
            return None
        snapshot = _snapshot(steps, save)
        return snapshot if snapshot is not None or not _has_checkpoint(save) else (save, None)
    if Path(resume).is_dir():
        return _snapshot(steps, Path(resume)) or (Path(resume), None)
    folder, colon, tag = resume.rpartition(":")
    if colon and Path(folder).is_dir():
        return Path(folder), tag
    raise CheckpointNotFoundError(
        f"--resume {resume}: expected DIR or DIR:TAG of a saved checkpoint, found no such folder"
    )


def _snapshot(steps: Path | None, checkpoints: Path) -> tuple[Path, str] | None:
    """Return folder and tag of the snapshot that the run goes on from; None where the newest checkpoint is as new."""
    from zstore.engine.step_folder import boot_id, choose_snapshot

    found = None if steps is None else choose_snapshot(steps, str(checkpoints), {boot_id()})
    return None if found is None else (found.path.parent, found.tag)


def _has_checkpoint(folder: Path) -> bool:
    try:
        open_checkpoint(folder).close()
    except CheckpointNotFoundError:
        return False
    return True


def saved_position(folder: Path, tag: str | None, key: str) -> dict[str, Any]:
    """Return what `zstore train` kept under `key` of the checkpoint's client state."""
    checkpoint = open_checkpoint(folder, tag)
    try:
        state = checkpoint.record.state.get("client_state", {}).get(key)
    finally:
        checkpoint.close()
    if not isinstance(state, dict) or not {"seed", "seq_len", "samples"} <= state.keys():
        raise CheckpointMismatchError(
            f"{folder}: the checkpoint was not saved by `zstore train`, so its place in the data is not known; load it "
            "with `engine.load_checkpoint` in the script that made it"
        )
    return state
