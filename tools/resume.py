"""What `--resume` means: a folder, a folder and a tag, or whatever is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zstore.checkpoint import open_checkpoint
from zstore.errors import CheckpointMismatchError, CheckpointNotFoundError


def resume_source(resume: str | None, save: Path | None) -> tuple[Path, str | None] | None:
    """Return (folder, tag or None for the newest) of `DIR`, `DIR:TAG` or `auto`; None to start fresh."""
    if resume is None:
        return None
    if resume == "auto":
        if save is None or not save.is_dir():
            return None
        try:
            open_checkpoint(save).close()
        except CheckpointNotFoundError:
            return None
        return save, None
    if Path(resume).is_dir():
        return Path(resume), None
    folder, colon, tag = resume.rpartition(":")
    if colon and Path(folder).is_dir():
        return Path(folder), tag
    raise CheckpointNotFoundError(
        f"--resume {resume}: expected DIR or DIR:TAG of a saved checkpoint, found no such folder"
    )


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
