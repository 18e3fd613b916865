"""Folders for files of versions on their way, beside other temporary files."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from ..checkpoint.lock import SaveLock, owner_is_dead

_PREFIX = "zstore-weights-"


@contextlib.contextmanager
def temporary_room() -> Iterator[Path]:
    """Give a new folder, for the length of a `with` block, and remove those of killed processes. Raises StorageError."""
    place = Path(tempfile.gettempdir())
    for left in place.glob(f"{_PREFIX}*.lock"):
        with owner_is_dead(left) as is_dead:
            if is_dead:
                shutil.rmtree(left.with_suffix(""), ignore_errors=True)
                left.unlink(missing_ok=True)
    room = place / f"{_PREFIX}{uuid.uuid4().hex}"
    with SaveLock(room.with_suffix(".lock")):  # before the folder: one without is a dead process's
        try:
            room.mkdir(0o700)
            yield room
        finally:
            shutil.rmtree(room, ignore_errors=True)
