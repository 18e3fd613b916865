"""All uploads of a service: which may begin, and their commits.

[Note: who owns a name]
A run's name belongs to the training run that has checkpoints there; without any, to the first that begins an upload,
as long as its client sent a request within a quarter of an hour. A later upload of a tag by the same training run replaces
an earlier one that is not committed: a run has at most one save of a tag running, so the earlier client was killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ...checkpoint.catalog import TagInfo, check_tag_is_free, find_tag, read_record, replaced_text, scan
from ...checkpoint.commit import discard
from ...checkpoint.format import Record
from ...checkpoint.layout import tag_folder
from ...checkpoint.retention import retire
from ...errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, ZstoreError
from ...io.files import Files
from ..runs import UPLOADS_FOLDER, RunTable
from .offer import ALIVE_S, OFFER_FILE, Committed, UploadOffer, UploadState
from .upload import Upload

MAX_IDLE_S = 24 * 3600.0
"""An upload whose client was silent for this long is removed when the service next looks at uploads."""


class Inbox:
    """The uploads of a service. Usable from any thread."""

    def __init__(self, runs: RunTable, files: Files) -> None:
        self._runs, self._files = runs, files
        self._lock = threading.Lock()
        """For the table of uploads; nothing else is locked under it."""
        self._decision_lock = threading.Lock()
        """For work on more than one upload; taken before an upload's own."""
        self._uploads: dict[str, Upload] | None = None

    def all(self) -> list[Upload]:
        """Return the uploads that are not committed; abandoned ones are removed."""
        with self._lock:
            if self._uploads is None:
                self._uploads = {upload.id: upload for upload in self._found()}
            found = list(self._uploads.values())
        old = [one for one in found if _idle_s(one) > MAX_IDLE_S or not (one.path / OFFER_FILE).exists()]
        for upload in old:
            self.remove(upload)
        return [upload for upload in found if upload not in old]

    def _found(self) -> Iterator[Upload]:
        """Yield the uploads that earlier services left."""
        for root in self._runs.upload_roots():
            for pattern in (f"{UPLOADS_FOLDER}/*/{OFFER_FILE}", f"*/{UPLOADS_FOLDER}/*/{OFFER_FILE}"):
                for path in root.glob(pattern):
                    with contextlib.suppress(ValueError, OSError, ZstoreError):
                        yield Upload.load(path.parent, self._files)

    def get(self, upload_id: str) -> Upload:
        """Return the upload of that id. Raises CheckpointNotFoundError."""
        found = next((upload for upload in self.all() if upload.id == upload_id), None)
        if found is None:
            raise CheckpointNotFoundError(
                f"there is no upload {upload_id!r:.50}: it was committed or abandoned; begin it again"
            )
        return found

    def remove(self, upload: Upload) -> None:
        """Remove an upload and all its files."""
        with self._lock:
            if self._uploads is not None:
                self._uploads.pop(upload.id, None)
        upload.remove()
        with contextlib.suppress(OSError):  # a run that nothing was committed to
            os.rmdir(upload.folder)

    def begin(self, offer: UploadOffer) -> UploadState:
        """Begin an upload, or resume an existing one; return its state.

        Raises CheckpointExistsError for a tag, or a name, that is another's, UsageError for a name that no run can have.
        """
        with self._decision_lock:
            folder = self._runs.folder_for_uploads(offer.run)
            upload_id = hashlib.sha256(f"upload {offer.run}\0{offer.record}".encode()).hexdigest()[:32]
            new = Upload(upload_id, offer, folder, self._files)
            if _committed(folder, new.record) is not None:
                return new.state(files=False).model_copy(update={"state": "committed"})
            _check_free(new)
            concurrent = [one for one in self.all() if one.folder == folder and one.id != new.id]
            for one in concurrent:
                if one.record.run != new.record.run and _idle_s(one) < ALIVE_S:
                    raise CheckpointExistsError(
                        f"another training run uploads its checkpoint {one.record.tag!r} to {offer.run!r}: choose another "
                        "name, or wait until it is done"
                    )
            for one in concurrent:
                if (one.record.run, one.record.tag) == (new.record.run, new.record.tag):
                    self.remove(one)
            return self._store(new).state()

    def _store(self, new: Upload) -> Upload:
        upload = next((one for one in self.all() if one.id == new.id), None)
        files = new.offer.documents, new.offer.extras
        if upload is not None and (upload.offer.documents, upload.offer.extras) != files:
            self.remove(upload)
            upload = None
        if upload is None:
            new.require_room()
            upload = new
        upload.offer = new.offer  # the client may have changed which checkpoints are kept and replaced
        upload.store()
        upload.touch()
        with self._lock:
            if self._uploads is not None:
                self._uploads[upload.id] = upload
        return upload

    def commit(self, upload: Upload) -> Committed:
        """Commit an upload whose files are all there, and apply retention.

        Raises CheckpointMismatchError naming the missing files, CheckpointExistsError if the tag was taken in the meantime.
        """
        with self._decision_lock, upload.lock:
            messages, linked_bytes = [], 0
            if (committed := _committed(upload.folder, upload.record)) is None:
                upload.require_whole()
                replaced = _check_free(upload)
                linked_bytes = upload.linked_bytes()
                messages = upload.publish()
                if replaced is not None and not upload.offer.overwrite:
                    messages.append(replaced_text(replaced))
                committed = read_record(upload.folder / tag_folder(upload.record.tag))
            if (keep := upload.offer.keep) is not None:
                remove = lambda info: discard(self._files, info.path)  # noqa: E731
                messages += retire(upload.folder, keep=keep, run=upload.record.run, remove=remove)
            self.remove(upload)
            self._runs.invalidate()
            return Committed(
                tag=committed.tag, committed_ns=committed.committed_ns, linked_bytes=linked_bytes, messages=messages
            )


def _idle_s(upload: Upload) -> float:
    return time.time() - upload.active_at


def _committed(folder: Path, record: Record) -> Record | None:
    """Return the record of the committed checkpoint that `record` describes; None if it is not committed."""
    with contextlib.suppress(ZstoreError, OSError):
        info = find_tag(folder, record.tag)
        if info is not None and _without_time(info.record) == _without_time(record):
            return info.record
    return None


def _without_time(record: Record) -> Record:
    """Return a record without the fields that depend on its place and commit time."""
    return replace(record, committed_ns=0)


def _check_free(upload: Upload) -> TagInfo | None:
    """Return the checkpoint that it replaces, if any.

    Raises CheckpointExistsError if tag or name belong to another training run. See [Note: who owns a name].
    """
    record, offer = upload.record, upload.offer
    if not upload.folder.is_dir():
        return None
    require_own(upload.folder, offer.run, record.run)
    try:
        return check_tag_is_free(
            upload.folder, record.tag, overwrite=offer.overwrite, run=record.run if offer.replaces_own else ""
        )
    except CheckpointExistsError:
        raise
    except CheckpointError as error:
        raise CheckpointExistsError(str(error)) from error


def require_own(folder: Path, name: str, run_id: str) -> None:
    """Raise CheckpointExistsError if a run's folder has checkpoints, and none of the training run `run_id`."""
    runs = {info.record.run for info in scan(folder).tags} if folder.is_dir() else set()
    if runs and run_id not in runs:
        raise CheckpointExistsError(
            f"{name!r} has the checkpoints of another training run ({min(runs)[:12]!r}, this is {run_id[:12]!r}): "
            "save under another name, or load its checkpoint first to continue that run"
        )
