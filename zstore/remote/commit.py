"""The commit of an upload: no renames, the record last.

[Note: the order of an upload]
    1  <tag>.lock-<id>      written: an upload is under way; names its run, its process and the time
    2  the files of <tag>/  except zarr.json at its top and the record; then their sizes are compared with a listing
    3  <tag>/zarr.json
    4  <tag>/zstore.json    the commit, written on condition that there is none
    5  `latest` replaced; checkpoints that retention does not keep removed; the lock removed
If a checkpoint of that tag is replaced, its folder stays until the new one is whole: the files go to <tag>.old-<id>/, which
counts for the tag if <tag>/ has no record (see `scan`), and after its record is written the other's is removed: that is
then the commit. The next one of that tag goes to <tag>/ again, and its record is the commit.

Lost before the commit: nothing has a record, or the former one counts. The next save that finds the lock of an upload that
ended removes its files. Whatever is removed has a lock as well, and loses its record first: at no instant does half a
checkpoint look like one.

Whose upload ended is judged from its lock: one of the same run has, for a run has one at a time; one of this machine whose
process is gone; any other after a day. An upload that was taken for dead finds its lock gone, and does not commit.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..checkpoint.catalog import (
    NOT_LATEST,
    NOT_REMOVED,
    TagInfo,
    check_tag_is_free,
    is_committed,
    noting,
    replaced_text,
    stamped,
)
from ..checkpoint.commit import discard
from ..checkpoint.folder import Folder
from ..checkpoint.format import Record
from ..checkpoint.lock import FOREIGN_LIFE_S, owner_document, process_ended
from ..checkpoint.names import (
    LATEST_FILE,
    LOCK,
    METADATA_FILE,
    RECORD_FILE,
    SET_ASIDE,
    new_save_id,
    own_name,
    parse_own_name,
    tag_folder,
)
from ..errors import CheckpointError, CheckpointExistsError, ZstoreError
from ..io.files import Files
from .fsspec_folder import RemoteFolder


class RemoteCommitter:
    """One upload into `folder` under `tag`. Calls, all by one process: `begin`, then `commit`; `abort` if it fails."""

    def __init__(self, folder: RemoteFolder, tag: str, save_id: str, run_id: str) -> None:
        self.folder = folder
        self.save_id = save_id
        self._tag = tag
        self._run_id = run_id
        self._name = tag_folder(tag)
        self._lock = own_name(self._name, LOCK, save_id)
        self._begun = False
        self.slot = self._name
        """Name of the folder that the files go to; known once `begin` returned."""
        self.location = folder.location_of(self._name)
        """URL of the tag, as people name it."""

    @property
    def target(self) -> RemoteFolder:
        """The folder that the files go to."""
        return self.folder.child(self.slot)

    def begin(self, *, overwrite: bool, replaces_own: bool = False) -> list[str]:
        """Sweep, check that the tag may be written, choose the slot and lock it; returns messages for the user.

        Raises CheckpointExistsError for a committed tag (unless `overwrite`, or with `replaces_own` if the same run saved
        it), StorageError if nothing can be written.
        """
        messages = sweep(self.folder, self._run_id)
        run = self._run_id if replaces_own else ""
        replaced = check_tag_is_free(self.folder, self._tag, overwrite=overwrite, run=run)
        if replaced is not None and not overwrite:
            messages.append(replaced_text(replaced))
        if self.folder.child(self._name).has(RECORD_FILE):
            self.slot = own_name(self._name, SET_ASIDE, self.save_id)
        self._begun = True
        self.folder.write_small(self._lock, _lock_document(self._run_id))
        self._require_alone()
        return messages

    def _require_alone(self) -> None:
        """Raise CheckpointExistsError if another upload of the tag is under way: of two that begin at once each sees the
        other's lock."""
        owns = {name: parse_own_name(name) for name in self.folder.entries().files if name != self._lock}
        others = [name for name, own in owns.items() if own is not None and own[:2] == (self._name, LOCK)]
        if others:
            self._begun = False
            self.folder.remove(self._lock)
            raise CheckpointExistsError(
                f"another save of {self.location} is under way: wait for its end, or save under another tag"
            )

    def commit(self, record: Record, metadata: bytes, sizes: Mapping[str, int]) -> list[str]:
        """Publish the uploaded files; returns a message for each failure after that.

        `metadata` is the root's `zarr.json`; `sizes` are the bytes of every other file of the checkpoint. The record's
        `committed_ns` is set again: it is the largest in the folder.
        """
        self._check_whole(sizes)
        record = stamped(record, self.folder)
        self.target.write_small(METADATA_FILE, metadata)
        if not self.folder.has(self._lock):
            raise CheckpointError(f"another save considered the upload of {self.target} dead and removed its lock")
        try:
            self.target.write_small(RECORD_FILE, record.encode(), is_new=True)
        except FileExistsError:
            raise CheckpointExistsError(
                f"{self.location} was committed by another save meanwhile: save under another tag"
            ) from None
        if self.slot != self._name:
            self.folder.child(self._name).remove(RECORD_FILE)
        return self._tidy(moves_latest=record.is_latest)

    def _check_whole(self, sizes: Mapping[str, int]) -> None:
        """Raise CheckpointError if the store's listing differs from the sent files."""
        found = self.target.sizes("")
        for file, nbytes in sizes.items():
            if found.get(file) != nbytes:
                listed = "nothing" if file not in found else f"{found[file]} bytes"
                raise CheckpointError(f"{self.target.location_of(file)}: {nbytes} bytes were sent, {listed} arrived")

    def _tidy(self, *, moves_latest: bool) -> list[str]:
        """Do the work that may fail without harm to the checkpoint."""
        messages: list[str] = []
        with noting(messages, NOT_LATEST):
            if moves_latest:
                self.folder.write_small(LATEST_FILE, f"{self._tag}\n".encode())
        with noting(messages, NOT_REMOVED):
            if self.slot != self._name:
                self.folder.remove_tree(self._name)
            else:
                _remove_set_aside(self.folder, self._name)
            self.folder.remove(self._lock)
        return messages

    def abort(self, *, ended: bool = True) -> None:
        """Remove the uploaded files. Never raises: those that cannot be removed now are swept by the next save.

        Unless every rank's part `ended`, more may come, and the lock stays for that sweep.
        """
        with contextlib.suppress(OSError, ZstoreError):
            # Without its lock, the folder may be a user's, or by now another upload's.
            if self._begun and self.folder.has(self._lock) and not self.target.has(RECORD_FILE):
                self.folder.remove_tree(self.slot)
                if ended:
                    self.folder.remove(self._lock)


def _lock_document(run_id: str) -> bytes:
    return owner_document(run=run_id, since_s=int(time.time()))


def has_ended(data: bytes | Exception, run_id: str) -> bool:
    """Return whether the upload whose lock has the bytes `data` ended. See [Note: the order of an upload]."""
    try:
        owner: dict[str, Any] = json.loads(data) if isinstance(data, bytes) else {}
        ended = process_ended(owner) or owner["run"] == run_id != ""
        return ended or time.time() - int(owner["since_s"]) > FOREIGN_LIFE_S
    except (ValueError, KeyError, TypeError):
        return False


def sweep(folder: RemoteFolder, run_id: str) -> list[str]:
    """Remove the leftovers of uploads that ended without a commit, those of run `run_id` among them.

    Returns a message for each file or folder that could not be removed.
    """
    try:
        entries = folder.entries()
    except (FileNotFoundError, NotADirectoryError):
        return []
    locks = [(name, own) for name in entries.files if (own := parse_own_name(name)) is not None and own[1] == LOCK]
    ended = [has_ended(data, run_id) for data in folder.read_all([name for name, _ in locks])]
    busy = {own[0] for (_, own), dead in zip(locks, ended, strict=True) if not dead}
    asides = {own[0] for name in entries.folders if (own := parse_own_name(name)) is not None and own[1] == SET_ASIDE}
    messages: list[str] = []
    for (lock, own), dead in zip(locks, ended, strict=True):
        with noting(messages, "the files of an earlier upload could not be removed"):
            if dead and own[0] not in busy:
                _remove_unfinished(folder, own[0], own[2])
                folder.remove(lock)
    for name in asides - busy:
        with noting(messages, "a checkpoint that was replaced could not be removed"):
            if is_committed(folder.child(name)):
                _remove_set_aside(folder, name)
    return messages


def _remove_unfinished(folder: RemoteFolder, name: str, save_id: str) -> None:
    """Remove the tag's folders that upload `save_id` may have written to and that have no record."""
    for slot in (name, own_name(name, SET_ASIDE, save_id)):
        if not folder.child(slot).has(RECORD_FILE):
            folder.remove_tree(slot)


def _remove_set_aside(folder: RemoteFolder, name: str) -> None:
    """Remove the checkpoint that was set aside for the tag folder `name`, which has a record of its own."""
    for entry in folder.entries().folders:
        own = parse_own_name(entry)
        if own is not None and own[:2] == (name, SET_ASIDE):
            folder.child(entry).remove(RECORD_FILE)
            folder.remove_tree(entry)


def remover(place: Folder) -> Callable[[TagInfo], None]:
    """Return a function that removes a committed checkpoint in the folder `place`, here or behind a URL: half of it never
    looks like a checkpoint."""
    if isinstance(place, RemoteFolder):
        return partial(remove_checkpoint, place)
    files = Files()
    return lambda info: discard(files, info.path)


def remove_checkpoint(folder: RemoteFolder, info: TagInfo) -> None:
    """Remove a checkpoint in `folder` so that at no instant half of it looks like one."""
    name = info.folder.name
    own = parse_own_name(name)
    lock = own_name(own[0] if own else name, LOCK, own[2] if own else new_save_id())
    folder.write_small(lock, _lock_document(info.record.run))
    folder.child(name).remove(RECORD_FILE)
    folder.remove_tree(name)
    folder.remove(lock)
