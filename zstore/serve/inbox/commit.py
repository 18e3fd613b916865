"""Making an upload whose files are all there one of the run's checkpoints, here or behind its URL."""

from __future__ import annotations

import contextlib
from functools import partial

from ...checkpoint.catalog import TagInfo, noting
from ...checkpoint.commit import Committer, sweep
from ...checkpoint.folder import LocalFolder
from ...checkpoint.format import dump_metadata
from ...checkpoint.names import METADATA_FILE
from ...checkpoint.reader import CheckpointReader
from ...errors import UsageError
from ...io.files import Files, make_read_only
from ...io.pool import Workers
from ...journal.names import run_of
from ...remote.fsspec_folder import RemoteFolder
from ...remote.retries import PATIENT
from ...remote.upload import send_checkpoint, target_for
from ...weights.companions import is_companion
from .upload import Upload


def complete(upload: Upload, files: Files) -> None:
    """Write the metadata of groups and arrays, and make all names durable."""
    plan = upload.plan()

    def write(folder: str) -> None:
        path = upload.checkpoint / folder / METADATA_FILE
        files.make_folder(path.parent)
        files.unlink(path)
        files.write_small(path, dump_metadata(plan.copies[folder]))
        make_read_only(path)
        files.sync_folder(path.parent)

    with Workers(4, "zstore-upload") as workers:
        workers.run([partial(write, folder) for folder in plan.copies])
    for folder in (upload.checkpoint / "manifest", upload.checkpoint):
        files.sync_folder(folder)


def send_on(upload: Upload) -> list[str]:
    """Send the checkpoint to the run's URL, and what came beside it."""
    record, place = upload.record, upload.place
    if not isinstance(place, RemoteFolder):
        raise UsageError(f"{place} takes no uploads")
    target = target_for(place, PATIENT, tag=record.tag, save_id=record.id, run_id=record.run)
    with CheckpointReader(TagInfo(folder=LocalFolder(upload.checkpoint), record=record)) as reader:
        send_checkpoint(target, reader, overwrite=upload.offer.overwrite, replaces_own=upload.offer.replaces_own)
    messages: list[str] = []
    with noting(messages, "journal and companions could not be sent on"):
        there = {name: place.size(name) for name in place.entries().files}
        for file in upload.folder.iterdir():
            is_beside = run_of(file.name) is not None or is_companion(file.name)
            if is_beside and there.get(file.name) != file.stat().st_size:
                place.send(file, file.name, lambda _: None)
    return messages


def publish(upload: Upload, files: Files) -> list[str]:
    """Commit as a save of this machine does."""
    record = upload.record
    messages = sweep(files, upload.folder)
    committer = Committer(files, upload.folder, record.tag, record.id)
    try:
        committer.begin(partial(files.rename, upload.checkpoint))
        messages += committer.commit(record)
    except BaseException:
        if committer.temporary.is_dir():
            with contextlib.suppress(OSError):
                files.rename(committer.temporary, upload.checkpoint)
        raise
    finally:
        committer.close()
    return messages
