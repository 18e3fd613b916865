"""Opens the checkpoint that a path or URL names: one of ours, or one of other software."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.folder import Folder, LocalFolder
from ..checkpoint.names import tag_text
from ..checkpoint.reader import ArraySource, open_checkpoint
from ..errors import CheckpointNotFoundError, UsageError
from ..io.files import UserPath, is_url, user_location, user_path
from ..io.shards import IoResources

_URL_WITH_PATH = re.compile(r".+://[^/]+/.")
"""An `@` before the path belongs to the address."""


def open_source(
    location: UserPath,
    tag: str | float | None = None,
    *,
    resources: IoResources | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ArraySource:
    """Open the checkpoint `tag` at `location` (the newest committed one by default), or a tag's own folder; see
    `split_location`. A URL `FOLDER@TAG` at which there is no checkpoint means `tag` in `FOLDER`.

    `storage_options` are those of the fsspec file system of a URL. Raises CheckpointNotFoundError, CorruptionError if it
    is damaged, CheckpointMismatchError if it is of a kind or version that is not read, UsageError for a URL that nothing
    opens. `resources` stays the caller's.
    """
    place, text = split_location(location, None if tag is None else tag_text(tag))
    folder = folder_of(place, storage_options)
    try:
        return open_checkpoint(folder, text, resources=resources)
    except CheckpointNotFoundError:
        # Only if there is none of ours: a run that moved here goes on in the same folder.
        if folder.is_local and (foreign := _open_foreign(place, text, resources)) is not None:
            return foreign
        above, _, name = place.rpartition("@")
        if text is not None or not name or "/" in name or not _URL_WITH_PATH.match(above):
            raise
    return open_source(above, name, resources=resources, storage_options=storage_options)


def split_location(location: UserPath, tag: str | None = None) -> tuple[str, str | None]:
    """Return path or URL, and the tag, of `FOLDER`, `FOLDER@TAG`, or `FOLDER` and a `tag` beside it (None: not named).

    An existing local folder is taken literally, and so is a URL, in which `open_source` sees to `@`. Raises UsageError if
    there are two tags.
    """
    place = user_location(location)
    folder, _, name = place.rpartition("@")
    if is_url(place) or not name or "/" in name or not Path(folder).is_dir() or Path(place).is_dir():
        return place, tag
    if tag is not None:
        raise UsageError(f"{place} names the tag {name!r}, and {tag!r} is named beside it: name one of them")
    return folder, name


def _open_foreign(location: str, tag: str | None, resources: IoResources | None) -> ArraySource | None:
    """Open a checkpoint of other software; None if there is none that is known."""
    folder = Path(location) if tag is None else Path(location) / tag
    if (folder / ".metadata").is_file():
        from ..interop.torch_dcp import TorchDcpSource

        return TorchDcpSource(folder, resources)
    from ..interop.deepspeed.source import open_deepspeed

    if (deepspeed := open_deepspeed(location, tag, resources=resources)) is not None:
        return deepspeed
    if any(folder.glob("*.safetensors")):
        from ..interop.huggingface import HuggingFaceSource

        return HuggingFaceSource(folder, resources)
    return None


def folder_of(location: UserPath, storage_options: Mapping[str, Any] | None = None) -> Folder:
    """Return the folder that a path or URL names, which need not be there; `tags` and `refused` take it. Raises UsageError for
    a URL that nothing opens."""
    if is_url(location):
        from ..remote.service import open_folder

        return open_folder(os.fspath(location), storage_options)
    return LocalFolder(user_path(location))
