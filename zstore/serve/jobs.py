"""Work behind requests: verifications, prunings, and uploads that other code reports."""

from __future__ import annotations

import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from ..closing import Closing
from ..errors import CheckpointNotFoundError, ZstoreError
from .models import Job, JobList
from .replies import ConflictError

Kind = Literal["verify", "prune", "upload"]

_MOST_KEPT = 100
_NUM_AT_ONCE = 2
_MOST_LINES = 1000


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
            raise JobCancelledError("the service ended before the job was done")
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

    def _change(self, **values: object) -> None:
        """Change it; the lock is held."""
        self.now = self.now.model_copy(update=values)
        self.version = self._jobs.next_version()


Work = Callable[[RunningJob], None]


class Jobs(Closing):
    """The newest jobs; two at a time are carried out, and of one run one at a time. Usable from any thread."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, RunningJob] = OrderedDict()
        self.lock = threading.Lock()
        """For the table and all its jobs: with a lock of its own each, two threads could wait for each other."""
        self._version = 0
        self._workers = ThreadPoolExecutor(_NUM_AT_ONCE, thread_name_prefix="zstore-job")
        self.is_closed = False

    @property
    def version(self) -> int:
        """Rises whenever a job changes."""
        return self._version

    def next_version(self) -> int:
        """Return a version higher than all before; the lock is held."""
        self._version += 1
        return self._version

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
        return running

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
