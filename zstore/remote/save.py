"""Saving to a URL, behind training: ranks share the URL and a board for messages, and no folder.

[Note: a save to a URL]
On every rank, in one background thread and without collectives:
    1  its shard files come into a folder of its own: links of the run's files, or written from memory; each pin is released
    2  it posts its rows of the arrays that other ranks store (see [Note: pieces]), and its manifest
    3  once rank 0 has begun the upload, it sends its files, and posts `sent-<rank>`; then `seen-<rank>`, once it sees `end`
Rank 0 asks first whether the tag is free; it gathers the manifests, writes metadata and record, and posts `begin`. Once all
have sent it commits, and posts `end`. A rank that fails posts `failed`, with the reason, and all others give up: each posts
that it sends no more, and rank 0 removes the files that were sent. Whatever happens, each rank removes its folder; those of
killed processes go with the next save.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from ..checkpoint.catalog import TagInfo
from ..checkpoint.commit import sweep
from ..checkpoint.folder import LocalFolder
from ..checkpoint.format import COMPLETE
from ..checkpoint.handle import SaveHandle
from ..checkpoint.names import RECORD_FILE, manifest_file
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.request import SaveRequest, SaveSummary
from ..checkpoint.save import Save, begin_save
from ..errors import CheckpointError
from ..io.pool import Workers
from ..io.shards import ShardSummary
from ..ranks.rendezvous import MOST_PAUSE_S, Board
from .target import NUM_THREADS, files_here
from .upload import UploadPlace, target_for
from .url import PATIENT, Retries

_END_S = 30.0
"""How long rank 0 waits for the other ranks to stop sending, once it gave up, and to see that it committed."""


def save_to_url(
    request: SaveRequest, place: UploadPlace, board: Board | None = None, *, retries: Retries = PATIENT
) -> SaveHandle:
    """Begin to save to a URL in the background; return the handle. `request.folder` is for this rank's files on their way,
    `board` has the messages of its ranks; None: there is one.

    The pins belong to the save from now on, even if this raises: it releases them. Raises UsageError for a bad request or
    state that is not JSON, StorageError for a folder that cannot be written, DiskFullError if it has no room for this rank's
    files. Whether the tag is free is asked at the URL, behind the call.
    """
    return begin_save(request, lambda: _RemoteSave(request, place, board, retries))


class _RemoteSave(Save):
    """One rank's part in a save. See [Note: a save to a URL]."""

    def __init__(self, request: SaveRequest, place: UploadPlace, board: Board | None, retries: Retries) -> None:
        own = hashlib.sha256(f"{request.save_id} {request.rank}".encode()).hexdigest()[:32]
        super().__init__(request, own, NUM_THREADS, board, request.save_id)
        self._board = board
        retries = replace(retries, cancelled=self._cancelled)
        self._target = target_for(place, retries, tag=request.tag, save_id=request.save_id, run_id=request.run_id)
        self._others_bytes = 0
        """Bytes that the other ranks sent (rank 0)."""

    @property
    def title(self) -> str:
        return f"the save to {self._target.location}"

    def check(self) -> None:
        request = self._request
        if request.world_size > 1 and self._board is None:
            raise CheckpointError("a save of several ranks to a URL needs a board for their messages")
        self._builder.check_names()
        self._files.make_folder(request.folder)
        sweep(self._files, request.folder)
        request.check_room(request.folder, num_ranks=1)

    def _run(self) -> SaveSummary:
        request = self._request
        try:
            with self.workers as workers:
                self._committer.begin()
                if request.rank == 0:
                    overwrite, keep = request.overwrite, request.keep
                    self._messages += self._target.begin(overwrite=overwrite, replaces_own=True, keep=keep)
                summaries = self._write(workers)
                nbytes = self._follow(workers, summaries) if request.rank else self._lead(workers)
        except BaseException as error:
            self.give_up(error)
            if isinstance(error, OSError) and not isinstance(error, CheckpointError):
                text = f"checkpoint {request.tag!r} was not saved to {self._target.location}: {error}"
                raise CheckpointError(text) from error
            raise
        finally:
            for pin in request.pins.values():
                pin.release()
            self._committer.abort("", alone=True)
        return replace(
            self._summarise(summaries),
            known={},
            url=self._target.location,
            uploaded_bytes=nbytes,
            all_uploaded_bytes=nbytes + self._others_bytes if request.rank == 0 else 0,
        )

    # -- each rank --------------------------------------------------------------------------------------------------

    def _write(self, workers: Workers) -> list[ShardSummary]:
        """Write this rank's files into its folder, and post what others need of them."""
        request, pieces, publisher = self._request, self._pieces, self._publisher
        found = workers.run(chain(pieces.tasks(), publisher.tasks()), here=True)
        summaries = [summary for summary in found if summary is not None]
        if request.rank == 0:
            self._fetch(pieces.all_files())
            summaries += chain.from_iterable(workers.run(pieces.assembly_tasks(publisher.store_whole), here=True))
        elif self._board is not None:
            for path in pieces.own_files():
                self._board.post(self._key(path.name), path.read_bytes())
                self._files.unlink(path)
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

        self._wait_until(came, f"no rank posted {name}")
        board.remove(key)
        return found[0]

    def _send(self, workers: Workers, files: Mapping[str, int]) -> int:
        def advance(nbytes: int) -> None:
            if nbytes > 0:
                self._check_alive()

        return self._target.send(workers, self._folder, files, advance, rank=self._request.rank)

    def _follow(self, workers: Workers, summaries: Sequence[ShardSummary]) -> int:
        files = {self._request.shard_path(s.array, s.shard): s.file_bytes for s in summaries}
        self._target.join(self._wait_for("begin", "rank 0 did not begin the upload"))
        nbytes = self._send(workers, files)
        self._post(self._own("sent"), {"bytes": nbytes})
        self._wait_for("end", "rank 0 did not commit")
        self._post(self._own("seen"), {})
        return nbytes

    # -- rank 0 -----------------------------------------------------------------------------------------------------

    def _lead(self, workers: Workers) -> int:
        request, builder, target = self._request, self._builder, self._target
        others = range(1, request.world_size)
        self._fetch(self._folder / manifest_file(rank) for rank in others)
        builder.collect()
        builder.check_complete()
        workers.run(builder.metadata_tasks(), here=True)
        record = replace(builder.record(self._state), committed_ns=time.time_ns())
        with CheckpointReader(TagInfo(folder=LocalFolder(self._folder), record=record)) as reader:
            if request.before_commit is not None:
                self._messages += request.before_commit(reader)
            self._files.write_small(self._folder / RECORD_FILE, record.encode(), sync=False)
            self._post("begin", target.offer(reader))
            nbytes = self._send(workers, files_here(reader))
            for rank in others:
                sent = self._wait_for(f"sent-{rank}", f"rank {rank} did not send its part")
                self._others_bytes += int(sent["bytes"])
            self._check_alive()  # one that failed has posted that first
            self._messages += target.commit(reader)
        self._post("end", {})
        self._all_posted("seen")  # the board may end with this process
        return nbytes

    # -- messages ---------------------------------------------------------------------------------------------------

    def _post(self, name: str, message: Mapping[str, Any]) -> None:
        if self._board is not None:
            self._rendezvous.post(name, message)

    def _wait_for(self, name: str, what: str) -> dict[str, Any]:
        self._wait_until(lambda: self._rendezvous.posted(name) is not None, what)
        return self._rendezvous.posted(name) or {}

    def _wait_until(self, ready: Callable[[], bool], what: str) -> None:
        timeout_s = self._request.timeout_s
        self._rendezvous.wait_until(ready, timeout_s, lambda: f"{what} within {timeout_s} s")

    def _check_alive(self) -> None:
        if self._cancelled.is_set():
            raise CheckpointError(f"{self.title} was cancelled")
        failed = None if self._board is None else self._rendezvous.posted("failed")
        if failed is not None and failed["rank"] != self._request.rank:
            raise CheckpointError(f"rank {failed['rank']} gave up {self.title}: {failed['reason']}")

    def give_up(self, error: BaseException) -> None:
        """Rank 0 removes the files that were sent, too."""
        rank = self._request.rank
        with contextlib.suppress(OSError, RuntimeError):  # nobody is there to be told
            if self._board is not None and self._rendezvous.posted("failed") is None:
                self._post("failed", {"rank": rank, "reason": f"{type(error).__name__}: {error}"})
            if rank:
                self._post(self._own("sent"), {"bytes": 0})
        if rank == 0:
            self._target.discard(ended=self._all_posted("sent"), cancelled=self._cancelled.is_set())

    def _own(self, kind: str) -> str:
        return f"{kind}-{self._request.rank}"

    def _all_posted(self, kind: str) -> bool:
        """Wait a while until each other rank posted such a message; return whether they did (rank 0)."""
        deadline = time.monotonic() + _END_S
        others = range(1, self._request.world_size)
        with contextlib.suppress(OSError, RuntimeError):
            while not all(self._rendezvous.posted(f"{kind}-{rank}") is not None for rank in others):
                if self._cancelled.wait(MOST_PAUSE_S) or time.monotonic() > deadline:
                    return False
            return True
        return False
