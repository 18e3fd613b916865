"""Saves and uploads in a run's folder that are not committed: those under way, and leftovers."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ...checkpoint.folder import Folder
from ...checkpoint.format import Record
from ...checkpoint.lock import owner_is_dead
from ...checkpoint.names import LOCK, RECORD_FILE, TEMPORARY, own_name, parse_own_name, tag_folder
from ...errors import ZstoreError
from ...remote.commit import has_ended
from ..inbox.models import ALIVE_S, OFFER_FILE, UPLOADS_FOLDER, UploadOffer
from ..models import Unfinished


def find_unfinished(folder: Folder) -> list[Unfinished]:
    """Return the saves in a folder, and in those that loops make in it, that are not committed; sorted by name."""
    try:
        entries = folder.entries()
        if not folder.is_local:
            return _find_there(folder, entries.files)
        found = _find_here(folder, "")
        for name in entries.folders:
            if name.startswith(("checkpoint-", "checkpoint_")):
                found += _find_here(folder.child(name), f"{name}/")
    except (OSError, ZstoreError):
        return []
    return sorted(found, key=lambda one: one.name)


def _find_here(folder: Folder, start: str) -> list[Unfinished]:
    saves: dict[tuple[str, str], int] = {}
    """Bytes by the tag's folder and the id of the save."""
    entries = folder.entries()
    for name in (*entries.folders, *entries.files):
        own = parse_own_name(name)
        if own is not None and own[1] in (TEMPORARY, LOCK):
            nbytes = _bytes_below(os.path.join(folder.path, name)) if own[1] == TEMPORARY else 0
            saves[own[0], own[2]] = saves.get((own[0], own[2]), 0) + nbytes
    found = _find_uploads(folder.path) if not start else []
    for (name, save_id), nbytes in saves.items():
        with owner_is_dead(folder.path / own_name(name, LOCK, save_id)) as dead:
            found.append(Unfinished(name=f"{start}{name}", state="interrupted" if dead else "under way", nbytes=nbytes))
    return found


def _find_uploads(path: Path) -> list[Unfinished]:
    found: list[Unfinished] = []
    for offer in path.glob(f"{UPLOADS_FOLDER}/*/{OFFER_FILE}"):
        with contextlib.suppress(OSError, ValueError, ZstoreError):  # one that was just committed
            found.append(_upload_in(offer))
    return found


def _upload_in(path: Path) -> Unfinished:
    """Return an upload to this service, by its client's offer."""
    offer = UploadOffer.model_validate_json(path.read_bytes())
    record = Record.decode(offer.record.encode(), str(path))
    alive = time.time() - path.stat().st_mtime < ALIVE_S
    return Unfinished(
        name=tag_folder(record.tag),
        state="under way" if alive else "interrupted",
        nbytes=_bytes_below(os.path.join(path.parent, "checkpoint")) + _bytes_below(os.path.join(path.parent, "parts")),
    )


def _bytes_below(path: str) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total


def _find_there(folder: Folder, files: tuple[str, ...]) -> list[Unfinished]:
    locks = [(name, own) for name in files if (own := parse_own_name(name)) is not None and own[1] == LOCK]
    found: list[Unfinished] = []
    for (_, own), data in zip(locks, folder.read_all([name for name, _ in locks]), strict=True):
        sizes: Mapping[str, int | None] = folder.sizes(own[0])
        if f"{own[0]}/{RECORD_FILE}" in sizes:  # the other slot is written
            sizes = folder.sizes(own_name(own[0], "old", own[2]))
        nbytes = sum(size or 0 for size in sizes.values())
        state: Literal["under way", "interrupted"] = "interrupted" if has_ended(data, "") else "under way"
        found.append(Unfinished(name=own[0], state=state, nbytes=nbytes))
    return sorted(found, key=lambda one: one.name)
