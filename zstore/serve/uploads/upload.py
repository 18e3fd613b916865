"""One upload on disk: its expected files, those received so far, and where they are stored.

[Note: an upload]
    <run>/.uploads/<id>/upload.json     the client's offer, including the record; touched by each request
    <run>/.uploads/<id>/parts/<digest>  an incomplete file; named by the SHA-256 of its path
    <run>/.uploads/<id>/checkpoint/...  complete files: each is made durable and checked before it gets its name

This is all of an upload's state, so a restarted service resumes it. Readers find no checkpoint below `.uploads`: tags'
folders have no leading dot, and there is no record before the commit. The commit moves `checkpoint/` to the temporary
folder of a local save, and commits as that save does (`zstore.checkpoint.commit`).

If client or service is killed, the files stay, and the same save offered again resumes with them; otherwise they are removed
after a day. A part file corrupted by a power cut fails its check, and is requested again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np

from ...checkpoint.catalog import scan
from ...checkpoint.commit import Committer, owner_has_ended, sweep
from ...checkpoint.format import Record
from ...checkpoint.layout import LOCK, METADATA_FILE, RECORD_FILE, TEMPORARY, dump_metadata, tag_folder, working_name
from ...checkpoint.reader import CheckpointReader
from ...errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptionError,
    UsageError,
    ZstoreError,
)
from ...io.files import Files, make_read_only
from ...io.machine import Workers
from ..runs import UPLOADS_FOLDER
from .offer import (
    OFFER_FILE,
    Content,
    KnownContent,
    ShardContent,
    UploadFile,
    UploadOffer,
    UploadPlan,
    UploadState,
    check_extras,
    documents_of,
    file_sha256,
    make_plan,
    verify_shard,
)

_NUM_SEARCHED = 4
"""How many of the run's newest checkpoints are searched for unchanged shards."""


class Upload:
    """An upload into the run's folder `folder`. Usable from any thread; calls block on the drive."""

    def __init__(self, upload_id: str, offer: UploadOffer, folder: Path, files: Files) -> None:
        self.id = upload_id
        self.offer = offer
        self.folder = folder
        self.path = folder / UPLOADS_FOLDER / upload_id
        self.checkpoint = self.path / "checkpoint"
        self.record = Record.decode(offer.record.encode(), RECORD_FILE)
        self.active_at = time.time()
        self.lock = threading.RLock()
        """Held for work on all files."""
        self.senders: dict[str, object] = {}
        """By file: the connection that sends it. A later connection replaces an earlier one."""
        self._files = files
        self._documents = documents_of(self.record, offer.documents)
        self._extras = {
            name: KnownContent(num_bytes=extra.bytes, sha256=extra.sha256) for name, extra in offer.extras.items()
        }
        check_extras(self._extras)
        self._plan: UploadPlan | None = None
        self._candidates: dict[str, Path] = {}
        """Files of committed checkpoints that seem equal to expected ones."""

    def store(self) -> None:
        """Store the offer; the upload exists from now on."""
        for folder in (self.checkpoint, self.path / "parts"):
            self._files.make_folder(folder)
        part = self.path / f"{OFFER_FILE}.part"
        self._files.write_small(part, self.offer.model_dump_json().encode())
        self._files.rename(part, self.path / OFFER_FILE)
        self._files.sync_folder(self.path)

    @classmethod
    def load(cls, path: Path, files: Files) -> Upload:
        """Return the upload that an earlier service left in the folder `path`.

        Raises ValueError, OSError or ZstoreError for anything else.
        """
        offer = UploadOffer.model_validate_json((path / OFFER_FILE).read_bytes())
        upload = cls(path.name, offer, path.parent.parent, files)
        upload.active_at = os.stat(path / OFFER_FILE).st_mtime
        upload._undo_commit()
        return upload

    def _undo_commit(self) -> None:
        """Undo a commit interrupted when the service stopped."""
        name = tag_folder(self.record.tag)
        moved = self.folder / working_name(name, TEMPORARY, self.record.id)
        lock = self.folder / working_name(name, LOCK, self.record.id)
        if self.checkpoint.is_dir() or not moved.is_dir():
            return
        with owner_has_ended(lock) as dead:
            if dead:
                self._files.unlink(moved / RECORD_FILE)
                self._files.rename(moved, self.checkpoint)
                self._files.unlink(lock)

    def remove(self) -> None:
        """Remove all its files. Connections still sending fail with an error."""
        self.senders.clear()
        self._files.remove_tree(self.path)
        with contextlib.suppress(OSError):
            os.rmdir(self.path.parent)

    def touch(self) -> None:
        """Record that the client made a request."""
        self.active_at = time.time()
        with contextlib.suppress(OSError):
            os.utime(self.path / OFFER_FILE)

    def plan(self) -> UploadPlan:
        """Return all its files. Raises UsageError while metadata or manifests are missing, DiskFullError without room for the
        others."""
        with self.lock:
            if self._plan is None:
                missing = [file for file in self._documents if not self.is_whole(file)]
                if missing:
                    raise UsageError(f"send {', '.join(missing[:3])} first: they list the checkpoint's files")
                plan = make_plan(self.record, self.checkpoint, self._extras)
                self._candidates = self._find_candidates(plan)
                self._plan = plan
            return self._plan

    def require_room(self) -> None:
        """Raise DiskFullError unless the remaining files fit on the drive."""
        with self.lock:
            needed = 0 if self._plan is None else self._plan.copies_bytes
            for file, content in self._contents().items():
                if not self.is_whole(file) and file not in self._candidates:
                    needed += content.num_bytes - self.received(file) + 4096
        # The run's folder is created by its first upload.
        existing = self.folder if self.folder.is_dir() else self.folder.parent
        advice = "make room on the drive of the service's runs, or save elsewhere"
        self._files.require_room(existing, needed, f"the upload needs {needed} bytes", advice)

    def _find_candidates(self, plan: UploadPlan) -> dict[str, Path]:
        """Return files of committed checkpoints with the layout, the size and the checksums of expected files."""
        shards = plan.shards.items()
        remaining = {file: one for file, one in shards if one.array.codec is None and not self.is_whole(file)}
        found: dict[str, Path] = {}
        for info in reversed(scan(self.folder).tags[-_NUM_SEARCHED:]):
            if not remaining:
                break
            with contextlib.suppress(ZstoreError, OSError), CheckpointReader(info) as reader:
                for rank in {content.shard for content in remaining.values()} & set(range(info.record.world_size)):
                    for entry in reader.manifest(rank).shards:
                        array = reader.arrays.get(entry.array)
                        if array is None or entry.shard != rank:
                            continue
                        file = array.shard_file(rank)
                        content = remaining.get(file)
                        if content is not None and array == content.array and np.array_equal(entry.crcs, content.crcs):
                            found[file] = reader.path / file
                            del remaining[file]
        return found

    def _contents(self) -> dict[str, Content]:
        """Return all files sent over the network, by path."""
        shards = {} if self._plan is None else self._plan.shards
        return {**self._documents, **shards, **self._extras}

    def content_of(self, file: str) -> Content:
        """Return the known content of a file; raises CheckpointNotFoundError for an unknown file."""
        content: Content | None = self._documents.get(file) or self._extras.get(file)
        if content is None:
            content = self.plan().shards.get(file)
        if content is None:
            raise CheckpointNotFoundError(f"{file!r:.200} is not part of the checkpoint being uploaded")
        return content

    def is_whole(self, file: str) -> bool:
        """Return whether a file arrived and was checked."""
        return os.path.lexists(self.checkpoint / file)

    def part(self, file: str) -> Path:
        """Return the path of an incomplete file."""
        return self.path / "parts" / hashlib.sha256(file.encode()).hexdigest()

    def received(self, file: str) -> int:
        """Return how many bytes of a file have arrived."""
        if self.is_whole(file):
            return self.content_of(file).num_bytes
        try:
            return os.stat(self.part(file)).st_size
        except FileNotFoundError:
            return 0

    def missing(self, rank: int | None = None) -> list[UploadFile]:
        """Return the incomplete files: one rank's shard files, or all if `rank` is None."""
        with self.lock:
            files = list(self._contents()) if rank is None else list(self.plan().of_rank.get(rank, ()))
            found = [self.file_state(file) for file in files if not self.is_whole(file)]
            return [each for each in found if not self.is_whole(each.path)]

    def file_state(self, file: str) -> UploadFile:
        """Return how much of a file arrived; checks a file whose bytes had all arrived when the connection ended."""
        size = self.content_of(file).num_bytes
        if (
            not self.is_whole(file)
            and file not in self.senders
            and self.part(file).exists()
            and self.received(file) >= size
        ):
            with contextlib.suppress(CorruptionError):
                self.accept(file)
        return UploadFile(path=file, bytes=size, received=self.received(file), candidate=file in self._candidates)

    def state(self, *, rank: int | None = None, files: bool = True) -> UploadState:
        """Return the state for clients."""
        with self.lock:
            if files and all(self.is_whole(file) for file in self._documents):
                self.plan()
            return UploadState(
                id=self.id,
                run=self.offer.run,
                tag=self.record.tag,
                run_id=self.record.run,
                state="begun" if self._plan is None else "planned",
                files=self.missing(rank) if files else [],
            )

    def link(self, file: str, sha256: str) -> bool:
        """Link a candidate whose SHA-256 equals the client's file's; return whether it was linked.

        Chunk checksums are not enough: different files collide with probability 2^-32.
        """
        content, source = self.content_of(file), self._candidates.get(file)
        if self.is_whole(file):
            return True
        if source is None:
            return False
        target = self.checkpoint / file
        try:
            before = os.lstat(source)
            if before.st_size != content.num_bytes or file_sha256(source) != sha256:
                raise CorruptionError(f"{source} differs from the client's file")
            self._files.make_folder(target.parent)
            self._files.link(source, target)
            after = os.lstat(target)
            if (before.st_ino, before.st_mtime_ns) != (after.st_ino, after.st_mtime_ns):
                self._files.unlink(target)
                raise CorruptionError(f"{source} was replaced in the meantime")
        except (OSError, ZstoreError):
            with self.lock:  # the client must send it
                self._candidates.pop(file, None)
            return False
        return True

    def accept(self, file: str) -> None:
        """Make a completely received file durable, check it, and give it its name.

        If the check fails, deletes it and raises CorruptionError.
        """
        part, target, content = self.part(file), self.checkpoint / file, self.content_of(file)
        with self.lock:
            if self.is_whole(file):
                return
            self._files.sync_file(part)
            try:
                if isinstance(content, ShardContent):
                    verify_shard(part, content.array, content.shard, content.crcs)
                elif file_sha256(part) != content.sha256:
                    raise CorruptionError(f"{file} does not match its SHA-256")
            except CorruptionError as error:
                self._files.unlink(part)
                raise CorruptionError(f"{file} did not arrive as it was sent, and was dropped: {error}") from error
            make_read_only(part)
            self._files.make_folder(target.parent)
            self._files.rename(part, target)

    def require_whole(self) -> None:
        """Raise CheckpointMismatchError naming the missing files."""
        self.plan()
        if missing := self.missing():
            names = ", ".join(each.path for each in missing[:3])
            raise CheckpointMismatchError(f"{len(missing)} files are missing: {names}: send them, then commit")

    def linked_bytes(self) -> int:
        """Return the bytes of shard files that are links."""
        shards = self.plan().shards.items()
        return sum(one.num_bytes for file, one in shards if os.stat(self.checkpoint / file).st_nlink > 1)

    def publish(self) -> list[str]:
        """Write the metadata of groups and arrays, sync the folders, and commit as a local save does."""
        files, plan = self._files, self.plan()

        def write(folder: str) -> None:
            path = self.checkpoint / folder / METADATA_FILE
            files.make_folder(path.parent)
            files.unlink(path)
            files.write_small(path, dump_metadata(plan.copies[folder]))
            make_read_only(path)
            files.sync_folder(path.parent)

        with Workers(4, "zstore-upload") as workers:
            workers.run([partial(write, folder) for folder in plan.copies])
        for folder in (self.checkpoint / "manifest", self.checkpoint):
            files.sync_folder(folder)
        messages = sweep(files, self.folder)
        committer = Committer(files, self.folder, self.record.tag, self.record.id)
        try:
            committer.begin(partial(files.rename, self.checkpoint))
            return messages + committer.commit(self.record)
        except BaseException:
            if committer.temporary.is_dir():
                with contextlib.suppress(OSError):
                    files.rename(committer.temporary, self.checkpoint)
            raise
        finally:
            committer.close()
