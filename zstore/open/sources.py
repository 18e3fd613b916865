"""Opens the checkpoint that a path or URL names: one of ours, or one of other software."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.folder import Folder, LocalFolder
from ..checkpoint.names import tag_text
from ..checkpoint.reader import open_checkpoint
from ..checkpoint.source import ArraySource
from ..errors import CheckpointMismatchError, CheckpointNotFoundError, UsageError
from ..io.files import UserPath, is_url, user_location, user_path
from ..io.shards import IoResources

_MAKERS = (
    ("torch.distributed.checkpoint", ".metadata"),
    ("DeepSpeed", "*_model_states.pt"),
    ("DeepSpeed", "zero_to_fp32.py"),
    ("Hugging Face", "*.safetensors"),
)
"""The software whose checkpoints have a file of such a name."""

_ADDRESS = re.compile(r"https?://[^/]*:\d+")
"""The address of an HTTP server without a path."""


def open_source(
    location: UserPath,
    tag: str | float | None = None,
    *,
    resources: IoResources | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ArraySource:
    """Open the checkpoint `tag` at `location` (the newest committed one by default), or a tag's own folder. A location
    `FOLDER@TAG` that is not there itself means `tag` in `FOLDER`.

    `storage_options` are those of the fsspec file system of a URL. Raises CheckpointNotFoundError, CorruptionError if it
    is damaged, CheckpointMismatchError if it is of a kind or version that is not read, or other software's behind a URL,
    UsageError for a URL that nothing opens. `resources` stays the caller's.
    """
    place = user_location(location)
    folder = folder_of(place, storage_options)
    text = None if tag is None else tag_text(tag)
    try:
        return open_checkpoint(folder, text, resources=resources)
    except CheckpointNotFoundError:
        # Only if there is none of ours: a run that moved here goes on in the same folder.
        if is_url(place):
            _refuse_foreign(folder if text is None else folder.child(text))
        elif (foreign := _open_foreign(place, text, resources)) is not None:
            return foreign
        above, _, name = place.rpartition("@")
        if tag is not None or not above or not name or "/" in name or (folder.is_local and folder.path.exists()):
            raise
    return open_source(above, name, resources=resources, storage_options=storage_options)


def split_location(location: UserPath, tag: str | None = None) -> tuple[str, str | None]:
    """Return path or URL, and the tag, of `DIR`, `DIR:TAG`, `DIR@TAG`, or `DIR` and a `tag` beside it (None: not named).

    An existing local folder is taken literally, colons included; in a URL `open_source` sees to `@`. Raises UsageError if
    there are two tags.
    """
    text = user_location(location)
    separators = ":" if is_url(text) else ":@"
    places = [(text[:at], text[at + 1 :]) for at, character in enumerate(text) if character in separators]
    if is_url(text):
        # The last one alone: others belong to the URL.
        places = [(url, name) for url, name in places[-1:] if is_url(url) and name and "/" not in name]
        if _ADDRESS.fullmatch(text):  # the colon precedes a port
            places = []
    elif Path(text).is_dir():
        places = []
    else:
        places = [(folder, name) for folder, name in places if name and "/" not in name and Path(folder).is_dir()]
    if not places:
        return text, tag
    if tag is not None:
        raise UsageError(f"{text} names the tag {places[0][1]!r}, and --tag names {tag!r}: name one of them")
    return places[0]


def _open_foreign(location: str, tag: str | None, resources: IoResources | None) -> ArraySource | None:
    """Open a checkpoint of other software; None if there is none that is known."""
    folder = Path(location) if tag is None else Path(location) / tag
    if (folder / ".metadata").is_file():
        from ..interop.torch_dcp import TorchDcpSource

        return TorchDcpSource(folder, resources)
    from ..interop.deepspeed import open_deepspeed

    if (deepspeed := open_deepspeed(location, tag, resources=resources)) is not None:
        return deepspeed
    if any(folder.glob("*.safetensors")):
        from ..interop.huggingface import HuggingFaceSource

        return HuggingFaceSource(folder, resources)
    return None


def _refuse_foreign(folder: Folder) -> None:
    """Raise CheckpointMismatchError if a URL has other software's checkpoint."""
    if (maker := maker_of(folder)) is not None:
        raise CheckpointMismatchError(
            f"{folder} looks like a checkpoint of {maker}: from URLs zstore reads only its own checkpoints, other "
            "software's from local folders. Copy it to a local folder and pass that"
        )


def maker_of(folder: Folder) -> str | None:
    """Return the software whose checkpoint a folder seems to be, by the names in it; None if they suggest none."""
    try:
        entries = folder.entries()
    except OSError:
        return None
    for maker, pattern in _MAKERS:
        if fnmatch.filter(entries.files, pattern):
            return maker
    steps = fnmatch.filter(entries.folders, "global_step*")
    return maker_of(folder.child(steps[0])) if steps else None


def folder_of(location: UserPath, storage_options: Mapping[str, Any] | None = None) -> Folder:
    """Return the folder that a path or URL names, which need not be there; `tags` and `refused` take it. Raises UsageError for
    a URL that nothing opens."""
    if is_url(location):
        from ..remote.service import open_folder

        return open_folder(os.fspath(location), storage_options)
    return LocalFolder(user_path(location))
