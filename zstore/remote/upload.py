"""Uploading a committed local checkpoint: which files, by whom, and how many at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoint.catalog import TagInfo
from ..checkpoint.folder import FolderLike
from ..checkpoint.names import METADATA_FILE, RECORD_FILE, manifest_file
from ..checkpoint.reader import CheckpointReader, open_checkpoint
from ..errors import BudgetError
from ..io.pool import Workers
from .commit import RemoteCommitter
from .folder import RemoteFolder, open_fsspec_folder
from .retries import PATIENT
from .send import held_bytes, part_bytes

NUM_THREADS = 4
"""Files that one process uploads at a time; each takes about three parts of 8 MiB in memory."""

Advance = Callable[[int], None]


def shard_files(reader: CheckpointReader, rank: int) -> dict[str, int]:
    """Return path and bytes of the shard files that rank `rank` of the saving run wrote."""
    return {
        reader.array(entry.array).shard_file(entry.shard): entry.file_bytes for entry in reader.manifest(rank).shards
    }


def common_files(reader: CheckpointReader) -> dict[str, int]:
    """Return path and bytes of all other files of a local checkpoint, but for the two that are written last."""
    folders = reader.documents["consolidated_metadata"]["metadata"]
    files = [f"{folder}/{METADATA_FILE}" for folder in folders]
    files += [manifest_file(rank) for rank in range(reader.record.world_size)]
    files += [name for name in reader.folder.entries().files if name not in (METADATA_FILE, RECORD_FILE)]
    return {file: os.stat(reader.path / file).st_size for file in files}


def send_all(workers: Workers, source: Path, target: RemoteFolder, files: Iterable[str], advance: Advance) -> int:
    """Copy `files` from the folder `source` to `target`, several at a time; return their bytes. See `RemoteFolder.send`."""
    return sum(workers.run([partial(target.send, source / file, file, advance) for file in files]))


def commit_upload(committer: RemoteCommitter, reader: CheckpointReader, ranks: Iterable[int]) -> list[str]:
    """Commit what was uploaded of a local checkpoint; returns what went wrong after that.

    That the files arrived is checked for those of `ranks`, and for the common ones.
    """
    sizes = common_files(reader)
    for rank in ranks:
        sizes |= shard_files(reader, rank)
    return committer.commit(reader.record, reader.folder.read_small(METADATA_FILE), sizes)


def files_at_a_time(largest_bytes: int, memory_bytes: int | None) -> int:
    """Return how many files go at a time, the largest of which has so many bytes."""
    if memory_bytes is None:
        return NUM_THREADS
    each = held_bytes(largest_bytes)
    if each > memory_bytes:
        raise BudgetError(
            f"a file of {largest_bytes} bytes is uploaded in parts of {part_bytes(largest_bytes)}, which takes about {each} "
            f"bytes of memory, but {memory_bytes} are available: allow more"
        )
    return min(NUM_THREADS, memory_bytes // each)


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

    `source` is its folder, or the folder above (then the newest). Returns the URL of the tag's folder, and what the user
    should know. Blocks until it is committed there. `memory_bytes` bounds the parts that are in memory on their way (None:
    those of `NUM_THREADS` files): fewer files go at a time then. Raises CheckpointExistsError for a tag that is there (unless
    `overwrite`), BudgetError where one file's parts are too much, StorageError where the upload fails; nothing of it is seen
    then.
    """
    folder = open_fsspec_folder(url, storage_options, retries=PATIENT)
    with CheckpointReader(source) if isinstance(source, TagInfo) else open_checkpoint(source) as reader:
        record = reader.record
        committer = RemoteCommitter(folder, record.tag, record.id, record.run)
        try:
            messages = committer.begin(overwrite=overwrite)
            files = common_files(reader)
            for rank in range(record.world_size):
                files |= shard_files(reader, rank)
            with Workers(files_at_a_time(max(files.values()), memory_bytes), "zstore-upload") as workers:
                send_all(workers, reader.path, committer.target, files, advance or (lambda _: None))
            messages += commit_upload(committer, reader, range(record.world_size))
        except BaseException:
            committer.abort()
            raise
    return committer.location, messages
