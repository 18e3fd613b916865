"""Uploading a committed local checkpoint to a URL."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from ..checkpoint.catalog import TagInfo
from ..checkpoint.folder import FolderLike
from ..checkpoint.reader import CheckpointReader, open_checkpoint
from ..errors import BudgetError
from ..io.pool import Workers
from .bucket import Advance, BucketFolder, open_bucket, part_bytes
from .service_target import ServicePlace, ServiceTarget
from .target import NUM_THREADS, BucketTarget, Target, files_here
from .url import PATIENT, Retries

UploadPlace = BucketFolder | ServicePlace
"""A folder of checkpoints in a bucket, or a run in a service."""

_MOST_PARTS_HELD = 4
"""A part is held as it was read, in the file's buffer and in the request, and may be copied once more on its way out."""


def place_of(url: str, storage_options: Mapping[str, Any] | None = None) -> UploadPlace:
    """Return the place at a URL, without a request: whether the server of an `http://` URL is a service of zstore shows when
    something is uploaded.

    Raises UsageError for a URL that nothing opens, or that names no run of a service.
    """
    if not url.startswith(("http://", "https://")):
        return open_bucket(url, storage_options)
    place = ServicePlace(url, dict(storage_options or {}))
    _ = place.location
    return place


def target_for(place: UploadPlace, retries: Retries, *, tag: str, save_id: str, run_id: str) -> Target:
    """Return the target of a save of training run `run_id` under `tag` at `place`. No request is made."""
    if isinstance(place, ServicePlace):
        return ServiceTarget(place, retries, tag)
    return BucketTarget(place.with_retries(retries), tag, save_id, run_id)


def require_uploads(url: str, storage_options: Mapping[str, Any] | None = None) -> None:
    """Raise StorageError, or UsageError, if nothing can be uploaded to a URL. The file written as a test is removed."""
    place = place_of(url, storage_options)
    if isinstance(place, ServicePlace):
        folder = place.open(Retries())
        folder.connection.ask("GET", f"/api/uploads?run={quote(folder.run, safe='')}")
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
    advance: Advance = lambda _: None,
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
        try:
            messages = target.begin(overwrite=overwrite)
            target.offer(reader)
            files = files_here(reader)
            num_threads = (
                NUM_THREADS if isinstance(place, ServicePlace) else _at_a_time(max(files.values()), memory_bytes)
            )
            with Workers(num_threads, "zstore-upload") as workers:
                target.send(workers, reader.path, files, advance)
            return target.location, messages + target.commit(reader)
        except BaseException:
            target.discard(ended=True, cancelled=False)
            raise


def _at_a_time(largest_bytes: int, memory_bytes: int | None) -> int:
    """Return how many files go to a bucket at a time, the largest of which has so many bytes."""
    each = _MOST_PARTS_HELD * part_bytes(largest_bytes)
    if memory_bytes is not None and each > memory_bytes:
        raise BudgetError(
            f"a file of {largest_bytes} bytes is uploaded in parts of {part_bytes(largest_bytes)}, which takes about {each} "
            f"bytes of memory, but {memory_bytes} are available: allow more"
        )
    return NUM_THREADS if memory_bytes is None else min(NUM_THREADS, memory_bytes // each)
