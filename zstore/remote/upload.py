"""Uploading a committed local checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoint.catalog import TagInfo
from ..checkpoint.folder import FolderLike
from ..checkpoint.reader import CheckpointReader, open_checkpoint
from ..errors import UsageError
from ..io.pool import Workers
from .folder import RemoteFolder, open_folder
from .retries import PATIENT
from .service_folder import ServiceFolder
from .service_upload import ServiceTarget
from .target import Advance, FileSystemTarget, UploadTarget
from .uploaded import common_files, shard_files
from .url_folder import UrlFolder


def target_for(folder: UrlFolder, *, tag: str, save_id: str, run_id: str) -> UploadTarget:
    """Return where a save of training run `run_id` under `tag` goes in the folder of checkpoints, or the service's run,
    `folder`. No request is made."""
    if isinstance(folder, ServiceFolder):
        return ServiceTarget(folder, tag, save_id)
    if isinstance(folder, RemoteFolder):
        return FileSystemTarget(folder, tag, save_id, run_id)
    raise UsageError(f"{folder} takes no checkpoints")


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
    newest). Returns the URL of the tag's folder, and what the user should know. Blocks until it is committed there. `memory_bytes` bounds the parts that are in memory on their way (None:
    those of `NUM_THREADS` files): fewer files go at a time then. Raises CheckpointExistsError for a tag that is there (unless
    `overwrite`), BudgetError where one file's parts are too much, StorageError where the upload fails; nothing of it is seen
    then.
    """
    folder = open_folder(url, storage_options, retries=PATIENT)
    with CheckpointReader(source) if isinstance(source, TagInfo) else open_checkpoint(source) as reader:
        record = reader.record
        target = target_for(folder, tag=record.tag, save_id=record.id, run_id=record.run)
        try:
            messages = target.begin(overwrite=overwrite)
            target.offer(reader)
            files = common_files(reader)
            for rank in range(record.world_size):
                files |= shard_files(reader, rank)
            with Workers(target.files_at_a_time(max(files.values()), memory_bytes), "zstore-upload") as workers:
                target.send(workers, reader, range(record.world_size), advance or (lambda _: None))
            messages += target.commit(reader)
        except BaseException:
            target.abort()
            raise
    return target.location, messages
