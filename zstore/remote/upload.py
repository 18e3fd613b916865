"""Saving to a URL in the background, by ranks that share the URL and a board for messages but no folder; and uploading a
committed local checkpoint.

[Note: a save to a URL]
On every rank, in one background thread and without collectives:
    1  it puts its shard files into a local folder: links of the run's files, or written from memory; each pin is released
    2  it posts its rows of the arrays that rank 0 stores (see [Note: pieces]), and its manifest
    3  once rank 0 has begun the upload, it sends its files and posts `sent-<rank>`; then `seen-<rank>`, once it sees `end`
Rank 0 gathers the manifests, writes metadata and record, checks that the tag is free, and posts `begin`. Once all ranks have
sent, it commits and posts `end`. A rank that fails posts `failed` with the reason, and all others abort: each posts that it
sends no more, and rank 0 removes the files sent. In any case each rank removes its local folder; killed processes' folders
are removed by the next save.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from ..checkpoint.catalog import TagInfo
from ..checkpoint.commit import sweep
from ..checkpoint.folder import FolderLike
from ..checkpoint.format import Record
from ..checkpoint.layout import RECORD_FILE, manifest_file, tag_folder
from ..checkpoint.part import SaveRequest, SaveSummary
from ..checkpoint.reader import CheckpointReader, open_checkpoint
from ..checkpoint.save import Save, SaveHandle, begin_save
from ..errors import BudgetError, CheckpointError
from ..io.machine import Workers
from ..io.shards import ShardSummary
from ..ranks.board import Board
from .bucket import PATIENT, BucketFolder, Retries, part_bytes
from .service import ServiceFolder, UploadPlace
from .target import NUM_THREADS, Advance, BucketTarget, ServiceTarget, local_files

T = TypeVar("T")
Target = BucketTarget | ServiceTarget

_END_TIMEOUT_S = 30.0
"""How long rank 0 waits for the other ranks to stop sending after an abort, and to see its commit."""
_END_PAUSE_S = 0.1
_MAX_PART_COPIES = 4
"""Copies of a part in memory: as read, in the file's buffer, in the request, and perhaps once more when it is sent."""


def require_uploads(url: str, storage_options: Mapping[str, Any] | None = None) -> None:
    """Raise StorageError, or UsageError, if nothing can be uploaded to a URL. Removes the file that it writes as a test."""
    folder = UploadPlace(url, storage_options).open(Retries())
    if isinstance(folder, ServiceFolder):
        folder.connection.ask("GET", f"/api/uploads?run={quote(folder.run, safe='')}")
    else:
        probe = f".probe-{uuid.uuid4().hex}"
        folder.write_small(probe, b"")
        folder.remove(probe)


def target_in(folder: BucketFolder | ServiceFolder, tag: str, save_id: str, run_id: str) -> Target:
    """Return the target of a save of training run `run_id` under `tag` in an open `UploadPlace`."""
    return (
        ServiceTarget(folder, tag) if isinstance(folder, ServiceFolder) else BucketTarget(folder, tag, save_id, run_id)
    )


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

    The URL may be a run's in a service of zstore. `source` is the checkpoint's folder, or the folder above (then the newest).
    Returns the URL of the tag's folder, and messages for the user. Blocks until it is committed; `advance` is called with the
    bytes of each file that has arrived. `memory_bytes` bounds the parts in memory (None: those of `NUM_THREADS` files) by
    sending fewer files at once. Raises CheckpointExistsError for an existing tag (unless `overwrite`), BudgetError if one
    file's parts exceed it, StorageError if the upload fails; nothing of it is visible then.
    """
    place = UploadPlace(url, storage_options)
    with CheckpointReader(source) if isinstance(source, TagInfo) else open_checkpoint(source) as reader:
        folder, files = place.open(PATIENT), local_files(reader)
        num_threads = NUM_THREADS
        if memory_bytes is not None and isinstance(folder, BucketFolder):
            part = part_bytes(max(files.values()))
            num_threads = min(NUM_THREADS, memory_bytes // (_MAX_PART_COPIES * part))
            if num_threads == 0:
                raise BudgetError(
                    f"the largest file is uploaded in parts of {part}, which takes about {_MAX_PART_COPIES * part} bytes of "
                    f"memory, but {memory_bytes} are available: allow more"
                )
        target = target_in(folder, reader.record.tag, reader.record.id, reader.record.run)
        try:
            messages = target.begin(reader, overwrite=overwrite)
            with Workers(num_threads, "zstore-upload") as workers:
                target.send(workers, reader.path, files, advance)
            return target.location, messages + target.commit(reader)
        except BaseException:
            target.discard(ended=True)
            raise


def save_to_url(
    request: SaveRequest, place: UploadPlace, board: Board | None = None, *, retries: Retries = PATIENT
) -> SaveHandle:
    """Start saving to a URL in the background; return the handle. `request.folder` is for this rank's files until they
    are sent, `board` for the messages between its ranks only; None: a single rank.

    The save takes over the pins, and releases them even if this raises. Raises UsageError for a bad request or state that is
    not JSON, StorageError for a folder that cannot be written, DiskFullError if it has no room for this rank's files. Whether
    the tag is free is checked at the URL, in the background.
    """
    return begin_save(request, lambda: _RemoteSave(request, place, board, retries))


class _RemoteSave(Save):
    """One rank's part in a save. See [Note: a save to a URL]."""

    keeps_local_files = False

    def __init__(self, request: SaveRequest, place: UploadPlace, board: Board | None, retries: Retries) -> None:
        folder_id = hashlib.sha256(f"{request.save_id} {request.rank}".encode()).hexdigest()[:32]
        super().__init__(request, folder_id, NUM_THREADS)
        self._board, self._place, self._retries = board, place, replace(retries, cancelled=self._cancelled)
        self._location = place.location_of(tag_folder(request.tag))
        self._target: Target | None = None
        self._sent_bytes = self._others_bytes = 0
        """Bytes sent by this rank, and by all others (rank 0)."""

    @property
    def title(self) -> str:
        return f"the save to {self._location}"

    def check(self) -> None:
        request = self._request
        if request.world_size > 1 and self._board is None:
            raise CheckpointError("a save of several ranks to a URL needs a board for their messages")
        self._part.check_names()
        self._files.make_folder(request.folder)
        sweep(self._files, request.folder)
        request.check_room(request.folder, num_ranks=1)

    def _begin(self) -> None:
        self._committer.begin()
        folder, request = self._place.open(self._retries), self._request
        self._target = target_in(folder, request.tag, request.save_id, request.run_id)

    def _summarise(self, summaries: Sequence[ShardSummary]) -> SaveSummary:
        sent, own = self._sent_bytes, super()._summarise(summaries)
        total = sent + self._others_bytes if self._request.rank == 0 else 0
        return replace(own, known={}, url=self._location, uploaded_bytes=sent, all_uploaded_bytes=total)

    def _send(self, workers: Workers, files: Mapping[str, int]) -> None:
        rank = self._request.rank
        self._sent_bytes = self._opened.send(workers, self._folder, files, lambda _: self._check_alive(), rank=rank)

    @property
    def _opened(self) -> Target:
        if self._target is None:
            raise RuntimeError("the target of the upload was not opened")
        return self._target

    def _wait_for_commit(self, summaries: Sequence[ShardSummary], workers: Workers) -> None:
        request = self._request
        if self._board is not None:
            for path in (*self._part.pieces_of_rank(), self._folder / manifest_file(request.rank)):
                self._board.post_bytes(path.name, path.read_bytes())
        self._opened.facts = self._wait_for("begin", "rank 0 did not begin the upload")
        self._send(workers, {request.shard_path(s.array, s.shard): s.file_bytes for s in summaries})
        self._post(f"sent-{request.rank}", {"bytes": self._sent_bytes})
        self._wait_for("end", "rank 0 did not commit")
        self._post(f"seen-{request.rank}", {})

    def _collect(self, pieces: bool) -> None:
        other_ranks = range(1, self._request.world_size)
        self._fetch(self._part.all_pieces() if pieces else (self._folder / manifest_file(rank) for rank in other_ranks))
        if not pieces:
            self._part.collect()

    def _fetch(self, paths: Iterable[Path]) -> None:
        """Write the files that other ranks post into this rank's folder."""
        for path in paths:
            if self._board is not None and not path.exists():
                data = self._wait_within(partial(self._board.read_bytes, path.name), f"no rank posted {path.name}")
                self._board.remove(path.name)
                self._files.write_small(path, data, sync=False)

    def _commit(self, record: Record, workers: Workers) -> None:
        request, target = self._request, self._opened
        record = replace(record, committed_ns=time.time_ns())
        with self._reader(record) as reader:
            self._files.write_small(self._folder / RECORD_FILE, record.encode(), sync=False)
            self._messages += target.begin(reader, overwrite=request.overwrite, replaces_own=True, keep=request.keep)
            self._post("begin", target.facts)
            self._send(workers, local_files(reader))
            for rank in range(1, request.world_size):
                sent = self._wait_for(f"sent-{rank}", f"rank {rank} did not send its part")
                self._others_bytes += int(sent["bytes"])
            self._check_alive()  # a rank that failed has posted that first
            self._messages += target.commit(reader)
        self._post("end", {"committed": True})
        self._all_posted("seen")  # the board may end with this process

    def _post(self, name: str, message: Mapping[str, Any]) -> None:
        if self._board is not None:
            self._board.post(name, message)

    def _posted(self, name: str) -> dict[str, Any] | None:
        return None if self._board is None else self._board.read(name)

    def _wait_for(self, name: str, what: str) -> dict[str, Any]:
        return self._wait_within(partial(self._posted, name), what)

    def _wait_within(self, ready: Callable[[], T | None], what: str) -> T:
        return self._wait_until(ready, lambda: f"{what} within {self._request.timeout_s} s")

    def _failed_rank(self) -> tuple[int, str] | None:
        failed = self._posted("failed")
        return None if failed is None or failed["rank"] == self._request.rank else (failed["rank"], failed["reason"])

    def abort(self, error: BaseException) -> None:
        """Notify the other ranks; rank 0 also removes the files that were sent."""
        rank = self._request.rank
        with contextlib.suppress(OSError, RuntimeError):  # the board is lost
            if self._posted("failed") is None:
                self._post("failed", {"rank": rank, "reason": f"{type(error).__name__}: {error}"})
            if rank:
                self._post(f"sent-{rank}", {"bytes": 0})
        if rank == 0:
            ended = self._all_posted("sent")
            if self._target is not None:
                self._target.discard(ended=ended)

    def _raise_root_cause(self, error: BaseException) -> None:
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            text = f"checkpoint {self._request.tag!r} was not saved to {self._location}: {error}"
            raise CheckpointError(text) from error

    def _release(self) -> None:
        self._committer.abort("", is_only_rank=True)

    def _all_posted(self, kind: str) -> bool:
        """Wait up to `_END_TIMEOUT_S` for such a message of each other rank; return whether all have posted it (rank 0)."""
        deadline = time.monotonic() + _END_TIMEOUT_S
        other_ranks = range(1, self._request.world_size)
        with contextlib.suppress(OSError, RuntimeError):
            while not all(self._posted(f"{kind}-{rank}") is not None for rank in other_ranks):
                if self._cancelled.wait(_END_PAUSE_S) or time.monotonic() > deadline:
                    return False
            return True
        return False
