"""How a committed checkpoint is removed, wherever it is: half of it never looks like a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..checkpoint.catalog import TagInfo
from ..checkpoint.commit import discard
from ..checkpoint.folder import Folder
from ..io.files import Files
from .commit import remove_checkpoint
from .folder import RemoteFolder


def remover(place: Folder) -> Callable[[TagInfo], None]:
    """Return a function that removes a checkpoint in the folder `place`, here or behind a URL."""
    if isinstance(place, RemoteFolder):
        return partial(remove_checkpoint, place)
    files = Files()
    return lambda info: discard(files, info.path)
