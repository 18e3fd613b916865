"""Opens whatever a path or URL means: a checkpoint of ours, or one that other software wrote."""

from __future__ import annotations

import os

from .checkpoint import ArraySource, open_checkpoint, tag_text
from .errors import CheckpointNotFoundError
from .shardio import IoResources


def open_source(
    location: str | os.PathLike[str], tag: str | float | None = None, *, resources: IoResources | None = None
) -> ArraySource:
    """Open the checkpoint `tag` at `location` (the newest committed one by default), or a tag's own folder.

    Raises CheckpointNotFoundError, CorruptionError where it is damaged, CheckpointMismatchError where it is of a kind or
    version that is not read. `resources` stays the caller's.
    """
    try:
        return open_checkpoint(os.fspath(location), tag, resources=resources)
    except CheckpointNotFoundError:
        # Only where there is none of ours: a run that moved here goes on in the same folder.
        from .foreign.deepspeed import open_deepspeed

        text = None if tag is None else tag_text(tag)
        if (foreign := open_deepspeed(os.fspath(location), text, resources=resources)) is not None:
            return foreign
        raise
