"""Uploading a committed local checkpoint."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from ..checkpoint.catalog import TagInfo
from ..checkpoint.folder import FolderLike
from ..checkpoint.reader import CheckpointReader, open_checkpoint
from ..io.pool import Workers
from .fsspec_folder import RemoteFolder, open_fsspec_folder
from .retries import PATIENT, Retries
from .service_upload import ServicePlace, ServiceTarget
from .target import Advance, FileSystemTarget, UploadTarget
from .uploaded import common_files, shard_files

UploadPlace = RemoteFolder | ServicePlace
"""A folder of checkpoints on a file system, or a run in a service."""


def place_of(url: str, storage_options: Mapping[str, Any] | None = None) -> UploadPlace:
    """Return the place at a URL, without a request: whether the server of an `http://` URL is a service of zstore shows when
    something is uploaded.

    Raises UsageError for a URL that nothing opens, or that names no run of a service.
    """
    if url.startswith(("http://", "https://")):
        return ServicePlace.of(url, storage_options)
    return open_fsspec_folder(url, storage_options)


def target_for(place: UploadPlace, retries: Retries, *, tag: str, save_id: str, run_id: str) -> UploadTarget:
    """Return the target of a save of training run `run_id` under `tag` at `place`. No request is made."""
    if isinstance(place, ServicePlace):
        return ServiceTarget(place, retries, tag, save_id)
    return FileSystemTarget(place.with_retries(retries), tag, save_id, run_id)


def require_uploads(url: str, storage_options: Mapping[str, Any] | None = None) -> None:
    """Raise StorageError, or UsageError, if nothing can be uploaded to a URL. The file written as a test is removed."""
    place = place_of(url, storage_options)
    if isinstance(place, ServicePlace):
        place.require_uploads()
        return
    probe = f".probe-{uuid.uuid4().hex}"
    place.write_small(probe, b"")
    place.remove(probe)


def upload_checkpoint(
    source: FolderLike | TagInfo,
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    *,
    overwrite: bool = False,
    advance: Advance | None = None,
    memory_bytes: int | None = None,
) -> tuple[str, list[str]]:
    """Copy a committed checkpoint from a local folder into the folder of checkpoints at `url`, under its tag.

    The URL may be that of a run in a service of zstore. `source` is the checkpoint's folder, or the folder above (then the
    newest). Returns the URL of the tag's folder, and messages for the user. Blocks until it is committed there.
    `memory_bytes` bounds the parts in memory (None: those of `NUM_THREADS` files) by sending fewer files at a time. Raises
    CheckpointExistsError for a tag that is there (unless `overwrite`), BudgetError if one file's parts are too much,
    StorageError if the upload fails; nothing of it is visible then.
    """
    place = place_of(url, storage_options)
    with CheckpointReader(source) if isinstance(source, TagInfo) else open_checkpoint(source) as reader:
        record = reader.record
        target = target_for(place, PATIENT, tag=record.tag, save_id=record.id, run_id=record.run)
        messages = send_checkpoint(target, reader, advance, memory_bytes, overwrite=overwrite)
    return target.location, messages


def send_checkpoint(
    target: UploadTarget,
    reader: CheckpointReader,
    advance: Advance | None = None,
    memory_bytes: int | None = None,
    *,
    overwrite: bool,
    replaces_own: bool = False,
) -> list[str]:
    """Carry out the whole upload of a checkpoint to `target`; see `upload_checkpoint`. Returns messages for the user."""
    try:
        messages = target.begin(overwrite=overwrite, replaces_own=replaces_own)
        target.offer(reader)
        files = common_files(reader) | shard_files(reader, range(reader.record.world_size))
        with Workers(target.files_at_a_time(max(files.values()), memory_bytes), "zstore-upload") as workers:
            target.send(workers, reader.path, files, advance or (lambda _: None))
        return messages + target.commit(reader)
    except BaseException:
        target.abort()
        raise
