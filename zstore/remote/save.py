"""Saving to a URL: a local commit first, then its upload, both behind training.

[Note: who uploads what]
The save into the local folder is the usual one, and so are its errors. Then every rank uploads the shard files that it wrote,
rank 0 the others too, and rank 0 commits. As in a local save there are no collectives; ranks see each other through
`<tag>.tmp-<upload id>/` in the local folder, which rank 0 holds a lock for:

    begin.json              by rank 0, once the local checkpoint is committed: the facts about the upload that the others need
    rank-00001.json         by each other rank, last: that its files are there and the facts that rank 0 needs, or why not
    abort.json              by rank 0: that the upload was given up, and why
    end.json                by rank 0: that it is committed

Once it is committed, rank 0 removes that folder; the others see the record at the URL. Then the local checkpoint is removed,
unless it is to be kept. If anything fails, it stays, and the error of each rank names its folder.

If machines have no folder in common (`request.parts`), the local checkpoint is in parts, and ranks leave these messages for
each other in the store of the process group; the first rank of each machine removes its part.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from dataclasses import dataclass, replace

from ..checkpoint.catalog import noting
from ..checkpoint.commit import discard
from ..checkpoint.handle import SaveHandle
from ..checkpoint.lock import SaveLock, owner_is_dead
from ..checkpoint.names import ABORT_FILE, LOCK, TEMPORARY, own_name, tag_folder
from ..checkpoint.reader import CheckpointReader, open_checkpoint
from ..checkpoint.request import SaveRequest, SaveSummary
from ..checkpoint.save import save_checkpoint
from ..errors import CheckpointError
from ..io.pool import Workers
from ..ranks.rendezvous import MOST_PAUSE_S, Board, Rendezvous, StoreBoard
from .retries import PATIENT, Retries
from .target import NUM_THREADS
from .upload import UploadPlace, target_for

_BEGIN_FILE = "begin.json"
_END_FILE = "end.json"
_COMPLETE = "complete"
_SEE_FOLDER_S = 60.0
_END_S = 30.0
"""How long rank 0 waits for the other ranks to stop sending, once it gave up."""


@dataclass(frozen=True, kw_only=True)
class UploadOptions:
    """The target of a save's upload, and the fate of the local copy."""

    folder: UploadPlace
    keep_local: bool = False
    """Keep the local checkpoint after the upload."""
    retries: Retries = PATIENT
    num_threads: int = NUM_THREADS
    """Files that a rank uploads at a time."""


def save_to_url(request: SaveRequest, options: UploadOptions) -> SaveHandle:
    """Begin to save into the local folder of `request` and to upload that; return the handle.

    See `save_checkpoint` for the errors that are raised at once, and for the pins. `request.keep` holds for the URL as well;
    whether the tag is free is asked there, behind the call.
    """
    # The local folder is only a stop on the way: a checkpoint that a failed upload left there may be replaced.
    local = save_checkpoint(replace(request, overwrite=request.overwrite or not options.keep_local))
    return SaveHandle(_Upload(request, options, local)).start()


class _Upload:
    """The save and upload of one rank."""

    def __init__(self, request: SaveRequest, options: UploadOptions, local: SaveHandle) -> None:
        self._request = request
        self._options = options
        self._local = local
        self._cancelled = threading.Event()
        self._folder = options.folder
        self._files = request.resources.files
        upload_id = hashlib.sha256(f"upload {request.save_id}".encode()).hexdigest()[:32]
        name = tag_folder(request.tag)
        folder = request.folder / own_name(name, TEMPORARY, upload_id)
        self._board: Board | None = None
        if request.parts is not None:
            self._board = StoreBoard("/uploads")
        self._rendezvous = Rendezvous(
            folder, self._files, self._check_alive, pause=self._cancelled.wait, board=self._board
        )
        self._sent: set[int] = set()
        """Other ranks whose files are there (rank 0)."""
        self._others_bytes = 0
        """Bytes that they uploaded."""
        self._lock_path = request.folder / own_name(name, LOCK, upload_id)
        retries = replace(options.retries, cancelled=self._cancelled)
        self._target = target_for(
            self._folder, retries, tag=request.tag, save_id=request.save_id, run_id=request.run_id
        )
        self._messages: list[str] = []
        self._started = time.monotonic()
        self.location = self._target.location
        self._workers = Workers(options.num_threads, f"zstore-upload-{request.rank}")

    @property
    def title(self) -> str:
        return f"the upload to {self.location}"

    def cancel(self) -> None:
        self._cancelled.set()
        self._local.cancel()

    def run(self) -> SaveSummary:
        """Carry the save and the upload out. Called once, by the upload's thread."""
        told = self._request.told
        try:
            with self._workers as workers:
                summary = self._lead(workers) if self._request.rank == 0 else self._follow(workers)
        except BaseException as error:
            self._local.cancel()
            failure = self._failure(error)
            if told is not None and failure is not error:  # otherwise the local save told of it
                told(failure)
            raise failure from error
        if told is not None:
            told(summary)
        return summary

    def _failure(self, error: BaseException) -> BaseException:
        """Return `error`, or one that also names the local checkpoint, if there is one."""
        try:
            path = self._local.wait().path
        except BaseException:
            return error  # the local save failed, and nothing was uploaded
        return CheckpointError(
            f"checkpoint {self._request.tag!r} was not uploaded to {self._folder}: {error}. It is committed in {path}, "
            f"and stays there: upload it with `zstore reshard {path} --to {self._folder}`, or remove it"
        )

    # -- rank 0 -----------------------------------------------------------------------------------------------------

    def _lead(self, workers: Workers) -> SaveSummary:
        with SaveLock(self._lock_path):
            try:
                if self._board is None:
                    self._files.make_folder(self._rendezvous.folder)
                # While the local save runs.
                self._messages += self._target.begin(
                    overwrite=self._request.overwrite, replaces_own=True, keep=self._request.keep
                )
                summary = self._local.wait()
                with open_checkpoint(summary.path) as reader:
                    self._target.offer(reader)
                    self._rendezvous.post(_BEGIN_FILE, self._target.ticket())
                    nbytes = self._send(workers, reader)
                    self._rendezvous.wait_until(self._all_sent, self._request.timeout_s, self._ranks_missing)
                    self._messages += self._target.commit(reader)
                if self._board is not None:
                    self._rendezvous.post(_END_FILE, {})
                self._clean_up(summary)
                self._messages += self._target.retire()
                return self._summarise(summary, nbytes, nbytes + self._others_bytes)
            except BaseException as error:
                self._give_up(error)
                raise

    def _all_sent(self) -> bool:
        """Return whether every other rank's files are there; raises CheckpointError if one says that they are not."""
        for rank, outcome in self._outcomes().items():
            if outcome != _COMPLETE:
                raise CheckpointError(f"rank {rank} could not upload its part: {outcome}")
        return not self._missing()

    def _outcomes(self) -> dict[int, str]:
        """Return how the parts of other ranks ended that did since the last call."""
        found: dict[int, str] = {}
        for rank in self._missing():
            if (told := self._rendezvous.posted(_rank_file(rank))) is not None:
                found[rank] = str(told.get("outcome"))
                self._sent.add(rank)
                if found[rank] == _COMPLETE:
                    self._others_bytes += int(told["uploaded_bytes"])
                    self._target.accept(told["receipt"])
                    self._rendezvous.post(_rank_file(rank), {})  # of thousands, it may be large
        return found

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._request.world_size) if rank not in self._sent]

    def _ranks_missing(self) -> str:
        return f"ranks {self._missing()[:20]} did not upload their part within {self._request.timeout_s} s"

    def _clean_up(self, summary: SaveSummary) -> None:
        """Do the work that may fail without harm to the checkpoint, which is committed at the URL."""
        with noting(self._messages, "the checkpoint is uploaded, but its local copy could not be removed"):
            if self._board is None:
                self._files.remove_tree(self._rendezvous.folder)
            if not self._options.keep_local:
                discard(self._files, summary.path)

    def _give_up(self, error: BaseException) -> None:
        """Tell the other ranks why the upload ended, and remove its files once none of them writes any more.

        Never raises; the next save removes the leftovers.
        """
        with contextlib.suppress(OSError, RuntimeError):
            self._rendezvous.post(ABORT_FILE, {"reason": f"{type(error).__name__}: {error}"})
        self._local.cancel()
        patient = self._target.waits_for_ranks or not self._cancelled.is_set()
        deadline = time.monotonic() + (_END_S if patient else 0)
        with contextlib.suppress(RuntimeError):  # of a board: nobody is there
            while self._missing() and time.monotonic() < deadline:
                self._outcomes()
                time.sleep(MOST_PAUSE_S)
        ended = not self._missing()
        self._target.abort(ended=ended, cancelled=self._cancelled.is_set())
        if self._request.world_size == 1:
            with contextlib.suppress(OSError):
                self._files.remove_tree(self._rendezvous.folder)

    # -- the other ranks --------------------------------------------------------------------------------------------

    def _follow(self, workers: Workers) -> SaveSummary:
        rank = self._request.rank
        try:
            summary = self._wait_for_local()
            if self._board is None:
                self._rendezvous.wait_until(
                    self._rendezvous.folder.is_dir, min(_SEE_FOLDER_S, self._request.timeout_s), self._not_begun
                )
            self._rendezvous.wait_until(
                lambda: self._rendezvous.posted(_BEGIN_FILE) is not None, self._request.timeout_s, self._not_begun
            )
            self._target.join(self._rendezvous.posted(_BEGIN_FILE) or {})
            with open_checkpoint(summary.path) as reader:
                nbytes = self._send(workers, reader)
        except BaseException as error:
            with contextlib.suppress(OSError, RuntimeError):
                self._rendezvous.post(_rank_file(rank), {"outcome": f"{type(error).__name__}: {error}"})
            raise
        told = {"outcome": _COMPLETE, "uploaded_bytes": nbytes, "receipt": self._target.receipt()}
        self._rendezvous.post(_rank_file(rank), told)
        timeout_s = self._request.timeout_s
        self._rendezvous.wait_until(self._is_over, timeout_s, lambda: f"rank 0 did not commit within {timeout_s} s")
        if self._board is not None and self._request.leads:
            self._clean_up(summary)
        return self._summarise(summary, nbytes)

    def _wait_for_local(self) -> SaveSummary:
        try:
            return self._local.wait()
        except CheckpointError:
            self._check_alive()  # rank 0 may have cancelled it because of the upload: it knows why
            raise

    def _is_over(self) -> bool:
        """Return whether rank 0 committed; raises CheckpointError if it ended without doing so."""
        if self._board is not None:
            return self._rendezvous.posted(_END_FILE) is not None
        if self._rendezvous.folder.is_dir():
            return False
        if not self._target.is_committed():
            raise CheckpointError("rank 0 ended without committing it")
        return True

    def _not_begun(self) -> str:
        return f"rank 0 did not begin the upload: {self._rendezvous.folder} is not seen"

    # -- all ranks --------------------------------------------------------------------------------------------------

    def _send(self, workers: Workers, reader: CheckpointReader) -> int:
        def advance(nbytes: int) -> None:
            if nbytes > 0:
                self._check_alive()

        return self._target.send(workers, reader, [self._request.rank], advance)

    def _summarise(self, summary: SaveSummary, uploaded_bytes: int, all_uploaded_bytes: int = 0) -> SaveSummary:
        return replace(
            summary,
            url=self.location,
            uploaded_bytes=uploaded_bytes,
            all_uploaded_bytes=all_uploaded_bytes,
            elapsed_s=time.monotonic() - self._started,
            messages=(*summary.messages, *self._messages),
        )

    def _check_alive(self) -> None:
        """Raise CheckpointError if the upload was given up here or by rank 0, or rank 0 is gone."""
        if self._cancelled.is_set():
            raise CheckpointError("it was cancelled")
        if self._request.rank == 0 or (self._board is None and not self._rendezvous.folder.is_dir()):
            return
        if (told := self._rendezvous.posted(ABORT_FILE)) is not None:
            raise CheckpointError(f"rank 0 gave it up: {told.get('reason')}")
        if self._board is not None:
            return
        with owner_is_dead(self._lock_path) as dead:
            ended = dead
        if ended and self._rendezvous.folder.is_dir():
            told = self._rendezvous.posted(ABORT_FILE) or {"reason": "it ended"}
            raise CheckpointError(f"rank 0 gave it up: {told.get('reason')}")


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"
