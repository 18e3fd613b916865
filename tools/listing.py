"""What a list of a folder's checkpoints takes in memory: their records, and the inodes of their files. No torch.

A local folder is looked through before anything is kept. Behind a URL, where nothing tells before, the records are counted
once they are read, and the listing of one checkpoint's files, one after the other, comes beside.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from zstore.checkpoint.catalog import TagInfo
from zstore.checkpoint.folder import Folder
from zstore.checkpoint.names import RECORD_FILE

from .opening import Common, require_listing_memory


def check_listing(place: Folder, common: Common) -> None:
    """Raise BudgetError where a limit that was asked for does not hold a list of the local folder `place`.

    Does nothing for a URL, or where none was asked for.
    """
    if common.memory_bytes is None or not place.is_local:
        return
    paths = [path for path in (place.path, *_folders_in(place.path)) if (path / RECORD_FILE).is_file()]
    require_listing_memory(
        common,
        place.location,
        num_files=sum(len(names) for path in paths for _, _, names in os.walk(path)),
        records_bytes=_bytes_of_records(paths),
    )


def records_bytes(place: Folder, infos: Iterable[TagInfo]) -> int:
    """Return the bytes of the records of `infos`, which were read of `place`; behind a URL all that was read of it."""
    if place.traffic is not None:
        return place.traffic.read_bytes
    return _bytes_of_records([info.path for info in infos])


def _bytes_of_records(paths: Iterable[Path]) -> int:
    return sum(os.stat(path / RECORD_FILE).st_size for path in paths)


def _folders_in(path: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(path) if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
