"""The folder of step snapshots: the one that a resume takes, and the superseded ones. No torch.

[Note: whose snapshot]
A snapshot is a checkpoint whose record says, under `durability`, in which folders its run has its checkpoints. It belongs
to a folder that it names, and to one with a checkpoint of its run. One that names none, of a run that was killed before
its first save, belongs to any folder without checkpoints. A resume goes on from the newer of the snapshot and of the
folder's newest checkpoint; of the same step it is the checkpoint, which has the client's state. Newer means a later state:
a save with `wait=False` may be committed after the snapshots of the steps behind it.

A power cut may leave a snapshot whose record is there and whose data is not, for nothing of it is made durable. So a
snapshot of another boot of the machine counts only if every chunk of it has its checksum.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from zstore.checkpoint import CheckpointReader, Record, TagInfo, discard, tags, verify_checkpoint
from zstore.errors import CheckpointNotFoundError, ZstoreError
from zstore.io import Files
from zstore.open.sources import open_source

_log = logging.getLogger("zstore")

KEY = "durability"
"""Key of a record with the settings of a snapshot."""
TAKEN = "taken_ns"
"""Key of a record's state with the time at which it was taken, in ns since the epoch by rank 0's clock."""
BOOT = "boot"
"""Key of a rank's own state in a snapshot with the boot of its machine."""


@functools.cache
def boot_id() -> str:
    """Return the id of this boot of this machine; an empty string if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def place_of(folder: str) -> str:
    """Return the one spelling of a folder's path; URLs are left as they are."""
    return folder if "://" in folder else os.path.realpath(folder)


def snapshots(folder: Path) -> list[TagInfo]:
    """Return the step snapshots of all runs in `folder`, the oldest first."""
    return [info for info in tags_of(folder) if KEY in info.record.state]


def tags_of(folder: Path) -> list[TagInfo]:
    """Return the checkpoints in `folder`, the oldest first; none if there are none."""
    try:
        return tags(folder)
    except CheckpointNotFoundError:
        return []


def choose_snapshot(
    folder: Path,
    checkpoints: str,
    boots: Collection[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> TagInfo | None:
    """Return the snapshot in `folder` that a resume from the folder or URL `checkpoints` goes on from.

    None if the newest checkpoint there is as new, or no snapshot belongs to it, or `checkpoints` is one checkpoint's
    own folder, or `folder` itself. `boots`: those of the machines that will load it. Raises the errors of opening
    `checkpoints` for a damaged checkpoint. See [Note: whose snapshot].
    """
    found = snapshots(folder)
    if not found or place_of(checkpoints) == place_of(str(folder)):
        return None
    saved = _newest_record(checkpoints, storage_options)
    if isinstance(saved, str):
        return None
    for info in reversed(found):
        if not _belongs(info.record, checkpoints, saved):
            continue
        if saved is not None and not _is_newer(info.record, saved):
            return None
        if is_whole(info, boots):
            return info
    return None


def _newest_record(checkpoints: str, storage_options: Mapping[str, Any] | None) -> Record | str | None:
    """Return the record of the newest checkpoint of a folder, None if there is none; the path of a checkpoint that was
    itself named."""
    try:
        with open_source(checkpoints, storage_options=storage_options) as source:
            named = place_of(source.location) == place_of(checkpoints)
            return source.location if named else source.record
    except CheckpointNotFoundError:
        return None


def _belongs(snapshot: Record, checkpoints: str, saved: Record | None) -> bool:
    folders = _folders(snapshot)
    if place_of(checkpoints) in folders or (saved is not None and saved.run == snapshot.run):
        return True
    return saved is None and not folders


def _folders(snapshot: Record) -> list[str]:
    found: Any = snapshot.state.get(KEY)
    folders = found.get("folders") if isinstance(found, dict) else None
    return [folder for folder in folders if isinstance(folder, str)] if isinstance(folders, list) else []


def _is_newer(snapshot: Record, saved: Record) -> bool:
    return _taken_ns(snapshot) > _taken_ns(saved) and (snapshot.run, snapshot.step) != (saved.run, saved.step)


def _taken_ns(record: Record) -> int:
    taken_ns = record.state.get(TAKEN)
    return taken_ns if type(taken_ns) is int else record.committed_ns


def _made_in(reader: CheckpointReader) -> set[Any]:
    return {reader.rank_state(rank).get(BOOT) for rank in range(reader.record.world_size)}


def is_whole(info: TagInfo, boots: Collection[str], made_in: Callable[[CheckpointReader], set[Any]] = _made_in) -> bool:
    """Return whether a snapshot, which the boots of `made_in` wrote, is of these boots alone, or complete."""
    try:
        with CheckpointReader(info) as reader:
            if made_in(reader) <= set(boots) or not (faults := verify_checkpoint(reader)):
                return True
            why = str(faults[0])
    except (ZstoreError, OSError) as error:
        why = str(error)
    _log.warning("the snapshot %s is incomplete, as after a power cut, and is left out: %s", info.path, why)
    return False


def superseded(found: Iterable[TagInfo], folders: Iterable[str] = ()) -> list[TagInfo]:
    """Return the snapshots that hold nothing newer than a checkpoint of their run in a folder that they name, or in
    `folders`."""
    records = functools.cache(_records)
    return [
        info
        for info in found
        if any(
            record.run == info.record.run and not _is_newer(info.record, record)
            for folder in {*_folders(info.record), *folders}
            for record in records(folder)
        )
    ]


def _records(folder: str) -> list[Record]:
    """Return the records of a folder's checkpoints; none for a URL, since listing it may cost much."""
    try:
        return [] if "://" in folder else [info.record for info in tags(folder)]
    except (ZstoreError, OSError):
        return []


def sweep(folder: Path, files: Files, folders: Iterable[str] = ()) -> list[TagInfo]:
    """Remove the snapshots that are superseded, of whichever run; return those that stay. Never raises."""
    try:
        found = snapshots(folder)
        doomed = superseded(found, folders)
        for info in doomed:
            discard(files, info.path)
        return [info for info in found if info not in doomed]
    except (ZstoreError, OSError) as error:
        _log.warning("the step snapshots in %s could not be listed: %s", folder, error)
        return []
