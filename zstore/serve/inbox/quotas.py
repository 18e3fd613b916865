"""How many bytes a run and a token hold.

[Note: quotas]
A run holds the bytes of the files in its folder, each once, however many checkpoints link it, behind a URL those of the packs
of its versions; a token those that it sent of checkpoints that are still there, and that the service did not have before.
Whose these are is in `.uploaded.json` in the folder in which the run's uploads come together. Removed checkpoints count no
more; bytes that uploads under way still need count already.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pydantic import BaseModel, RootModel, ValidationError

from ...checkpoint.catalog import scan
from ...checkpoint.folder import Folder
from ...errors import DiskFullError, ZstoreError
from ...io.files import Files
from ...sizes import format_bytes

UPLOADED_FILE = ".uploaded.json"


class SentCheckpoint(BaseModel, extra="forbid", frozen=True):
    """Who sent a checkpoint, and how many bytes that the service did not have before."""

    token: str
    bytes: int


def note_sent(files: Files, folder: Path, place: Folder, record_id: str, sent: SentCheckpoint) -> None:
    """Note in `folder` who sent a checkpoint of the run at `place`; checkpoints that are gone are forgotten."""
    found = {**_sent(folder, place), record_id: sent}
    part = folder / f"{UPLOADED_FILE}.part"
    files.write_small(part, RootModel[dict[str, SentCheckpoint]](found).model_dump_json().encode())
    files.rename(part, folder / UPLOADED_FILE)


def held_by_token(folder: Path, place: Folder, token: str) -> int:
    """Return the bytes that a token holds of the run at `place`, by the notes in `folder`."""
    return sum(one.bytes for one in _sent(folder, place).values() if one.token == token)


def _sent(folder: Path, place: Folder) -> dict[str, SentCheckpoint]:
    """Return who sent the checkpoints that are there, by the ids of their records; nothing of a file that is damaged."""
    with contextlib.suppress(OSError, ValidationError, ZstoreError):
        found = RootModel[dict[str, SentCheckpoint]].model_validate_json((folder / UPLOADED_FILE).read_bytes()).root
        there = {info.record.id for info in scan(place).tags}
        return {record_id: sent for record_id, sent in found.items() if record_id in there}
    return {}


def held_by_run(place: Folder) -> int:
    """Return the bytes of the files in a run's folder, which need not be there yet."""
    if not place.is_local:
        with contextlib.suppress(FileNotFoundError):
            return sum(size or 0 for size in place.sizes("").values())
        return 0
    sizes: dict[tuple[int, int], int] = {}
    for path, _, names in os.walk(place.path):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(path, name))
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def require_quota(quota: int | None, held: int, needed: int, who: str) -> None:
    """Raise DiskFullError if somebody who holds `held` bytes would hold more than the quota (None: there is none)."""
    if quota is not None and held + needed > quota:
        raise DiskFullError(
            f"{who} may hold {format_bytes(quota)} and holds {format_bytes(held)}; the upload needs {format_bytes(needed)}: "
            "prune checkpoints, or ask whoever runs the service for more"
        )
