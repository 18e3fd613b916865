"""Work behind requests: verifications, prunings, and uploads that other code reports.

[Note: jobs after a restart]
The newest jobs but uploads, which go on by themselves, are in a file, which a service reads when it begins: those that had not
ended were cut short. It is replaced by a rename whenever a job begins or ends, and is of one process at a time: another service
of that folder keeps its jobs in memory.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from ..checkpoint.lock import hold
from ..errors import CheckpointNotFoundError, ZstoreError
from ..io.closing import Closing
from ..io.files import Files
from .models import Job, JobList, json_of
from .replies import ConflictError

Kind = Literal["verify", "prune", "upload"]

_MOST_KEPT = 100
_NUM_AT_ONCE = 2
_MOST_LINES = 1000
_FILE = ".zstore-jobs.json"
_CUT_SHORT = "ended by a restart of the service"
_log = logging.getLogger("zstore.serve")


class JobCancelledError(ZstoreError):
    """The service ends, and the job with it."""


class RunningJob:
    """A job for those who carry it out. Usable from any thread."""

    def __init__(self, jobs: Jobs, job: Job) -> None:
        self._jobs = jobs
        self._left_out = 0
        self.now = job
        """The job's present state; replaced as a whole, under the lock of the table."""
        self.version = 0
        """Rises with every change, over all jobs."""

    def advance(self, nbytes: int) -> None:
        """Count bytes. Raises JobCancelledError when the service ends."""
        if self._jobs.is_closed:
            raise JobCancelledError(_CUT_SHORT)
        with self._jobs.lock:
            self._change(done_bytes=self.now.done_bytes + nbytes)

    def expect(self, total_bytes: int) -> None:
        """Say how many bytes there are in all."""
        with self._jobs.lock:
            self._change(total_bytes=total_bytes)

    def say(self, line: str) -> None:
        """Add a line to the result."""
        with self._jobs.lock:
            if len(self.now.lines) < _MOST_LINES:
                self._change(lines=[*self.now.lines, line])
            else:
                self._left_out += 1

    def end(self, problem: str | None = None) -> None:
        """End it, well or with a problem."""
        with self._jobs.lock:
            lines = [*self.now.lines, f"and {self._left_out} more"] if self._left_out else self.now.lines
            state = "done" if problem is None else "failed"
            self._change(lines=lines, state=state, ended_at=time.time(), problem=problem)
        self._jobs.note(self.now)

    def _change(self, **values: object) -> None:
        """Change it; the lock is held."""
        self.now = self.now.model_copy(update=values)
        self.version = self._jobs.next_version()


Work = Callable[[RunningJob], None]


class Jobs(Closing):
    """The newest jobs; two at a time are carried out, and of one run one at a time. Usable from any thread."""

    def __init__(self, folder: Path | None = None, files: Files | None = None) -> None:
        """Keep them in a file of `folder`. See [Note: jobs after a restart]."""
        self._files, self._saving = files or Files(), threading.Lock()
        self._held: int | None = None
        self._path = None if folder is None else folder / _FILE
        self._kept = OrderedDict((job.id, RunningJob(self, job)) for job in self._load())
        self.lock = threading.Lock()
        """For the table and all its jobs: with a lock of its own each, two threads could wait for each other."""
        self.version = 0
        """Rises whenever a job changes."""
        self._workers = ThreadPoolExecutor(_NUM_AT_ONCE, thread_name_prefix="zstore-job")
        self.is_closed = False

    def next_version(self) -> int:
        """Return a version higher than all before; the lock is held."""
        self.version += 1
        return self.version

    def add(self, kind: Kind, run: str, checkpoint: str | None = None, *, total_bytes: int = 0) -> RunningJob:
        """Return a new job that the caller carries out and ends.

        Raises ConflictError if a verification or pruning of the run is under way and this is one too.
        """
        job = Job(
            id=uuid.uuid4().hex,
            kind=kind,
            run=run,
            checkpoint=checkpoint,
            state="running",
            started_at=time.time(),
            ended_at=None,
            done_bytes=0,
            total_bytes=total_bytes,
            lines=[],
            problem=None,
        )
        running = RunningJob(self, job)
        with self.lock:
            running.version = self.next_version()
            busy = [one.now for one in self._kept.values() if one.now.run == run and one.now.state == "running"]
            if kind != "upload" and (others := [one for one in busy if one.kind != "upload"]):
                raise ConflictError(
                    f"run {run!r} is being worked on: expected its {others[0].kind} (job {others[0].id}) to have ended; "
                    "ask again then"
                )
            self._kept[job.id] = running
            ended = [key for key, one in self._kept.items() if one.now.state != "running"]
            for key in ended[: max(0, len(self._kept) - _MOST_KEPT)]:
                del self._kept[key]
        self.note(job)
        return running

    def _load(self) -> list[Job]:
        if self._path is None or not self._path.exists() or not self._is_ours():
            return []
        try:
            found = JobList.model_validate_json(self._path.read_bytes()).jobs
        except (OSError, ValidationError):
            return []
        cut_short = {"state": "failed", "problem": _CUT_SHORT}
        return [job.model_copy(update=cut_short) if job.state == "running" else job for job in found]

    def _is_ours(self) -> bool:
        """Return whether the file is there for this process."""
        if self._held is None and self._path is not None:
            self._held = hold(self._path.with_name(f"{_FILE}.lock"))
            self._path = None if self._held is None else self._path
        return self._path is not None

    def note(self, job: Job) -> None:
        """Write the jobs to the file, since this one began or ended. See [Note: jobs after a restart]."""
        with self._saving:
            if job.kind == "upload" or not self._is_ours() or self._path is None:
                return
            part, kept = self._path.with_name(f"{_FILE}.part"), [job for job in self.all().jobs if job.kind != "upload"]
            try:
                self._files.write_small(part, json_of(JobList(jobs=kept)).encode(), sync=False)
                self._files.rename(part, self._path)
            except (ZstoreError, OSError) as error:
                _log.warning("jobs will not be there after a restart: %s", error)
                self._path = None

    def start(self, kind: Kind, run: str, checkpoint: str | None, work: Work, *, total_bytes: int = 0) -> Job:
        """Carry `work` out in a thread, as soon as one is free; an error that it raises is the job's problem. See `add`."""
        running = self.add(kind, run, checkpoint, total_bytes=total_bytes)

        def carry_out() -> None:
            try:
                running.advance(0)
                work(running)
            except (ZstoreError, OSError) as error:
                running.end(str(error))
            except BaseException:
                running.end("the service met an error of its own; its log has it")
                raise
            else:
                running.end()

        self._workers.submit(carry_out)
        return running.now

    def all(self, sees: Callable[[str], bool] = lambda _: True) -> JobList:
        """Return the kept jobs of the runs whose names `sees` accepts, the oldest first."""
        with self.lock:
            return JobList(jobs=[one.now for one in self._kept.values() if sees(one.now.run)])

    def get(self, job_id: str, sees: Callable[[str], bool] = lambda _: True) -> Job:
        """Return a job of such a run. Raises CheckpointNotFoundError if none of that id is kept."""
        with self.lock:
            found = self._kept.get(job_id)
        if found is None or not sees(found.now.run):
            raise CheckpointNotFoundError(
                f"there is no job {job_id!r}: the newest {_MOST_KEPT} are kept, see /api/jobs"
            )
        return found.now

    def changed(self, run: str, since_version: int) -> list[Job]:
        """Return the jobs of a run that changed after a version."""
        with self.lock:
            return [one.now for one in self._kept.values() if one.version > since_version and one.now.run == run]

    def close(self) -> None:
        """Cancel running jobs, and wait for their end."""
        self.is_closed = True
        self._workers.shutdown(wait=True)
        held, self._held, self._path = self._held, None, None
        if held is not None:
            os.close(held)
