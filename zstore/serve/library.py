"""What all requests share: the runs, and what was read of them and is kept."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Annotated, Any, Generic, TypeVar

import anyio
from fastapi import Depends, Request

from ..checkpoint.catalog import TagInfo
from ..checkpoint.reader import CheckpointReader
from ..io.shards import IoResources, open_resources
from .checkpoints import RunCheckpoints
from .journals import RunJournals
from .runs import Run, RunTable
from .settings import Settings
from .uploads.inbox import Inbox

V = TypeVar("V")

_POOL_BYTES = 64 * 1024 * 1024
_NUM_THREADS = 8
_NUM_READERS, _NUM_RUNS, _NUM_JOURNALS = 8, 4096, 16
_NUM_FILE_READS, _NUM_CASTS, _NUM_UNFIT = 16, 2, 256


class Cache(Generic[V]):
    """The `most` values that were used last, by key. Usable from any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value of a key, made by `make` if there is none; two threads may both make it."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        made = make()
        with self._lock:
            found = self._values.setdefault(key, made)
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return found

    def find(self, key: Hashable) -> V | None:
        """Return the value of a key, None if there is none."""
        with self._lock:
            return self._values.get(key)


class Library:
    """The runs that settings name, their checkpoints and journals as far as they were read, and uploads."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.runs = RunTable(settings)
        self.inbox = Inbox(self.runs, settings.files)
        self._checkpoints: Cache[RunCheckpoints] = Cache(_NUM_RUNS)
        self._journals: Cache[RunJournals] = Cache(_NUM_JOURNALS)
        self._short_journals: Cache[RunJournals] = Cache(_NUM_RUNS)
        self._readers: Cache[CheckpointReader] = Cache(_NUM_READERS)
        self.layouts: Cache[Any] = Cache(_NUM_READERS)
        """Of weights; see `zstore.serve.weights`."""
        self.unfit: Cache[str] = Cache(_NUM_UNFIT)
        """Why values do not fit a type, which is found out on the way: a download that is tried again is told."""
        self.file_reads = anyio.CapacityLimiter(_NUM_FILE_READS)
        self.casts = anyio.CapacityLimiter(_NUM_CASTS)
        self._resources: IoResources | None = None
        self._stack = contextlib.ExitStack()
        self._lock = threading.Lock()

    def close(self) -> None:
        """End the threads; reads under way fail."""
        with self._lock:
            self._stack.close()

    def checkpoints(self, run: Run) -> RunCheckpoints:
        """Return the checkpoints of a run."""
        return self._checkpoints.get(run.folder.location, lambda: RunCheckpoints(run.folder))

    def journals(self, run: Run) -> RunJournals:
        """Return the journals of a run, with a sample of their steps."""
        return self._journals.get(run.folder.location, lambda: RunJournals(run.folder))

    def short_journals(self, run: Run) -> RunJournals:
        """Return the journals of a run with the last step alone, for the list of all."""
        return self._short_journals.get(run.folder.location, lambda: RunJournals(run.folder, most_steps=0))

    def reader(self, info: TagInfo) -> CheckpointReader:
        """Return a reader of a checkpoint, which is not to be closed. Raises like `CheckpointReader`."""
        return self._readers.get((info.location, info.record.id), lambda: CheckpointReader(info, self._pool()))

    def _pool(self) -> IoResources:
        with self._lock:
            if self._resources is None:
                self._resources = self._stack.enter_context(
                    open_resources(pool_bytes=_POOL_BYTES, num_threads=_NUM_THREADS)
                )
            return self._resources


def library_of(request: Request) -> Library:
    """Return what the service shares."""
    found: Library = request.app.state.library
    return found


def _runs_of(request: Request) -> RunTable:
    return library_of(request).runs


def _run_of(run: str, request: Request) -> Run:
    return library_of(request).runs.get(run)


Shared = Annotated[Library, Depends(library_of)]
Runs = Annotated[RunTable, Depends(_runs_of)]
NamedRun = Annotated[Run, Depends(_run_of)]
"""The run that a URL names."""
