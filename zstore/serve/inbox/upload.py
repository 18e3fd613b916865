"""One upload on disk: its expected files, those that came so far, and their places.

[Note: an upload]
    <run>/.uploads/<id>/upload.json     the client's offer, the record with it; touched while it is under way
    <run>/.uploads/<id>/parts/<digest>  a file that is not whole yet, as far as it came; named by the SHA-256 of its path
    <run>/.uploads/<id>/checkpoint/...  files that are whole: each was made durable and checked before it got its name there

For a run behind a URL `<run>` is a folder of its name among those for uploads. A shard file that the run's newest version has
is a symbolic link there to nothing, whose target is its SHA-256. The commit sends the others.

All that is known of an upload is there, so a restarted service resumes it. No reader takes anything below
`.uploads` for a checkpoint, since tags' folders have no leading dot, and there is no record before the commit: that moves
`checkpoint/` to the place of the temporary folder of a save of this machine, and from there on is that save's commit
(`zstore.checkpoint.commit`). It is in the run's own folder, whose file system it needs for that.

A client is killed: its files stay, and the same save offered again resumes with them; otherwise they are removed after a day. A
service is killed: the same, part files are as long as the bytes written; one that a power cut left with other bytes fails its
check, and is asked for again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ...checkpoint.catalog import TagInfo, scan
from ...checkpoint.folder import Folder
from ...checkpoint.format import Record
from ...checkpoint.lock import owner_is_dead
from ...checkpoint.names import LOCK, RECORD_FILE, TEMPORARY, own_name, tag_folder
from ...checkpoint.reader import CheckpointReader
from ...errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptionError,
    UsageError,
    ZstoreError,
)
from ...io.files import Files, OpenFile, make_read_only
from ..verify import file_sha256, verify_shard
from .models import OFFER_FILE, UPLOADS_FOLDER, UploadFile, UploadOffer, UploadState
from .plan import Content, KnownContent, ShardContent, UploadPlan, check_extras, documents_of, make_plan

_TOUCH_S = 60.0
_OWNER_FILE = "owner"
_NUM_SEARCHED = 4
"""The newest checkpoints of its run, in which shards that did not change are looked for."""


class Upload:
    """An upload that comes together in `folder`, for the folder of checkpoints `place`: the same one, or one behind a URL.

    Usable from any thread; calls block on the drive.
    """

    def __init__(self, upload_id: str, offer: UploadOffer, folder: Path, files: Files, place: Folder) -> None:
        self.id = upload_id
        self.offer = offer
        self.folder = folder
        self.place = place
        self.path = folder / UPLOADS_FOLDER / upload_id
        self.checkpoint = self.path / "checkpoint"
        self.record = Record.decode(offer.record.encode(), RECORD_FILE)
        self.started_at = self.active_at = time.time()
        self.lock = threading.RLock()
        """Held for work on all files."""
        self.sending = threading.Lock()
        """Held while it is sent on to a URL."""
        self.holds_room = True
        """Whether the room that it needs is kept for it: not once it was refused, or its client went away in a file."""
        self._touched_at = 0.0
        self.total_bytes = 0
        self.progress: Callable[[int], None] = lambda num_bytes: None
        """Told of bytes of files that came, less than none if they were dropped."""
        self._files = files
        self._documents = documents_of(self.record, offer.documents)
        self._extras = {
            name: KnownContent(num_bytes=extra.bytes, sha256=extra.sha256) for name, extra in offer.extras.items()
        }
        check_extras(self._extras)
        self._plan: UploadPlan | None = None
        self._candidates: dict[str, Path] = {}
        """Files that are there already seemingly."""
        self._arrivals: dict[str, Arrival] = {}
        self.neighbours: Sequence[Path] = ()
        """Folders of other runs that its client may read, whose newest checkpoint is searched too."""
        self.owner = ""
        """Name of the token that planned it, if it is one of a file of tokens."""

    # -- on disk ----------------------------------------------------------------------------------------------------

    def store(self) -> None:
        """Store the offer; the upload is there from now on."""
        for folder in (self.checkpoint, self.path / "parts"):
            self._files.make_folder(folder)
        part = self.path / f"{OFFER_FILE}.part"
        self._files.write_small(part, self.offer.model_dump_json().encode())
        self._files.rename(part, self.path / OFFER_FILE)
        self._files.sync_folder(self.path)

    def give(self, owner: str) -> None:
        """Note whose it is."""
        self.owner = owner
        self._files.write_small(self.path / _OWNER_FILE, owner.encode())

    @classmethod
    def load(cls, path: Path, files: Files, place_of: Callable[[str], Folder]) -> Upload:
        """Return the upload that an earlier service left in the folder `path`; `place_of` gives the folder of a run's name.

        Raises ValueError, OSError or ZstoreError for anything else.
        """
        offer = UploadOffer.model_validate_json((path / OFFER_FILE).read_bytes())
        upload = cls(path.name, offer, path.parent.parent, files, place_of(offer.run))
        found = os.stat(path / OFFER_FILE)
        upload.started_at = upload.active_at = found.st_mtime
        with contextlib.suppress(FileNotFoundError):
            upload.owner = (path / _OWNER_FILE).read_text(encoding="utf-8")
        upload._take_back()
        return upload

    def _take_back(self) -> None:
        """Undo a commit that the end of the service cut short."""
        name = tag_folder(self.record.tag)
        moved = self.folder / own_name(name, TEMPORARY, self.record.id)
        lock = self.folder / own_name(name, LOCK, self.record.id)
        if self.checkpoint.is_dir() or not moved.is_dir():
            return
        with owner_is_dead(lock) as dead:
            if dead:
                self._files.unlink(moved / RECORD_FILE)
                self._files.rename(moved, self.checkpoint)
                self._files.unlink(lock)

    def remove(self) -> None:
        """Remove all files that came. Connections that still send end with an error."""
        for file in list(self._arrivals):
            self._end_arrival(file)
        self._files.remove_tree(self.path)
        with contextlib.suppress(OSError):
            os.rmdir(self.path.parent)

    def touch(self) -> None:
        """Note that its client is there."""
        self.active_at = self._touched_at = time.time()
        self.holds_room = True
        with contextlib.suppress(OSError):
            os.utime(self.path / OFFER_FILE)

    # -- files to come, and files that came ---------------------------------------------------------------------------

    def plan(self) -> UploadPlan:
        """Return all its files. Raises UsageError as long as metadata and manifests are missing."""
        with self.lock:
            if self._plan is None:
                missing = [file for file in self._documents if not self.is_whole(file)]
                if missing:
                    raise UsageError(f"send {', '.join(missing[:3])} first: they say which files there are")
                self._plan = make_plan(self.record, self.checkpoint, self._extras)
                self._candidates = self._find_candidates(self._plan)
                self.total_bytes = sum(content.num_bytes for content in self._to_come().values())
            return self._plan

    def _find_candidates(self, plan: UploadPlan) -> dict[str, Path]:
        """Return files of committed checkpoints that have the layout, the size and the checksums of files that are to come."""
        left = {
            file: content
            for file, content in plan.shards.items()
            if content.array.codec is None and not self.is_whole(file)
        }
        found: dict[str, Path] = {}
        for info in self._searched():
            if not left:
                break
            with contextlib.suppress(ZstoreError, OSError), CheckpointReader(info) as reader:
                for rank in {content.shard for content in left.values()} & set(range(info.record.world_size)):
                    for entry in reader.manifest(rank).shards:
                        array = reader.arrays.get(entry.array)
                        if array is None or entry.shard != rank:
                            continue
                        file = array.shard_file(rank)
                        wanted = left.get(file)
                        if wanted is not None and array == wanted.array and np.array_equal(entry.crcs, wanted.crcs):
                            found[file] = reader.path / file
                            del left[file]
        return found

    def _searched(self) -> Iterator[TagInfo]:
        """Yield the checkpoints that may have files of this one, the likeliest first."""
        if self.place.is_local:
            yield from reversed(scan(self.place).tags[-_NUM_SEARCHED:])
        for folder in self.neighbours:
            with contextlib.suppress(ZstoreError, OSError):
                yield from scan(folder).tags[-1:]

    def _contents(self) -> dict[str, Content]:
        """Return all files that come over the network, by path."""
        shards = {} if self._plan is None else self._plan.shards
        return {**self._documents, **shards, **self._extras}

    def content_of(self, file: str) -> Content:
        """Return the known content of a file; raises CheckpointNotFoundError for one that the upload does not have."""
        content: Content | None = self._documents.get(file) or self._extras.get(file)
        if content is None:
            content = self.plan().shards.get(file)
        if content is None:
            raise CheckpointNotFoundError(f"{file!r:.200} is no file of the checkpoint that is uploaded")
        return content

    def is_whole(self, file: str) -> bool:
        """Return whether a file is there and was checked."""
        return os.path.lexists(self.checkpoint / file)

    def _part(self, file: str) -> Path:
        return self.path / "parts" / hashlib.sha256(file.encode()).hexdigest()

    def received(self, file: str) -> int:
        """Return how many bytes of a file are there."""
        if self.is_whole(file):
            return self.content_of(file).num_bytes
        try:
            return os.stat(self._part(file)).st_size
        except FileNotFoundError:
            return 0

    def _settle(self, file: str) -> None:
        """Check a file of which all bytes came, and then the service ended, or the connection."""
        content, part = self.content_of(file), self._part(file)
        if self.is_whole(file) or not part.exists() or part.stat().st_size < content.num_bytes:
            return
        with self.lock:
            self._end_arrival(file)  # which may be checking it: it has ended when this returns
            if not self.is_whole(file) and part.exists():
                with contextlib.suppress(CorruptionError), self._files.opened(part, direct=False) as opened:
                    self.take(file, content, opened)

    def _to_come(self) -> dict[str, Content]:
        """Return the files that are not whole, and are not candidates."""
        return {
            file: content
            for file, content in self._contents().items()
            if not self.is_whole(file) and file not in self._candidates
        }

    def room_needed(self) -> int:
        """Return the bytes that files to come take on the drive."""
        with self.lock:
            blocks = [content.num_bytes - self.received(file) + 4096 for file, content in self._to_come().items()]
            return sum(blocks) + (0 if self._plan is None else self._plan.copies_bytes)

    def missing(self, rank: int | None = None) -> list[UploadFile]:
        """Return the files that are not whole: of one rank its shard files, of None all."""
        with self.lock:
            files = list(self._contents()) if rank is None else list(self.plan().of_rank.get(rank, ()))
            found = [self.file_state(file) for file in files if not self.is_whole(file)]
            return [each for each in found if not self.is_whole(each.path)]

    def file_state(self, file: str) -> UploadFile:
        """Return how much of a file is there."""
        size = self.content_of(file).num_bytes
        self._settle(file)
        return UploadFile(path=file, bytes=size, received=self.received(file), candidate=file in self._candidates)

    def state(self, *, rank: int | None = None, files: bool = True) -> UploadState:
        """Return the state for clients."""
        with self.lock:
            if files and all(self.is_whole(file) for file in self._documents):
                self.plan()
            left = sum(content.num_bytes - self.received(file) for file, content in self._to_come().items())
            return UploadState(
                id=self.id,
                run=self.offer.run,
                tag=self.record.tag,
                run_id=self.record.run,
                state="begun" if self._plan is None else "planned",
                started_at=self.started_at,
                active_at=self.active_at,
                done_bytes=max(self.total_bytes - left, 0),
                total_bytes=self.total_bytes,
                files=self.missing(rank) if files else [],
            )

    # -- files that come --------------------------------------------------------------------------------------------

    def link(self, file: str, sha256: str) -> bool:
        """Link a candidate whose SHA-256 is that of the client's file; return whether that was done.

        The checksums of chunks agree by chance once in 2^32 files that differ: they are not enough.
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
                raise CorruptionError(f"{source} is another file than the client's")
            self._files.make_folder(target.parent)
            self._files.link(source, target)
            after = os.lstat(target)
            if (before.st_ino, before.st_mtime_ns) != (after.st_ino, after.st_mtime_ns):
                self._files.unlink(target)
                raise CorruptionError(f"{source} was replaced meanwhile")
        except (OSError, ZstoreError):
            with self.lock:  # then it is to be sent
                if self._candidates.pop(file, None) is not None:
                    self.total_bytes += content.num_bytes
            return False
        return True

    @contextlib.contextmanager
    def writing(self, file: str, offset: int) -> Iterator[Arrival]:
        """Yield the receiver of a file's bytes, from `offset` on; a connection that sends the same file ends with an error.

        Raises CheckpointError if the file does not have `offset` bytes so far, or is whole; 0 always begins again.
        """
        content = self.content_of(file)
        with self.lock:
            self._end_arrival(file)
            arrival = self._arrivals[file] = Arrival(self, file, content, offset)
        part = self._part(file)
        try:
            if self.is_whole(file):
                raise CheckpointError(f"{file} is there already")
            there = self.received(file)
            if offset not in (0, there):
                raise CheckpointError(f"{file} is there up to byte {there}, not {offset}: go on from there")
            with self._files.opened(part, write=True, create=not part.exists(), direct=False) as opened:
                if offset == 0 and there:
                    os.ftruncate(opened.fd, 0)
                arrival.opened = opened
                yield arrival
        finally:
            with self.lock:
                if self._arrivals.get(file) is arrival:
                    del self._arrivals[file]

    def _end_arrival(self, file: str) -> None:
        if (former := self._arrivals.pop(file, None)) is not None:
            former.end()

    def note(self, opened: OpenFile, data: bytes | bytearray, offset: int) -> None:
        """Write bytes of a file that came."""
        self._files.write_from(opened, np.frombuffer(data, np.uint8), offset)
        self.active_at = time.time()
        if self.active_at - self._touched_at > _TOUCH_S:
            self.touch()
        self.progress(len(data))

    def take(self, file: str, content: Content, opened: OpenFile) -> None:
        """Make a file that came whole durable, check it, and give it its name.

        Raises CorruptionError, and drops it, if it is wrong.
        """
        part, target = self._part(file), self.checkpoint / file
        self._files.sync_data(opened)
        try:
            if isinstance(content, ShardContent):
                verify_shard(part, content.array, content.shard, content.crcs)
            elif file_sha256(part) != content.sha256:
                raise CorruptionError(f"{file} fails its SHA-256")
        except CorruptionError as error:
            self._files.unlink(part)
            self.progress(-content.num_bytes)
            raise CorruptionError(f"{file} did not arrive as it was sent, and was dropped: {error}") from error
        make_read_only(part)
        self._files.make_folder(target.parent)
        self._files.rename(part, target)

    def require_whole(self) -> None:
        """Raise CheckpointMismatchError that names files which are missing."""
        self.plan()
        if missing := self.missing():
            names = ", ".join(each.path for each in missing[:3])
            raise CheckpointMismatchError(f"{len(missing)} files are not there yet: {names}: send them, then commit")

    @property
    def num_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(content.num_bytes for content in self._contents().values())

    def linked_bytes(self) -> int:
        """Return the bytes of shard files that are links."""
        return sum(
            content.num_bytes
            for file, content in self.plan().shards.items()
            if os.stat(self.checkpoint / file).st_nlink > 1
        )


class Arrival:
    """Takes the bytes of one file as they come over a connection, from `offset` on; a later connection takes its place."""

    opened: OpenFile

    def __init__(self, upload: Upload, file: str, content: Content, offset: int) -> None:
        self._upload, self._file, self._content = upload, file, content
        self._lock = threading.Lock()
        self._ended = False
        self.offset = offset
        """Bytes of the file that are there."""
        self.most = content.num_bytes

    def write(self, data: bytes | bytearray) -> None:
        """Write the next bytes. Raises UsageError for more bytes than the file has, DiskFullError if there is no room."""
        if self.offset + len(data) > self.most:
            raise UsageError(f"{self._file} has {self.most} bytes, more were sent")
        with self._going_on():
            self._upload.note(self.opened, data, self.offset)
            self.offset += len(data)

    def finish(self) -> bool:
        """Return whether the file is whole now: then it is durable, and was checked. See `Upload.take`."""
        if self.offset < self.most:
            return False
        with self._going_on():
            self._upload.take(self._file, self._content, self.opened)
        return True

    def end(self) -> None:
        """Refuse the bytes that still come."""
        with self._lock:
            self._ended = True

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        with self._lock:
            if self._ended:
                raise CheckpointError(f"another connection sends {self._file}, or the upload was given up")
            yield
