"""Saving to a URL, behind training: ranks share the URL and a board for messages, and no folder.

[Note: a save to a URL]
On every rank, in one background thread and without collectives:
    1  its shard files come into a folder of its own: links of the run's files, or written from memory; each pin is released
    2  it posts its rows of the arrays that other ranks store (see [Note: pieces]), and its manifest
    3  once rank 0 has begun the upload, it sends its files, and posts `sent-<rank>`
Rank 0 asks first whether the tag is free; it gathers the manifests, writes metadata and record, and posts `begin`. Once all
have sent it commits, and posts `end`. A rank that fails posts `failed`, and rank 0 then `abort`, with the reason. Whatever
happens, each rank removes its folder; those of killed processes go with the next save.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from ..checkpoint.build import CheckpointBuilder
from ..checkpoint.catalog import TagInfo
from ..checkpoint.commit import Committer, sweep
from ..checkpoint.folder import LocalFolder
from ..checkpoint.format import COMPLETE, decode_state, encode_state
from ..checkpoint.handle import SaveHandle
from ..checkpoint.names import RECORD_FILE, manifest_file
from ..checkpoint.pieces import Pieces
from ..checkpoint.publish import Publisher
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.request import SaveRequest, SaveSummary
from ..errors import CheckpointError
from ..io.pool import Workers
from ..io.shards import ShardSummary
from ..ranks.rendezvous import MOST_PAUSE_S, Board, Rendezvous
from .retries import PATIENT, Retries
from .target import NUM_THREADS
from .upload import UploadPlace, target_for
from .uploaded import common_files

_END_S = 30.0
"""How long rank 0 waits for the other ranks to stop sending, once it gave up."""


@dataclass(frozen=True, kw_only=True)
class UploadOptions:
    """The target of a save, and the board of its ranks."""

    folder: UploadPlace
    board: Board | None = None
    """None: there is one rank."""
    retries: Retries = PATIENT
    num_threads: int = NUM_THREADS
    """Files that a rank uploads at a time."""


def save_to_url(request: SaveRequest, options: UploadOptions) -> SaveHandle:
    """Begin to save to a URL in the background; return the handle. `request.folder` is for this rank's files on their way.

    The pins belong to the save from now on, even if this raises: it releases them. Raises UsageError for a bad request or
    state that is not JSON, StorageError for a folder that cannot be written, DiskFullError if it has no room for this rank's
    files. Whether the tag is free is asked at the URL, behind the call.
    """
    job: _RemoteSave | None = None
    handle: SaveHandle | None = None
    try:
        job = _RemoteSave(request, options)
        job.check()
        handle = SaveHandle(job)
        return handle.start()
    except BaseException as error:
        if handle is not None and handle.begun:
            raise  # interrupted as it began: the end of the program completes it
        if job is not None:
            job.tell_others(error)
            job.workers.close()
        for pin in request.pins.values():
            pin.release()
        raise


class _RemoteSave:
    """One rank's part in a save. See [Note: a save to a URL]."""

    def __init__(self, request: SaveRequest, options: UploadOptions) -> None:
        request.check()
        self._request = request
        self._files = request.resources.files
        # Copying also finds values that are not JSON before anything is written.
        self._rank_state = decode_state(encode_state(request.rank_state, "rank_state"))
        self._state = decode_state(encode_state(request.record, "record"))
        own = hashlib.sha256(f"{request.save_id} {request.rank}".encode()).hexdigest()[:32]
        self._place = Committer(self._files, request.folder, request.tag, own)
        self._folder = self._place.temporary
        self._cancelled = threading.Event()
        self._board = options.board
        self._rendezvous = Rendezvous(
            Path(request.save_id), self._files, self._check_alive, pause=self._cancelled.wait, board=options.board
        )
        self._builder = CheckpointBuilder(request, self._folder, self._files)
        self._publisher = Publisher(request, self._builder, self._check_alive)
        self._pieces = Pieces(request, self._folder)
        retries = replace(options.retries, cancelled=self._cancelled)
        self._target = target_for(
            options.folder, retries, tag=request.tag, save_id=request.save_id, run_id=request.run_id
        )
        self._messages: list[str] = []
        self._others_bytes = 0
        """Bytes that the other ranks sent (rank 0)."""
        self._started = time.monotonic()
        self.workers = Workers(options.num_threads, f"zstore-upload-{request.rank}")

    @property
    def title(self) -> str:
        return f"the save to {self._target.location}"

    def cancel(self) -> None:
        self._cancelled.set()

    def check(self) -> None:
        """Check all that can be checked at once."""
        request = self._request
        if request.world_size > 1 and self._board is None:
            raise CheckpointError("a save of several ranks to a URL needs a board for their messages")
        self._builder.check_names()
        self._files.make_folder(request.folder)
        sweep(self._files, request.folder)
        request.check_room(request.folder, num_ranks=1)

    def run(self) -> SaveSummary:
        """Carry the save out. Called once, by the save's thread."""
        told = self._request.told
        try:
            with self.workers as workers:
                summary = self._run(workers)
        except BaseException as error:
            failure = error
            if isinstance(error, OSError) and not isinstance(error, CheckpointError):
                where = self._target.location
                failure = CheckpointError(f"checkpoint {self._request.tag!r} was not saved to {where}: {error}")
            if told is not None:
                told(failure)
            if failure is error:
                raise
            raise failure from error
        if told is not None:
            told(summary)
        return summary

    def _run(self, workers: Workers) -> SaveSummary:
        request = self._request
        try:
            self._place.begin()
            if request.rank == 0:
                self._messages += self._target.begin(overwrite=request.overwrite, replaces_own=True, keep=request.keep)
            summaries = self._write(workers)
            part = self._lead if request.rank == 0 else self._follow
            nbytes = part(workers, {request.shard_path(s.array, s.shard): s.file_bytes for s in summaries})
        except BaseException as error:
            self.tell_others(error)
            raise
        finally:
            for pin in request.pins.values():
                pin.release()
            self._place.abort("", alone=True)
        return self._summarise(summaries, nbytes)

    # -- each rank --------------------------------------------------------------------------------------------------

    def _write(self, workers: Workers) -> list[ShardSummary]:
        """Write this rank's files into its folder, and post what others need of them."""
        request, pieces, publisher = self._request, self._pieces, self._publisher
        found = workers.run(chain(pieces.tasks(), publisher.tasks()), here=True)
        summaries = [summary for summary in found if summary is not None]
        if self._board is not None:
            for path in pieces.for_others():
                self._board.post(self._key(path.name), path.read_bytes())
                self._files.unlink(path)
        for tasks, wanted in (
            (pieces.joining_tasks(publisher.store_joined), pieces.awaited),
            (pieces.assembly_tasks(publisher.store_joined) if request.rank == 0 else [], pieces.of_others),
        ):
            if tasks:
                self._fetch(wanted())
                summaries += chain.from_iterable(workers.run(tasks, here=True))
        self._builder.write_manifest(request.rank, COMPLETE, summaries, self._rank_state, sync=False)
        if self._board is not None and request.rank:
            path = self._folder / manifest_file(request.rank)
            self._board.post(self._key(path.name), path.read_bytes())
        return summaries

    def _key(self, name: str) -> str:
        return f"{self._request.save_id}/{name}"

    def _fetch(self, paths: Iterable[Path]) -> None:
        """Write files that other ranks post into this rank's folder, those that are not there."""
        for path in paths:
            if self._board is not None and not path.exists():
                self._files.write_small(path, self._receive(self._board, path.name), sync=False)

    def _receive(self, board: Board, name: str) -> bytes:
        """Return what another rank posts under a name, and remove it."""
        key, found = self._key(name), list[bytes]()

        def came() -> bool:
            found.extend(data for data in [board.read(key)] if data is not None)
            return bool(found)

        timeout_s = self._request.timeout_s
        self._rendezvous.wait_until(came, timeout_s, lambda: f"no rank posted {name} within {timeout_s} s")
        board.remove(key)
        return found[0]

    def _send(self, workers: Workers, files: Mapping[str, int]) -> int:
        def advance(nbytes: int) -> None:
            if nbytes > 0:
                self._check_alive()

        return self._target.send(workers, self._folder, files, advance, rank=self._request.rank)

    def _wait_for(self, name: str, what: str) -> dict[str, Any]:
        timeout_s = self._request.timeout_s
        self._rendezvous.wait_until(
            lambda: self._rendezvous.posted(name) is not None, timeout_s, lambda: f"{what} within {timeout_s} s"
        )
        return self._rendezvous.posted(name) or {}

    def _follow(self, workers: Workers, files: Mapping[str, int]) -> int:
        rank = self._request.rank
        self._target.join(self._wait_for("begin", "rank 0 did not begin the upload"))
        nbytes = self._send(workers, files)
        self._rendezvous.post(_sent(rank), {"bytes": nbytes})
        self._wait_for("end", "rank 0 did not commit")
        return nbytes

    # -- rank 0 -----------------------------------------------------------------------------------------------------

    def _lead(self, workers: Workers, files: Mapping[str, int]) -> int:
        request, builder, target = self._request, self._builder, self._target
        self._fetch(self._folder / manifest_file(rank) for rank in self._others)
        builder.collect()
        builder.check_complete()
        workers.run(builder.metadata_tasks(), here=True)
        record = replace(builder.record(self._state), committed_ns=time.time_ns())
        with CheckpointReader(TagInfo(folder=LocalFolder(self._folder), record=record)) as reader:
            if request.before_commit is not None:
                self._messages += request.before_commit(reader)
            self._files.write_small(self._folder / RECORD_FILE, record.encode(), sync=False)
            target.offer(reader)
            self._post("begin", target.ticket())
            nbytes = self._send(workers, {**common_files(reader), **files})
            for rank in self._others:
                self._others_bytes += int(self._wait_for(_sent(rank), f"rank {rank} did not send its part")["bytes"])
            self._check_alive()  # one that failed has posted that first
            self._messages += target.commit(reader)
        self._post("end", {})
        self._messages += target.retire()
        return nbytes

    @property
    def _others(self) -> range:
        return range(1, self._request.world_size)

    def _post(self, name: str, message: Mapping[str, Any]) -> None:
        if self._board is not None:
            self._rendezvous.post(name, message)

    # -- giving up --------------------------------------------------------------------------------------------------

    def tell_others(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed, and why; rank 0 removes what was sent. Never raises."""
        reason = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError, RuntimeError):  # nobody is there to be told
            if self._request.rank:
                self._post("failed", {"reason": f"rank {self._request.rank} could not save its part: {reason}"})
                self._post(_sent(self._request.rank), {"bytes": 0})
                return
            self._post("abort", {"reason": reason})
        if self._request.rank:
            return
        deadline = time.monotonic() + (0 if self._cancelled.is_set() else _END_S)
        while not (ended := self._all_ended()) and time.monotonic() < deadline:
            time.sleep(MOST_PAUSE_S)
        self._target.abort(ended=ended, cancelled=self._cancelled.is_set())

    def _all_ended(self) -> bool:
        with contextlib.suppress(RuntimeError):
            return all(self._rendezvous.posted(_sent(rank)) is not None for rank in self._others)
        return False

    def _check_alive(self) -> None:
        """Raise CheckpointError if the save was given up here or by another rank."""
        if self._cancelled.is_set():
            raise CheckpointError(f"{self.title} was cancelled")
        if self._board is None:
            return
        if self._request.rank == 0:
            if (told := self._rendezvous.posted("failed")) is not None:
                raise CheckpointError(str(told["reason"]))
        elif (told := self._rendezvous.posted("abort")) is not None:
            raise CheckpointError(f"rank 0 gave up {self.title}: {told['reason']}")

    def _summarise(self, summaries: list[ShardSummary], nbytes: int) -> SaveSummary:
        linked = [s for s in summaries if s.linked]
        return SaveSummary(
            path=self._place.target,
            num_files=len(summaries),
            num_linked=len(linked),
            linked_bytes=sum(s.file_bytes for s in linked),
            written_bytes=sum(s.file_bytes for s in summaries if not s.linked),
            all_linked_bytes=self._builder.linked_bytes,
            all_written_bytes=self._builder.written_bytes,
            elapsed_s=time.monotonic() - self._started,
            known={},
            messages=tuple(self._messages),
            url=self._target.location,
            uploaded_bytes=nbytes,
            all_uploaded_bytes=nbytes + self._others_bytes if self._request.rank == 0 else 0,
        )


def _sent(rank: int) -> str:
    return f"sent-{rank:05d}"
