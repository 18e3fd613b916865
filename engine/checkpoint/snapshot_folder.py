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
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zstore.checkpoint import CheckpointReader, Record, TagInfo, discard, tags, verify_checkpoint
from zstore.errors import CheckpointNotFoundError, ConfigError, StorageError, ZstoreError
from zstore.io import Files
from zstore.open.sources import open_source

if TYPE_CHECKING:
    from zstore.ranks.world import World

    from ..config.config import Config

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


def require_shared_folder(config: Config, world: World) -> None:
    """Make the folder of step snapshots, if there are to be any; see `make_shared_folder` (all ranks)."""
    folder = config.step_folder
    if folder is not None:
        make_shared_folder(folder, world, "zstore.durability_path")


def make_shared_folder(folder: Path, world: World, setting: str) -> None:
    """Make the folder of step snapshots, which `setting` names, and see that all ranks have the same (all ranks).

    Raises ConfigError, on every rank, for one that is local to a machine, StorageError if it cannot be written.
    """
    mark = world.broadcast_object(f"shared-{uuid.uuid4().hex}")
    with world.agreeing():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if world.rank == 0:
                (folder / mark).touch()
        except OSError as error:
            raise StorageError(
                'the folder of step snapshots ("durability": "step") cannot be written; give one that this user may write '
                f"in {setting}",
                path=str(folder),
                errno=error.errno,
            ) from error
    try:
        with world.agreeing():
            if not (folder / mark).exists():
                raise ConfigError(
                    f'"durability": "step": rank {world.rank} does not see what rank 0 wrote in {folder}: the folder is '
                    f"local to a machine; give one that all ranks share in {setting}"
                )
    finally:
        if world.rank == 0:
            (folder / mark).unlink(missing_ok=True)


def snapshots(folder: Path) -> list[TagInfo]:
    """Return the step snapshots of all runs in `folder`, the oldest first."""
    return [info for info in tags_of(folder) if KEY in info.record.state]


def tags_of(folder: Path) -> list[TagInfo]:
    """Return the checkpoints in `folder`, the oldest first; none if there are none."""
    try:
        return tags(folder)
    except CheckpointNotFoundError:
        return []


def choose_together(world: World, choose: Callable[[Collection[str]], TagInfo | None]) -> Path | None:
    """Return the folder of the snapshot that rank 0 chooses, given the boots of all machines (all ranks)."""
    boots = set(world.all_gather_object(boot_id()))
    with world.agreeing():
        found = choose(boots) if world.rank == 0 else None
    chosen: str | None = world.broadcast_object(None if found is None else str(found.path))
    return None if chosen is None else Path(chosen)


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
    own = (info for info in reversed(found) if _belongs(info.record, checkpoints, saved))
    return first_whole(takewhile(lambda info: saved is None or _is_newer(info.record, saved), own), boots)


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


def first_whole(
    found: Iterable[TagInfo], boots: Collection[str], made_in: Callable[[CheckpointReader], set[Any]] = _made_in
) -> TagInfo | None:
    """Return the first snapshot that these boots wrote alone, by `made_in`, or that is complete."""
    for info in found:
        try:
            with CheckpointReader(info) as reader:
                if made_in(reader) <= set(boots) or not (faults := verify_checkpoint(reader)):
                    return info
                why = str(faults[0])
        except (ZstoreError, OSError) as error:
            why = str(error)
        _log.warning("the snapshot %s is incomplete, as after a power cut, and is left out: %s", info.path, why)
    return None


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
