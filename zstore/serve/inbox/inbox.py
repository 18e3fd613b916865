"""All uploads of a service: which may begin, how much room they need, and their commits.

[Note: whose name it is]
A run's name belongs to the training run that has checkpoints there; of two that begin at a name without any, to the first,
as long as its client was heard of within a quarter of an hour. Of one training run, a later upload of a tag replaces an
earlier one that is not committed: a run has one save of a tag at a time, so the client of the earlier one was killed.

[Note: room for uploads]
An upload is refused when it is planned, unless its files fit beside those that all other uploads still need. One that was
refused, whose client went away in the middle of a file, or was silent for a minute, keeps no room until it goes on. Linked
files take no room. Drives that others fill too may still be full before its end: then one that does not fit is refused, files
that came stay, and the client resumes once there is room again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...checkpoint.catalog import TagInfo, check_tag_is_free, find_tag, read_record, replaced_text, scan
from ...checkpoint.folder import Folder
from ...checkpoint.format import MACHINES_KEY, Record
from ...checkpoint.names import tag_folder
from ...checkpoint.retention import Keep, retire
from ...errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    StorageError,
    UsageError,
    ZstoreError,
)
from ...remote.commit import remover, sweep
from ...remote.fsspec_folder import RemoteFolder
from ..auth import OWN_NAME
from ..cache import Cache
from ..jobs import Jobs, RunningJob
from ..runs import Runs
from ..settings import Settings
from ..tokens import Token
from .commit import complete, publish, send_on
from .models import ALIVE_S, OFFER_FILE, UPLOADS_FOLDER, Committed, KeepRules, UploadOffer, UploadState
from .quotas import SentCheckpoint, held_by_run, held_by_token, note_sent, require_quota
from .upload import Upload

_MOST_NEIGHBOURS = 16
MOST_UPLOADS = 100
"""Uploads at a time; if there are more, those go first whose clients are gone."""
SILENT_S = 60.0
"""After so long an upload keeps no room, and an offer of which no plan was made gives its place to another."""
_MOST_COMMITTED = 1000
KEPT_S = 24 * 3600.0
"""An upload whose client was silent for this long is removed when the service next looks at uploads."""


class Inbox:
    """The uploads of a service. Usable from any thread."""

    def __init__(self, runs: Runs, jobs: Jobs, settings: Settings) -> None:
        self._runs = runs
        self._jobs = jobs
        self._reported: dict[str, RunningJob] = {}
        """By the upload's id, for the page."""
        self._keep_last = settings.keep_last
        self.run_quota = settings.run_quota
        """Bytes that a run may hold; see [Note: quotas]."""
        self._files = settings.files
        self._lock = threading.Lock()
        """For the table of uploads; nothing else is locked under it."""
        self._deciding = threading.Lock()
        """For work on more than one upload; taken before an upload's own."""
        self._uploads: dict[str, Upload] | None = None
        self._committed: Cache[str, bool] = Cache(_MOST_COMMITTED)
        """Ids of uploads that were committed."""

    # -- which there are --------------------------------------------------------------------------------------------

    def all(self) -> list[Upload]:
        """Return the uploads that are not committed; abandoned ones are removed."""
        with self._lock:
            if self._uploads is None:
                self._uploads = {upload.id: upload for upload in self._found()}
            found = list(self._uploads.values())
        # Also what `zstore serve --uploads` removed.
        old = [one for one in found if _silent_s(one) > KEPT_S or not (one.path / OFFER_FILE).exists()]
        for upload in old:
            self.remove(upload)
        return [upload for upload in found if upload not in old]

    def _found(self) -> Iterator[Upload]:
        """Yield the uploads that earlier services left."""
        for root in self._runs.roots_of_uploads():
            for pattern in (f"{UPLOADS_FOLDER}/*/{OFFER_FILE}", f"*/{UPLOADS_FOLDER}/*/{OFFER_FILE}"):
                for path in root.glob(pattern):
                    with contextlib.suppress(ValueError, OSError, ZstoreError):
                        yield Upload.load(path.parent, self._files, self._runs.folder_of)

    def get(self, upload_id: str, sees: Callable[[str], bool] = lambda _: True) -> Upload:
        """Return the upload of that id, to a run whose name `sees` accepts. Raises CheckpointNotFoundError."""
        for upload in self.all():
            if upload.id == upload_id and sees(upload.offer.run):
                return upload
        if self._committed.get(upload_id):
            raise CheckpointExistsError("the checkpoint is there: the same upload was committed by another client")
        raise CheckpointNotFoundError(
            f"there is no upload {upload_id!r:.50}: it was committed or given up; begin it again"
        )

    def remove(self, upload: Upload) -> None:
        """Remove an upload and all its files."""
        with self._lock:
            if self._uploads is not None:
                self._uploads.pop(upload.id, None)
            job = self._reported.pop(upload.id, None)
        upload.remove()
        if job is not None and job.now.state == "running":
            job.end("it was given up")
        with contextlib.suppress(OSError):  # a run that nothing was committed to
            os.rmdir(upload.folder)

    # -- beginning --------------------------------------------------------------------------------------------------

    def begin(self, offer: UploadOffer, runs: Runs) -> UploadState:
        """Begin an upload, or resume one that was begun; return its state. Files that the client has too are linked from
        `runs`, which it may read.

        Raises CheckpointExistsError for a tag, or a name, that is another's, UsageError for a name that no run can have.
        """
        _keep_of(offer.keep)
        with self._deciding:
            folder = self._runs.folder_for_uploads(offer.run)
            upload_id = hashlib.sha256(f"upload {offer.run}\0{offer.record}".encode()).hexdigest()[:32]
            new = Upload(upload_id, offer, folder, self._files, self._runs.folder_of(offer.run))
            if _committed(new.place, new.record) is not None:
                return new.state(files=False).model_copy(update={"state": "committed"})
            _check_free(new)
            others = [one for one in self.all() if one.folder == folder and one.id != new.id]
            for one in others:
                if one.record.run != new.record.run and _silent_s(one) < ALIVE_S:
                    raise CheckpointExistsError(
                        f"another training run uploads its checkpoint {one.record.tag!r} to {offer.run!r}: choose another "
                        "name, or wait until it is done"
                    )
            for one in others:
                if (one.record.run, one.record.tag) == (new.record.run, new.record.tag):
                    self.remove(one)
            self._committed.remove(new.id)
            upload = self._begun(new)
            upload.neighbours = _newest_first(one.folder.path for one in runs.all().values() if one.folder.is_local)
        return upload.state()

    def _begun(self, new: Upload) -> Upload:
        uploads = self.all()
        upload = next((one for one in uploads if one.id == new.id), None)
        files = new.offer.documents, new.offer.extras
        if upload is not None and (upload.offer.documents, upload.offer.extras) != files:
            self.remove(upload)
            upload = None
        if upload is None:
            if len(uploads) >= MOST_UPLOADS and not self._removed_silent(uploads):
                raise UsageError(f"{MOST_UPLOADS} uploads are under way: wait until some are done, or give some up")
            self._require_room(new)
            upload = new
        upload.offer = new.offer  # the client may have changed which checkpoints are kept and replaced
        upload.store()
        upload.touch()
        with self._lock:
            if self._uploads is not None:
                self._uploads[upload.id] = upload
        return upload

    def _removed_silent(self, uploads: list[Upload]) -> bool:
        """Remove the upload that was silent longest, if its client seems to be gone; return whether there was one."""
        gone = [one for one in uploads if _silent_s(one) > (ALIVE_S if one.total_bytes else SILENT_S)]
        if gone:
            self.remove(max(gone, key=_silent_s))
        return bool(gone)

    def plan(self, upload: Upload, token: Token) -> UploadState:
        """Plan an upload whose metadata and manifests are there, for whoever has `token`. Raises DiskFullError if it does not
        fit, on the drive or in a quota."""
        with self._deciding:
            upload.plan()
            upload.give("" if token.name == OWN_NAME else token.name)
            try:
                self._require_room(upload)
                self._require_quotas(upload, token)
            except StorageError:
                upload.holds_room = False
                raise
            self._report(upload)
        upload.touch()
        return upload.state()

    def _report(self, upload: Upload) -> None:
        """Show the upload as a job."""
        state = upload.state(files=False)
        with self._lock:
            if upload.id in self._reported:
                return
            job = self._jobs.add(
                "upload", upload.offer.run, tag_folder(upload.record.tag), total_bytes=state.total_bytes
            )
            self._reported[upload.id] = job
        job.advance(state.done_bytes)
        upload.progress = job.advance

    def _require_room(self, upload: Upload) -> None:
        # The run's folder is made with the first of its uploads.
        there = upload.folder if upload.folder.is_dir() else upload.folder.parent
        device = os.stat(there).st_dev
        others = [one for one in self._going_on(upload) if _device_of(one.folder) == device]
        theirs = sum(one.room_needed() for one in others)
        needed = upload.room_needed()
        beside = f", and {len(others)} other uploads {theirs}" if theirs else ""
        self._files.require_room(
            there,
            needed + theirs,
            f"the upload needs {needed} bytes{beside}",
            "make room where the service stores its runs, or save elsewhere",
        )

    def _require_quotas(self, upload: Upload, token: Token) -> None:
        folder = upload.folder
        beside = [one for one in self._going_on(upload) if one.folder == folder]
        if self.run_quota is not None:
            held = held_by_run(upload.place) + sum(one.room_needed() for one in beside)
            require_quota(self.run_quota, held, upload.room_needed(), f"the run {upload.offer.run!r}")
        if token.quota is not None:
            require_quota(token.quota, self.held(token, upload), upload.total_bytes, f"the token {token.name!r}")

    def _going_on(self, upload: Upload | None) -> list[Upload]:
        """Return the other uploads that keep room."""
        return [one for one in self.all() if one is not upload and one.holds_room and _silent_s(one) < SILENT_S]

    def held(self, token: Token, beside: Upload | None = None) -> int:
        """Return the bytes that a token holds, those of its uploads under way `beside` this one too. See [Note: quotas]."""
        under_way = sum(one.total_bytes for one in self._going_on(beside) if one.owner == token.name)
        places = [(self._runs.room_of(run), run.folder) for run in self._runs.all().values()]
        return under_way + sum(held_by_token(room, run, token.name) for room, run in places if room is not None)

    # -- committing -------------------------------------------------------------------------------------------------

    def commit(self, upload: Upload, token: Token) -> Committed:
        """Commit an upload whose files are all there, for whoever has `token`, and apply retention.

        Raises CheckpointMismatchError that names files which are missing, CheckpointExistsError if the tag was taken
        meanwhile.
        """
        if not upload.place.is_local:
            with upload.sending:
                return self._commit(upload, send_on, token)
        with self._deciding, upload.lock:
            return self._commit(upload, partial(publish, files=self._files), token)

    def _commit(self, upload: Upload, move: Callable[[Upload], list[str]], token: Token) -> Committed:
        messages, linked_bytes = [], 0
        if (committed := _committed(upload.place, upload.record)) is None:
            upload.require_whole()
            self._require_quotas(upload, token)  # others may have taken the room of one that was silent
            replaced = _check_free(upload)
            linked_bytes = upload.linked_bytes()
            if upload.owner:  # before anybody sees the checkpoint
                sent = SentCheckpoint(token=upload.owner, bytes=upload.num_bytes - linked_bytes)
                note_sent(self._files, upload.folder, upload.place, upload.record.id, sent)
            complete(upload, self._files)
            messages = move(upload)
            if replaced is not None and not upload.offer.overwrite:
                messages.append(replaced_text(replaced))
            committed = read_record(upload.place.child(tag_folder(upload.record.tag)))
        messages += self._retire(upload)
        if (job := self._reported.get(upload.id)) is not None:
            for message in messages:
                job.say(message)
            job.end()
        self.remove(upload)
        self._committed.put(upload.id, True)
        self._runs.forget()
        return Committed(
            tag=committed.tag, committed_ns=committed.committed_ns, linked_bytes=linked_bytes, messages=messages
        )

    def _retire(self, upload: Upload) -> list[str]:
        keep = _keep_of(upload.offer.keep)
        if self._keep_last is not None:
            keep = Keep(last=self._keep_last) if keep is None else replace(keep, last=min(keep.last, self._keep_last))
        if keep is None:
            return []
        return retire(upload.place, keep=keep, run=upload.record.run, remove=remover(upload.place))


def _keep_of(rules: KeepRules | None) -> Keep | None:
    """Return the rules as the checkpoints' own; raises UsageError for rules that make no sense."""
    if rules is None:
        return None
    return Keep(last=rules.last, every=rules.every, best=rules.best, tags=tuple(rules.tags))


def _device_of(folder: Path) -> int | None:
    """Return the drive that a folder is on; None if somebody removed it."""
    try:
        return os.stat(folder).st_dev
    except FileNotFoundError:
        return None


def _silent_s(upload: Upload) -> float:
    return time.time() - upload.active_at


def _newest_first(folders: Iterable[Path]) -> list[Path]:
    """Return the folders that changed last."""
    times: dict[Path, float] = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            times[folder] = os.stat(folder).st_mtime
    return sorted(times, key=lambda folder: -times[folder])[:_MOST_NEIGHBOURS]


def _committed(folder: Folder, record: Record) -> Record | None:
    """Return the record of the checkpoint in `folder` that is the one of `record`; None if there is none."""
    with contextlib.suppress(ZstoreError, OSError):
        info = find_tag(folder, record.tag)
        if info is not None and _unplaced(info.record) == _unplaced(record):
            return info.record
    return None


def _unplaced(record: Record) -> Record:
    """Return a record without what its place and the time of its commit say."""
    state = {key: value for key, value in record.state.items() if key != MACHINES_KEY}
    return replace(record, committed_ns=0, state=state)


def _check_free(upload: Upload) -> TagInfo | None:
    """Return the checkpoint that it replaces, None if there is none.

    Raises CheckpointExistsError if tag or name belong to another training run. See [Note: whose name it is].
    """
    record, offer = upload.record, upload.offer
    if isinstance(upload.place, RemoteFolder):
        sweep(upload.place, record.run)  # a service that was killed may have left files of this very save
    try:
        runs = {info.record.run for info in scan(upload.place).tags}
    except CheckpointNotFoundError:
        return None
    if runs and record.run not in runs:
        raise CheckpointExistsError(
            f"{offer.run!r} has the checkpoints of another training run ({min(runs)[:12]!r}, this is {record.run[:12]!r}): "
            "save under another name, or load its checkpoint first to go on with that run"
        )
    try:
        return check_tag_is_free(
            upload.place, record.tag, overwrite=offer.overwrite, run=record.run if offer.replaces_own else ""
        )
    except CheckpointExistsError:
        raise
    except CheckpointError as error:
        raise CheckpointExistsError(str(error)) from error
