"""The commit of an upload: no renames, the record last.

[Note: the order of an upload]
    1  <tag>.lock-<id>      written: an upload is under way, of which run, where and since when
    2  the files of <tag>/  but for zarr.json at its top and the record; then their sizes are compared with a listing
    3  <tag>/zarr.json
    4  <tag>/zstore.json    the commit
    5  `latest` replaced; what retention does not keep removed; the lock removed
Where a checkpoint of that tag is replaced, its folder stays until the new one is whole: the files go to <tag>.old-<id>/, which
counts for the tag where <tag>/ has no record (see `scan`), and after its record is written the other's is removed: that is
then the commit. The next one of that tag goes to <tag>/ again, and its record is the commit.

Lost before the commit: nothing has a record, or what was there counts. The next save that finds the lock of an upload that
ended removes its files. Whatever is removed has a lock as well, and loses its record first: at no instant does half a
checkpoint look like one.

Whose upload ended is judged from its lock: one of the same run has, for a run has one at a time; one of this machine whose
process is gone; any other after a day. An upload that was taken for dead finds its lock gone, and does not commit.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..checkpoint.catalog import TagInfo, check_tag_is_free, find_tag, read_record, replaced_text, scan
from ..checkpoint.format import Record
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
from ..checkpoint.retention import Keep, remove_each, superfluous
from ..errors import CheckpointError, CheckpointNotFoundError, ZstoreError
from .folder import RemoteFolder

_FOREIGN_LIFE_S = 24 * 3600


class RemoteCommitter:
    """One upload into `folder` under `tag`. Calls, all by one process: `begin`, then `commit`; `abort` where it fails."""

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
        self.location = folder.place_of(self._name)
        """URL of the tag, as people name it."""

    @property
    def target(self) -> RemoteFolder:
        """The folder that the files go to."""
        return self.folder.within(self.slot)

    def begin(self, *, overwrite: bool, replaces_own: bool = False) -> list[str]:
        """Sweep, check that the tag may be written, choose the slot and lock it; returns what the user should know.

        Raises CheckpointExistsError for a committed tag (unless `overwrite`, or with `replaces_own` where the same run saved
        it), StorageError where nothing can be written.
        """
        messages = sweep(self.folder, self._run_id)
        run = self._run_id if replaces_own else ""
        replaced = check_tag_is_free(self.folder, self._tag, overwrite=overwrite, run=run)
        if replaced is not None and not overwrite:
            messages.append(replaced_text(replaced))
        if self.folder.within(self._name).has(RECORD_FILE):
            self.slot = own_name(self._name, SET_ASIDE, self.save_id)
        self._begun = True
        self.folder.write_small(self._lock, _lock_document(self._run_id))
        return messages

    def commit(self, record: Record, metadata: bytes, sizes: Mapping[str, int]) -> list[str]:
        """Publish what was uploaded; returns what went wrong after that.

        `metadata` is the root's `zarr.json`; `sizes` are the bytes of every other file of the checkpoint. The record's
        `committed_ns` is set anew: it is the largest in the folder.
        """
        self._check_whole(sizes)
        newest = max((info.record.committed_ns for info in scan(self.folder).tags), default=0)
        record = replace(record, committed_ns=max(time.time_ns(), newest + 1))
        self.target.write_small(METADATA_FILE, metadata)
        if not self.folder.has(self._lock):
            raise CheckpointError(f"another save considered the upload of {self.target} dead and removed its lock")
        self.target.write_small(RECORD_FILE, record.encode())
        if self.slot != self._name:
            self.folder.within(self._name).remove(RECORD_FILE)
        return self._tidy(moves_latest=record.is_latest)

    def _check_whole(self, sizes: Mapping[str, int]) -> None:
        """Raise CheckpointError where what the store lists is not what was sent."""
        found = self.target.sizes("")
        for file, nbytes in sizes.items():
            if found.get(file) != nbytes:
                listed = "nothing" if file not in found else f"{found[file]} bytes"
                raise CheckpointError(f"{self.target.place_of(file)}: {nbytes} bytes were sent, {listed} arrived")

    def _tidy(self, *, moves_latest: bool) -> list[str]:
        """Do what may fail without harm to the checkpoint."""
        messages: list[str] = []
        try:
            if moves_latest:
                self.folder.write_small(LATEST_FILE, f"{self._tag}\n".encode())
        except OSError as error:
            messages.append(f"the checkpoint is committed, but `{LATEST_FILE}` could not be replaced: {error}")
        try:
            if self.slot != self._name:
                self.folder.remove_tree(self._name)
            else:
                _remove_set_aside(self.folder, self._name)
            self.folder.remove(self._lock)
        except OSError as error:
            messages.append(f"the checkpoint is committed, but the one it replaced could not be removed: {error}")
        return messages

    def abort(self, *, ended: bool = True) -> None:
        """Remove what was uploaded. Never raises: what cannot be removed now is swept by the next save.

        Unless every rank's part `ended`, more may come, and the lock stays for that sweep.
        """
        with contextlib.suppress(OSError, ZstoreError):
            # Without its lock, the folder may be a user's, or by now another upload's.
            if self._begun and self.folder.has(self._lock) and not self.target.has(RECORD_FILE):
                self.folder.remove_tree(self.slot)
                if ended:
                    self.folder.remove(self._lock)

    def is_committed(self) -> bool:
        """Return whether the tag's checkpoint is this upload's."""
        try:
            info = find_tag(self.folder, self._tag)
        except ZstoreError:
            return False
        return info is not None and info.record.id == self.save_id


def _lock_document(run_id: str) -> bytes:
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "run": run_id, "since_s": int(time.time())}
    return json.dumps(owner).encode()


def has_ended(data: bytes | Exception, run_id: str) -> bool:
    """Return whether the upload whose lock has the bytes `data` ended. See [Note: the order of an upload]."""
    try:
        owner: dict[str, Any] = json.loads(data) if isinstance(data, bytes) else {}
        host, pid, run, since_s = str(owner["host"]), int(owner["pid"]), str(owner["run"]), int(owner["since_s"])
    except (ValueError, KeyError, TypeError):
        return False
    if run and run == run_id:
        return True
    if host == socket.gethostname() and pid != os.getpid():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
    return time.time() - since_s > _FOREIGN_LIFE_S


def sweep(folder: RemoteFolder, run_id: str) -> list[str]:
    """Remove what uploads left that ended without a commit, those of run `run_id` among them.

    Returns a message for each thing that could not be removed.
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
        try:
            if dead and own[0] not in busy:
                _remove_unfinished(folder, own[0], own[2])
                folder.remove(lock)
        except (OSError, ZstoreError) as error:
            messages.append(f"the files of an earlier upload could not be removed: {error}")
    for name in asides - busy:
        try:
            if _is_valid(folder.within(name)):
                _remove_set_aside(folder, name)
        except (OSError, ZstoreError) as error:
            messages.append(f"a checkpoint that was replaced could not be removed: {error}")
    return messages


def _is_valid(folder: RemoteFolder) -> bool:
    try:
        read_record(folder)
    except (ZstoreError, FileNotFoundError, NotADirectoryError):
        return False
    return True


def _remove_unfinished(folder: RemoteFolder, name: str, save_id: str) -> None:
    """Remove the tag's folders that upload `save_id` may have written to and that have no record."""
    for slot in (name, own_name(name, SET_ASIDE, save_id)):
        if not folder.within(slot).has(RECORD_FILE):
            folder.remove_tree(slot)


def _remove_set_aside(folder: RemoteFolder, name: str) -> None:
    """Remove what was set aside for the tag folder `name`, which has a record of its own."""
    for entry in folder.entries().folders:
        own = parse_own_name(entry)
        if own is not None and own[:2] == (name, SET_ASIDE):
            folder.within(entry).remove(RECORD_FILE)
            folder.remove_tree(entry)


def remove_checkpoint(folder: RemoteFolder, name: str, run_id: str) -> None:
    """Remove the checkpoint in the folder `name` so that at no instant half of it looks like one."""
    own = parse_own_name(name)
    lock = own_name(own[0] if own else name, LOCK, own[2] if own else new_save_id())
    folder.write_small(lock, _lock_document(run_id))
    folder.within(name).remove(RECORD_FILE)
    folder.remove_tree(name)
    folder.remove(lock)


def remove_checkpoints(
    folder: RemoteFolder, infos: Sequence[TagInfo], removed: Callable[[TagInfo], None] = lambda info: None
) -> list[str]:
    """Remove checkpoints that lie in `folder`; `removed` is told of each. Returns a message for each that could not be."""
    return remove_each(infos, lambda info: remove_checkpoint(folder, info.folder.name, info.record.run), removed)


def retire(folder: RemoteFolder, *, keep: Keep, run_id: str) -> list[str]:
    """Remove the checkpoints in `folder` that run `run_id` saved and that the rules do not keep.

    Returns a message for each that could not be removed.
    """
    try:
        doomed = superfluous(scan(folder).tags, keep=keep, run=run_id)
    except (OSError, CheckpointNotFoundError) as error:
        return [f"checkpoints that are not needed any more could not be looked for: {error}"]
    return remove_checkpoints(folder, doomed)
