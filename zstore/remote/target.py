"""The targets of an upload: a bucket, which has no renames and gets the record last; and a service of zstore.

[Note: the order of an upload]
    1  <tag>.lock-<id>      written: an upload is running; names its run, its process and the time
    2  the files of <tag>/  except zarr.json at its top and the record; then their sizes are compared with a listing
    3  <tag>/zarr.json
    4  <tag>/zstore.json    the commit, written only if none exists
    5  `latest` replaced; checkpoints that retention does not keep removed; the lock removed
To replace a checkpoint, the new files are written to <tag>.old-<id>/, which counts for the tag if <tag>/ has no record (see
`scan`); after its record is written, removing the record of <tag>/ is the commit. The next save of that tag writes to <tag>/
again, and its record is the commit.

After a crash before the commit, nothing has a record, or the previous checkpoint counts. The next save that finds the lock of
an upload that ended removes its files. A removal takes a lock too, and removes the record first: at no instant does half a
checkpoint look like one. An upload has ended, by its lock, if it is of the same run, which has one at a time; if its process
was of this machine and is not running; else after a day. An upload that finds its lock removed does not commit.

A service receives only files that it lacks, and continues a file after a broken connection: it always reports what is
missing, so that the same save offered again resumes. See [Note: the protocol of an upload] in `zstore.serve.receive`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..checkpoint.catalog import TagInfo, check_tag_is_free, read_record, replaced_text, reporting_to, with_commit_time
from ..checkpoint.commit import (
    LATEST_NOT_UPDATED,
    REMOTE_LOCK_TTL_S,
    REPLACED_NOT_REMOVED,
    discard,
    owner_json,
    process_has_ended,
)
from ..checkpoint.folder import Entries, Folder
from ..checkpoint.layout import (
    LATEST_FILE,
    LOCK,
    METADATA_FILE,
    RECORD_FILE,
    SET_ASIDE,
    manifest_file,
    new_save_id,
    parse_working_name,
    tag_folder,
    working_name,
)
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.retention import Keep, retire
from ..errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptionError,
    StorageError,
    ZstoreError,
)
from ..io.files import Files
from ..io.machine import Workers
from .bucket import MISSING, BucketFolder, checked_parts
from .service import ServiceBusyError, ServiceFolder

Advance = Callable[[int], None]
NUM_THREADS = 4
"""Files that one process uploads concurrently; to a bucket each takes about three parts of 8 MiB in memory."""


def local_files(reader: CheckpointReader) -> dict[str, int]:
    """Return path and bytes of the files of a local checkpoint, or of a rank's part, except the two that are written last."""
    found = reader.folder.sizes("")
    return {file: size for file, size in found.items() if size is not None and file not in (METADATA_FILE, RECORD_FILE)}


class BucketTarget:
    """An upload of run `run_id` into the folder of checkpoints `folder`. See [Note: the order of an upload].

    Calls: rank 0's `begin`, once metadata and manifests exist; each rank's `send`, with the `facts` of rank 0; rank 0's
    `commit`, or `discard` if anything fails.
    """

    def __init__(self, folder: BucketFolder, tag: str, save_id: str, run_id: str) -> None:
        self.folder = folder
        self._tag, self._save_id, self._run_id = tag, save_id, run_id
        self._name = tag_folder(tag)
        self._lock = working_name(self._name, LOCK, save_id)
        self._keep: Keep | None = None
        self.location = folder.location_of(self._name)
        """URL of the tag, as people name it."""
        self.facts: Mapping[str, Any] = {}
        """The destination of the files, as JSON; other ranks set it to rank 0's."""

    @property
    def stage(self) -> BucketFolder:
        """The folder that the files are sent to."""
        return self.folder.child(self.facts["stage"])

    def begin(
        self, reader: CheckpointReader, *, overwrite: bool, replaces_own: bool = False, keep: Keep | None = None
    ) -> list[str]:
        """Sweep, check that the tag may be written, choose the stage and lock it; return messages for the user. `keep` is
        applied after the commit.

        Raises CheckpointExistsError for a committed tag (unless `overwrite`, or with `replaces_own` if the same run saved it).
        """
        self._keep = keep
        messages = sweep(self.folder, self._run_id)
        run = self._run_id if replaces_own else ""
        replaced = check_tag_is_free(self.folder, self._tag, overwrite=overwrite, run=run)
        if replaced is not None and not overwrite:
            messages.append(replaced_text(replaced))
        is_taken = self.folder.child(self._name).has(RECORD_FILE)
        self.folder.write_small(self._lock, owner_json(run=self._run_id, since_s=int(time.time())))
        # Of two saves that begin at once, each sees the other's lock.
        if any(name == self._name and lock != self._lock for lock, name in _locks(self.folder.entries()).items()):
            self.folder.remove(self._lock)
            raise CheckpointExistsError(
                f"another save of {self.location} is running: wait for its end, or save under another tag"
            )
        self.facts = {"stage": working_name(self._name, SET_ASIDE, self._save_id) if is_taken else self._name}
        return messages

    def send(
        self, workers: Workers, top: Path, files: Mapping[str, int], advance: Advance, *, rank: int | None = None
    ) -> int:
        """Send `files`, their bytes by path, from the folder `top`; return the bytes sent. They are the files of `rank`, None:
        of all ranks. `advance` is called with the bytes of each file that arrived, with 0 before each part, and may raise."""

        def send(file: str) -> int:
            nbytes = self.stage.send(top / file, file, partial(advance, 0))
            advance(nbytes)
            return nbytes

        return sum(workers.run([partial(send, file) for file in files]))

    def commit(self, reader: CheckpointReader) -> list[str]:
        """Publish the checkpoint, once a listing shows the files of every rank; return a message for each failure after that.
        The record's `committed_ns` is set again, as the largest of the folder."""
        stage = self.stage
        found, sent = stage.sizes(""), local_files(reader)
        for entry in (entry for rank in range(reader.record.world_size) for entry in reader.manifest(rank).shards):
            sent[reader.array(entry.array).shard_file(entry.shard)] = entry.file_bytes
        for file, nbytes in sent.items():
            if found.get(file) != nbytes:
                listed = "nothing" if file not in found else f"{found[file]} bytes"
                raise CheckpointError(f"{stage.location_of(file)}: {nbytes} bytes were sent, {listed} arrived")
        record = with_commit_time(reader.record, self.folder)
        stage.write_small(METADATA_FILE, reader.folder.read_small(METADATA_FILE))
        if not self.folder.has(self._lock):
            raise CheckpointError(f"another save considered the upload of {stage} dead and removed its lock")
        try:
            stage.write_small(RECORD_FILE, record.encode(), is_new=True)
        except FileExistsError:
            raise CheckpointExistsError(
                f"{self.location} was committed by another save in the meantime: save under another tag"
            ) from None
        if stage.name != self._name:
            self.folder.child(self._name).remove(RECORD_FILE)
        # Failures from here on do not harm the checkpoint.
        messages: list[str] = []
        with reporting_to(messages, LATEST_NOT_UPDATED):
            if record.is_latest:
                self.folder.write_small(LATEST_FILE, f"{self._tag}\n".encode())
        with reporting_to(messages, REPLACED_NOT_REMOVED):
            _remove_remains(self.folder, self._name)
            self.folder.remove(self._lock)
        if self._keep is not None:
            remove = partial(remove_checkpoint, self.folder)
            messages += retire(self.folder, keep=self._keep, run=self._run_id, remove=remove)
        return messages

    def discard(self, *, ended: bool) -> None:
        """Remove the uploaded files; files that cannot be removed now, or arrive later, are swept by the next save.
        Never raises. `ended`: no rank sends any more."""
        with contextlib.suppress(OSError, ZstoreError):
            # Without its lock, the folder may belong to a user or to another upload.
            if self.facts and self.folder.has(self._lock) and not self.stage.has(RECORD_FILE):
                self.folder.remove_tree(self.stage.name)
                if ended:
                    self.folder.remove(self._lock)


def has_ended(data: bytes | Exception, run_id: str) -> bool:
    """Return whether the upload whose lock has the bytes `data` ended. See [Note: the order of an upload]."""
    try:
        owner: dict[str, Any] = json.loads(data) if isinstance(data, bytes) else {}
        ended = process_has_ended(owner) or owner["run"] == run_id != ""
        return ended or time.time() - int(owner["since_s"]) > REMOTE_LOCK_TTL_S
    except (ValueError, KeyError, TypeError):
        return False


def sweep(folder: BucketFolder, run_id: str) -> list[str]:
    """Remove leftovers of uploads that have ended or belong to run `run_id`; return a message for each failure."""
    try:
        locks = _locks(folder.entries())
    except MISSING:
        return []
    ended = [has_ended(data, run_id) for data in folder.read_all(list(locks))]
    busy = {name for name, dead in zip(locks.values(), ended, strict=True) if not dead}
    messages: list[str] = []
    for lock, name in locks.items():
        if name not in busy:
            with reporting_to(messages, "the files of an earlier upload could not be removed"):
                _remove_remains(folder, name)
                folder.remove(lock)
    return messages


def _locks(entries: Entries) -> dict[str, str]:
    """Return the locks in a folder, each with the tag folder that it locks."""
    return {file: own[0] for file in entries.files if (own := parse_working_name(file)) is not None and own[1] == LOCK}


def _remove_remains(folder: BucketFolder, name: str) -> None:
    """Remove the files of the tag folder `name` that belong to no checkpoint, or to a replaced one."""
    found = [own for each in folder.entries().folders if (own := parse_working_name(each)) is not None]
    asides = [working_name(*own) for own in found if own[:2] == (name, SET_ASIDE)]
    try:  # other failures are the caller's, which leaves the lock for the next sweep
        read_record(folder.child(name))
        removable = asides
    except (*MISSING, CorruptionError, CheckpointMismatchError):
        removable = [each for each in (name, *asides) if not folder.child(each).has(RECORD_FILE)]
    for each in removable:
        folder.child(each).remove(RECORD_FILE)
        folder.remove_tree(each)


def remover(place: Folder) -> Callable[[TagInfo], None]:
    """Return a function that removes a committed checkpoint in the folder `place`, local or at a URL, so that half of it
    never looks like a checkpoint."""
    if isinstance(place, BucketFolder):
        return partial(remove_checkpoint, place)
    files = Files()
    return lambda info: discard(files, info.path)


def remove_checkpoint(folder: BucketFolder, info: TagInfo) -> None:
    """Remove a checkpoint in `folder` so that a partial one never looks like a checkpoint."""
    name = info.folder.name
    own = parse_working_name(name)
    lock = working_name(own[0] if own else name, LOCK, own[2] if own else new_save_id())
    folder.write_small(lock, owner_json(run=info.record.run, since_s=int(time.time())))
    folder.child(name).remove(RECORD_FILE)
    folder.remove_tree(name)
    folder.remove(lock)


_COMMIT_S = 1800.0
"""Until the service has made all files durable and removed old checkpoints."""
_MAX_CORRUPT = 3
"""Times that a file may arrive corrupted: after that, the source is damaged and not the network."""
_BLOCK_BYTES = 256 * 1024
"""Bytes of a file sent at once."""


class ServiceTarget:
    """An upload to the run `folder`. See `BucketTarget` for its calls."""

    def __init__(self, folder: ServiceFolder, tag: str) -> None:
        self.location = folder.location_of(tag_folder(tag))
        self._run, self._connection = folder.run, folder.connection
        self._offered: dict[str, Any] = {}
        self.facts: Mapping[str, Any] = {}

    @property
    def _path(self) -> str:
        return f"/api/uploads/{self.facts['upload']}"

    def begin(
        self, reader: CheckpointReader, *, overwrite: bool, replaces_own: bool = False, keep: Keep | None = None
    ) -> list[str]:
        """Send metadata and manifests, from which the service plans the upload. Raises DiskFullError if it has no room."""
        files = local_files(reader)
        manifests = [manifest_file(rank) for rank in range(reader.record.world_size)]
        extras = {name: size for name, size in files.items() if "/" not in name}
        self._offered = {
            "run": self._run,
            "record": (reader.path / RECORD_FILE).read_text(encoding="utf-8"),
            "documents": {METADATA_FILE: reader.folder.size(METADATA_FILE)} | {name: files[name] for name in manifests},
            "extras": {name: {"bytes": size, "sha256": _sha256(reader.path / name)} for name, size in extras.items()},
            "overwrite": overwrite,
            "replaces_own": replaces_own,
            "keep": None if keep is None else vars(keep),
        }
        state = self._connection.ask("POST", "/api/uploads", self._offered)
        self.facts = {"upload": str(state["id"]), "committed": state["state"] == "committed"}
        if not self.facts["committed"]:
            for each in state["files"]:
                if each["path"] in self._offered["documents"]:
                    self._send_file(reader.path / each["path"], each, lambda _: None)
            self._connection.ask("POST", f"{self._path}/plan", timeout_s=_COMMIT_S)
        return []

    def send(
        self, workers: Workers, top: Path, files: Mapping[str, int], advance: Advance, *, rank: int | None = None
    ) -> int:
        """Send the files that the service neither has nor links."""
        missing: dict[str, Any] = {}
        if not self.facts["committed"]:
            # The files of one rank, or of all.
            query = f"?rank={rank}" if rank else ""
            missing = {each["path"]: each for each in self._connection.ask("GET", f"{self._path}{query}")["files"]}
        advance(sum(size for file, size in files.items() if file not in missing))
        tasks = [partial(self._deliver, top / file, each, advance) for file, each in missing.items() if file in files]
        return sum(workers.run(tasks))

    def _deliver(self, source: Path, entry: dict[str, Any], advance: Advance) -> int:
        """Let the service link a file, or send it; return the bytes sent."""
        is_linked = False
        if entry["candidate"]:
            claims = {"files": {entry["path"]: _sha256(source)}}
            answer = self._connection.ask("POST", f"{self._path}/claims", claims, timeout_s=_COMMIT_S)
            is_linked = entry["path"] in answer["linked"]
        nbytes = 0 if is_linked else self._send_file(source, entry, advance)
        advance(entry["bytes"])
        return nbytes

    def _send_file(self, source: Path, entry: Mapping[str, Any], advance: Advance) -> int:
        """Send the part of a file that the service lacks, and resume if the connection breaks; return its bytes."""
        connection, path = self._connection, f"{self._path}/files/{quote(entry['path'])}"
        size, received, tries, corrupt = int(entry["bytes"]), int(entry["received"]), 0, 0

        def attempt() -> int:
            nonlocal tries, corrupt
            offset = int(json.loads(connection.request("GET", path).data)["received"]) if tries else received
            tries += 1
            if offset == size > 0:
                return 0
            headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size - offset)}
            if size:
                headers["Content-Range"] = f"bytes {offset}-{size - 1}/{size}"
            with source.open("rb", buffering=0) as file:
                if (found := os.fstat(file.fileno()).st_size) != size:
                    raise StorageError(f"the file has {found} bytes, expected {size}", path=str(source))
                file.seek(offset)
                parts = checked_parts(file, _BLOCK_BYTES, partial(advance, 0))
                answer = connection.request("PUT", path, body=parts, headers=headers, accept=(409, 422))
            corrupt += answer.status == 422
            if corrupt == _MAX_CORRUPT:
                raise CorruptionError(
                    f"{source} arrived {corrupt} times with other bytes than its manifest says: the file is damaged"
                )
            if answer.status in (409, 422):
                raise ServiceBusyError(f"the answer was {answer.status}: {answer.data[:500].decode(errors='replace')}")
            return size - offset

        return connection.call(attempt, f"upload {source}", f"{connection.base}{path}")

    def commit(self, reader: CheckpointReader) -> list[str]:
        """Commit; the service applies retention too."""
        if self.facts["committed"]:
            return []
        try:
            answer = self._connection.ask("POST", f"{self._path}/commit", timeout_s=_COMMIT_S)
        except (CheckpointNotFoundError, CheckpointExistsError) as error:
            # The answer was lost, or another client committed it: then the same offer reports that it is committed.
            if self._connection.ask("POST", "/api/uploads", self._offered)["state"] != "committed":
                raise
            return [str(error)] if isinstance(error, CheckpointExistsError) else []
        return [str(message) for message in answer["messages"]]

    def discard(self, *, ended: bool) -> None:
        """Delete what was received if the save was cancelled; else the service keeps it for a day, to be resumed."""
        connection = self._connection
        if connection.retries.cancelled.is_set() and self.facts and not self.facts["committed"]:
            with contextlib.suppress(OSError, ZstoreError):
                connection.call(lambda: connection.request("DELETE", self._path), "cancel", self.location)


def _sha256(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
