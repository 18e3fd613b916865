"""Saving: every rank publishes its pinned shards in the background, and rank 0 commits.

[Note: who does what]
On every rank, in one background thread and without collectives:
    publish the pins (links or copies), read-only and durable; release each; finally write the manifest.
Rank 0 also creates the temporary folder first, which the others wait for; writes metadata and the small arrays; waits for
every rank's manifest; assembles the arrays that it stores whole (see [Note: pieces]); calls `before_commit`; commits.
The others wait for the commit, so that `wait()` has the same outcome on every rank. A rank that fails reports that in its
manifest; rank 0 then aborts and writes `abort.json` for the others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Self, TypeVar

from ..errors import CheckpointError, DiskFullError
from ..io.closing import Completions, run_non_daemon, wait_until
from ..io.files import Flush
from ..io.machine import Workers, helpful_threads, interleave
from ..io.queue import Ticket, promise
from ..io.shards import ShardSummary
from .catalog import TagInfo, read_record, replaced_text
from .commit import Committer, abort_reason, owner_has_ended, sweep
from .folder import LocalFolder
from .format import COMPLETE, Record, decode_state, encode_state
from .layout import ABORT_FILE, MANIFEST_FOLDER
from .part import RankPart, SaveRequest, SaveSummary
from .reader import CheckpointReader

T = TypeVar("T")

_completions = Completions()
_FOLDER_TIMEOUT_S = 60.0
"""How long a rank waits for the temporary folder that rank 0 creates."""
_RANK_0_CHECK_DELAY_S = 2.0
_MAX_FLUSHED_BYTES = 256 * 1024 * 1024
"""Per rank; above this, fsync of each file is as fast and does not wait for other writers."""
_MAX_SMALL_FILE_THREADS = 3
"""Maximum helper threads for small files: the caller waits for the threads to start."""


class SaveHandle:
    """A running save. The program's exit waits for it, with a non-zero status if it fails and `wait` was never called."""

    def __init__(self, job: Save) -> None:
        self._job = job
        self._cancelled = False
        self.stall_s = 0.0
        """Seconds that training was paused for the save, if an engine made the save."""
        # `wait` uses the ticket instead of joining the thread: when Ctrl-C interrupts a join, Python 3.11 loses the thread.
        self._ticket, self._execute = promise(self._run)
        self._completion = _completions.begin(job.title, self.wait_for_end)

    def start(self) -> Self:
        """Start the save and return this handle. If this raises, as on Ctrl-C, the save may be running: see `has_started`."""
        try:
            run_non_daemon(self._execute, "zstore-save")
        except BaseException:
            if self._ticket.future.cancel():
                _completions.end(self._completion, None)
            raise
        return self

    @property
    def has_started(self) -> bool:
        """Whether the save was handed to its thread."""
        return not self._ticket.future.cancelled()

    def _run(self) -> SaveSummary:
        failure: BaseException | None = None
        try:
            return self._job.run()
        except BaseException as error:
            failure = error
            raise
        finally:
            _completions.end(self._completion, None if self._cancelled else failure)

    @property
    def ticket(self) -> Ticket[SaveSummary]:
        """The save as a ticket to await or wait for."""
        return Ticket(self._ticket.future, partial(_completions.mark_observed, self._completion))

    def wait(self, timeout_s: float | None = None) -> SaveSummary:
        """Return once the checkpoint is committed; raises the save's error, on every rank, or TimeoutError."""
        if not self.wait_for_end(timeout_s):
            raise TimeoutError(f"{self._job.title} is not done after {timeout_s} s")
        return self.ticket.wait()

    def wait_for_end(self, timeout_s: float | None = None) -> bool:
        """Wait until the save has succeeded or failed; return False on a timeout."""
        return self._ticket.wait_for_end(timeout_s)

    def done(self) -> bool:
        """Return whether the save has succeeded or failed."""
        return self._ticket.done()

    def cancel(self) -> None:
        """Abort the save before its next shard, for example because another rank could not begin it; `wait()` then raises."""
        self._cancelled = True
        self._job.cancel()


def save_checkpoint(request: SaveRequest) -> SaveHandle:
    """Start saving in the background and return the handle. See [Note: who does what].

    The save takes ownership of the pins, and releases them even if this raises. Raises before anything is written:
    UsageError for a bad request or state that is not JSON, CheckpointExistsError, StorageError for a folder that is not
    writable, DiskFullError if there is no room. The caller then notifies the other ranks, which `cancel()` their saves.
    """
    return begin_save(request, lambda: Save(request))


def begin_save(request: SaveRequest, make: Callable[[], Save]) -> SaveHandle:
    """Start the save that `make` returns. If that fails, release its pins."""
    job: Save | None = None
    handle: SaveHandle | None = None
    try:
        request.check()
        job = make()
        job.check()
        handle = SaveHandle(job)
        return handle.start()
    except BaseException as error:
        if handle is not None and handle.has_started:
            raise  # interrupted while starting: the save runs, and the program's exit waits for it
        if job is not None:
            job.abort(error)
            job.workers.close()
        for pin in request.pins.values():
            pin.release()
        raise


class Save:
    """The save of one rank, into a folder that all ranks see. See [Note: who does what]."""

    keeps_local_files = True
    """Whether this rank's files remain in its folder, so that they must be made durable."""

    def __init__(self, request: SaveRequest, save_id: str | None = None, num_threads: int | None = None) -> None:
        self._request = request
        self._files = request.resources.files
        # Copies, which also reject values that are not JSON before anything is written.
        self._rank_state = decode_state(encode_state(request.rank_state, "rank_state"))
        self._state = decode_state(encode_state(request.record, "record"))
        self._committer = Committer(self._files, request.folder, request.tag, save_id or request.save_id)
        self._folder = self._committer.temporary
        """The folder that this rank writes to."""
        self._cancelled = threading.Event()
        self._part = RankPart(request, self._folder, self._check_alive)
        self._flush: Flush | None = None
        """Makes this rank's files durable in one flush (on rank 0 during the commit); None: each file is synced separately."""
        self._is_complete = False
        """Whether this rank's part, with its manifest, is complete."""
        self._messages: list[str] = []
        self._started = time.monotonic()
        # Created in the caller's thread: see [Note: endings].
        self.workers = Workers(num_threads or self._useful_threads(), f"zstore-save-{request.rank}")

    def _useful_threads(self) -> int:
        """Return how many helper threads are worthwhile to write this rank's shards and, on rank 0, the metadata."""
        request = self._request
        num_files = len(request.pins) + (2 * len(request.specs) if request.rank == 0 else 0)
        helpers = max(
            helpful_threads(request.written_bytes, 0), min(_MAX_SMALL_FILE_THREADS, helpful_threads(0, num_files))
        )
        return min(request.num_threads, helpers)

    @property
    def title(self) -> str:
        """Name of the save in messages."""
        return f"the save of {self._committer.target}"

    def check(self) -> None:
        """Run every check that can fail before any work starts."""
        request = self._request
        if request.rank:
            return
        self._part.check_names()
        replaced = self._committer.check(overwrite=request.overwrite, run=request.run_id)
        if replaced is not None and not request.overwrite:
            self._messages.append(replaced_text(replaced))
        try:
            request.check_room(request.folder, request.world_size)
        except DiskFullError:
            # Leftovers of dead saves take space. They are swept now only if necessary, otherwise in the background.
            self._messages += sweep(self._files, request.folder)
            request.check_room(request.folder, request.world_size)

    def cancel(self) -> None:
        """Make `run` raise at its next check."""
        self._cancelled.set()

    def run(self) -> SaveSummary:
        """Run the save. Called once, in the save's thread."""
        on_end = self._request.on_end or (lambda _: None)
        try:
            summary = self._summarise(self._run())
        except BaseException as error:
            on_end(error)
            raise
        on_end(summary)
        return summary

    def _run(self) -> list[ShardSummary]:
        request, part = self._request, self._part
        try:
            with self.workers as workers:
                self._begin()
                results = workers.run(self._tasks(), in_caller=True)
                summaries = [summary for summary in results if summary is not None]
                self._sync(workers)
                if request.rank == 0 and request.pieces:
                    self._collect(pieces=True)
                    summaries += chain.from_iterable(workers.run(part.assembly_tasks(), in_caller=True))
                    self._sync(workers)
                sync_now = self.keeps_local_files and (request.rank > 0 or self._flush is None)
                part.write_manifest(request.rank, COMPLETE, summaries, self._rank_state, sync=sync_now)
                self._is_complete = True
                if request.rank == 0:
                    self._finish_as_rank_0(workers)
                else:
                    self._wait_for_commit(summaries, workers)
        except BaseException as error:
            try:
                self._raise_root_cause(error)
            finally:  # afterwards: rank 0 aborts once it is notified, and its abort would mask the real reason
                self.abort(error)
            raise
        finally:
            for pin in request.pins.values():
                pin.release()
            self._release()
        return summaries

    def _begin(self) -> None:
        """Create the folder that this rank writes to, or wait for it."""
        request = self._request
        if request.rank == 0:
            self._committer.begin()
        else:
            # Rank 0 creates this subfolder last, and a rank without rows writes its manifest there immediately.
            manifests = self._folder / MANIFEST_FOLDER
            self._wait_until(manifests.is_dir, self._folder_not_seen_text, min(_FOLDER_TIMEOUT_S, request.timeout_s))
        if request.written_bytes <= _MAX_FLUSHED_BYTES:
            self._flush = Flush.of(self._files, self._folder)

    def _tasks(self) -> Iterator[Callable[[], ShardSummary | None]]:
        tasks = self._part.tasks()
        if self._request.rank:
            return tasks
        # Metadata in between, while the drive writes shards: encoding it first would delay the shards.
        first_tasks = list(islice(tasks, self._request.num_threads))
        return chain(first_tasks, interleave(tasks, self._part.metadata_tasks()))

    def _sync(self, workers: Workers) -> None:
        """Make the written files durable; rank 0 leaves this to the commit if one flush is enough."""
        if self._flush is not None:
            if self._request.rank:
                self._flush.sync()
        elif self.keeps_local_files:
            is_only_rank = self._request.world_size == 1  # no other rank makes files
            folders = self._part.folder_syncs(manifests=False, arrays=is_only_rank)
            workers.run(chain(self._part.syncs(), folders), in_caller=True)

    def _finish_as_rank_0(self, workers: Workers) -> None:
        request, part = self._request, self._part
        self._collect(pieces=False)
        part.check_complete()
        record = part.record(self._state)
        if request.before_commit is not None:
            with self._reader(record) as reader:
                self._messages += request.before_commit(reader)
        self._commit(record, workers)

    def _collect(self, pieces: bool) -> None:
        """Wait until the other ranks' pieces, or all ranks' manifests, are in this rank's folder, and read them (rank 0)."""
        part = self._part
        if not pieces:
            self._messages += sweep(self._files, self._request.folder)
        # Rank 0 writes its own manifest last.
        self._wait_until(lambda: part.collect() or (pieces and part.missing_ranks() == [0]), self._missing_ranks_text)

    def _commit(self, record: Record, workers: Workers) -> None:
        """Publish the complete checkpoint (rank 0)."""
        request = self._request
        if self._flush is None:
            workers.run(self._part.folder_syncs(arrays=request.world_size > 1), in_caller=True)
        self._check_alive()
        self._messages += self._committer.commit(record, self._flush, request.keep)

    def _wait_for_commit(self, summaries: Sequence[ShardSummary], workers: Workers) -> None:
        """Wait until rank 0 has committed (other ranks)."""
        timeout_text = f"rank 0 did not commit {self._committer.target} within {self._request.timeout_s} s"
        self._wait_until(self._commit_is_done, lambda: timeout_text)

    def _reader(self, record: Record) -> CheckpointReader:
        return CheckpointReader(TagInfo(folder=LocalFolder(self._folder), record=record))

    def _wait_until(
        self, ready: Callable[[], T | None], failure: Callable[[], str], timeout_s: float | None = None
    ) -> T:
        """Return the first true result of `ready`; at a timeout raise CheckpointError with the text of `failure`."""
        timeout_s = self._request.timeout_s if timeout_s is None else timeout_s
        return wait_until(ready, timeout_s, failure, check=self._check_alive, pause=self._cancelled.wait)

    def _summarise(self, summaries: Sequence[ShardSummary]) -> SaveSummary:
        request = self._request
        linked = [s for s in summaries if s.linked]
        on_disk = [s for s in summaries if s.array in request.pins and request.pins[s.array].has_file]
        num_copied = sum(not s.linked for s in on_disk)
        if num_copied and self.keeps_local_files:
            self._messages.append(
                f"rank {request.rank}: {num_copied} of {len(on_disk)} shards on disk were copied in the "
                f"background: the run folder's files cannot be linked into {request.folder} (another file system, or "
                "one without hard links)"
            )
        return SaveSummary(
            path=self._committer.target,
            num_files=len(summaries),
            num_linked=len(linked),
            linked_bytes=sum(s.file_bytes for s in linked),
            written_bytes=sum(s.file_bytes for s in summaries if not s.linked),
            all_linked_bytes=self._part.linked_bytes,
            all_written_bytes=self._part.written_bytes,
            elapsed_s=time.monotonic() - self._started,
            known=self._part.known,
            messages=tuple(self._messages),
        )

    def _check_alive(self) -> None:
        """Raise CheckpointError if this save was cancelled or another rank aborted it."""
        if self._cancelled.is_set():
            raise CheckpointError(f"{self.title} was cancelled")
        if (abort := self._failed_rank()) is not None:
            raise CheckpointError(f"rank {abort[0]} aborted {self.title}: {abort[1]}")

    def _failed_rank(self) -> tuple[int, str] | None:
        """Return a rank that aborted and that this rank depends on, with the reason; None if no rank has."""
        reason = abort_reason(self._folder / ABORT_FILE) if self._request.rank else None
        return None if reason is None else (0, reason)

    def _commit_is_done(self) -> bool:
        """Return whether rank 0 committed; raises CheckpointError if it ended without a commit."""
        if self._is_committed():
            return True
        if time.monotonic() - self._started > _RANK_0_CHECK_DELAY_S:
            with owner_has_ended(self._committer.lock_path) as dead:
                ended = dead
            if ended and not self._is_committed():
                self._check_alive()
                raise CheckpointError(
                    f"rank 0 ended without committing {self._committer.target}; the previous checkpoint remains the latest"
                )
        return False

    def _is_committed(self) -> bool:
        if self._folder.is_dir():
            return False
        try:
            return read_record(self._committer.target).id == self._request.save_id
        except (OSError, ValueError):
            return False

    def _folder_not_seen_text(self) -> str:
        return (
            f"rank {self._request.rank} does not see {self._folder}, which rank 0 creates: either rank 0 could not (its "
            "error says why), or the checkpoint folder is local to a machine; use a folder that all ranks share, or a bucket"
        )

    def _missing_ranks_text(self) -> str:
        missing = [rank for rank in self._part.missing_ranks() if rank]
        return f"ranks {missing[:20]} did not finish their part of {self._committer.target} within {self._request.timeout_s} s"

    def abort(self, error: BaseException) -> None:
        """Notify the other ranks that this one failed, and why. Never raises."""
        reason = f"{type(error).__name__}: {error}"
        if self._request.rank == 0:
            self._committer.abort(reason, is_only_rank=self._request.world_size == 1)
        elif not self._is_complete and (self._folder / MANIFEST_FOLDER).is_dir():
            # The manifest of a complete part is left unchanged: rank 0 may be committing it.
            with contextlib.suppress(OSError):
                self._part.write_manifest(self._request.rank, f"failed: {reason}", [], self._rank_state)

    def _raise_root_cause(self, error: BaseException) -> None:
        """Replace an OSError caused by another rank's abort by that rank's CheckpointError."""
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            self._check_alive()  # rank 0 may have aborted, and removed this rank's files: then raise its reason

    def _release(self) -> None:
        if self._flush is not None:
            self._flush.close()
        self._committer.close()
