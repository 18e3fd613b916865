"""The files of journals in a run's folder, here or behind a URL."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

from ...checkpoint.folder import Folder
from ...errors import ZstoreError
from ...journal.names import CHECKPOINT_FOLDER, run_of


@dataclass(frozen=True, kw_only=True)
class JournalFile:
    """A journal in its folder."""

    nbytes: int
    written_ns: int
    """When it was written last; behind a URL, if that is not told, its bytes."""
    identity: tuple[int, int] = (0, 0)
    """Changes when another file takes its name."""


def journals_in(folder: Folder) -> dict[str, JournalFile]:
    """Return the journals in a folder by name; none if it cannot be read."""
    try:
        return _journals_here(folder) if folder.is_local else _journals_there(folder)
    except (OSError, ZstoreError):
        return {}


def _journals_here(folder: Folder, nested: str = "") -> dict[str, JournalFile]:
    """Return also those in the folders of checkpoints that a loop makes, by their paths."""
    found: dict[str, JournalFile] = {}
    with os.scandir(os.path.join(folder.path, nested)) as entries:
        for entry in entries:
            if run_of(entry.name) is not None and entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                identity = (status.st_dev, status.st_ino)
                file = JournalFile(nbytes=status.st_size, written_ns=status.st_mtime_ns, identity=identity)
                found[nested + entry.name] = file
            elif not nested and CHECKPOINT_FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):  # it may be removed meanwhile
                    found |= _journals_here(folder, f"{entry.name}/")
    return found


def _journals_there(folder: Folder) -> dict[str, JournalFile]:
    sizes = {name: folder.size(name) for name in folder.entries().files if run_of(name) is not None}
    return {name: JournalFile(nbytes=size, written_ns=size) for name, size in sizes.items()}


def arrival(folder: Folder, file: JournalFile, last_at: float, *, is_new: bool) -> float:
    """Return when a journal's last line came, by the clock here; behind a URL now, or its own time if the journal `is_new`."""
    if folder.is_local:
        return file.written_ns / 1e9
    return last_at if is_new else time.time()


def read_part(folder: Folder, name: str, start: int, stop: int) -> bytes:
    """Return bytes `[start, stop)` of a journal, fewer if it ends before; none if it cannot be read."""
    try:
        return folder.read_range(name, start, stop) if stop > start else b""
    except (OSError, ZstoreError):
        return b""
