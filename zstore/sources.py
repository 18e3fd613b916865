"""Opens whatever a path or URL means: a checkpoint of ours, or one that other software wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoint import ArraySource, open_checkpoint, tag_text
from .checkpoint.folder import Folder, LocalFolder
from .errors import CheckpointNotFoundError
from .remote import is_url, open_folder
from .shardio import IoResources


def open_source(
    location: str | os.PathLike[str],
    tag: str | float | None = None,
    *,
    resources: IoResources | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ArraySource:
    """Open the checkpoint `tag` at `location` (the newest committed one by default), or a tag's own folder.

    `storage_options` are those of the fsspec file system of a URL. Raises CheckpointNotFoundError, CorruptionError where it
    is damaged, CheckpointMismatchError where it is of a kind or version that is not read, UsageError for a URL that nothing
    opens. `resources` stays the caller's.
    """
    try:
        return open_checkpoint(folder_of(location, storage_options), tag, resources=resources)
    except CheckpointNotFoundError:
        if is_url(location):
            raise
        # Only where there is none of ours: a run that moved here goes on in the same folder.
        text = None if tag is None else tag_text(tag)
        if (foreign := _open_foreign(os.fspath(location), text, resources)) is not None:
            return foreign
        raise


def _open_foreign(location: str, tag: str | None, resources: IoResources | None) -> ArraySource | None:
    """Open a checkpoint of other software; None where there is none that is known."""
    folder = Path(location) if tag is None else Path(location) / tag
    if (folder / ".metadata").is_file():
        from .foreign.torch_dcp import TorchDcpSource

        return TorchDcpSource(folder, resources)
    from .foreign.deepspeed import open_deepspeed

    if (deepspeed := open_deepspeed(location, tag, resources=resources)) is not None:
        return deepspeed
    if any(folder.glob("*.safetensors")):
        from .foreign.huggingface import HuggingFaceSource

        return HuggingFaceSource(folder, resources)
    return None


def folder_of(location: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Folder:
    """Return the folder that a path or URL names, which need not be there; `tags` and `refused` take it.

    Raises UsageError for a URL that nothing opens.
    """
    if is_url(location):
        return open_folder(os.fspath(location), storage_options)
    return LocalFolder(Path(location))
