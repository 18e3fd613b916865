"""`/api`: runs, their journals and their checkpoints as JSON; and the library that all requests share."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Annotated, Any, Generic, TypeVar
from urllib.parse import quote

import anyio
from fastapi import APIRouter, Depends, Query, Request

from .._version import __version__
from ..checkpoint.catalog import TagInfo
from ..checkpoint.format import encode_state
from ..checkpoint.layout import natural_key
from ..checkpoint.reader import CheckpointReader
from ..errors import ZstoreError
from ..io.shards import IoResources, open_resources
from .checkpoints import RunCheckpoints
from .journals import RunJournals
from .models import (
    ArrayEntry,
    ArrayList,
    CheckpointDetail,
    CheckpointList,
    Placement,
    RunDetail,
    RunList,
    RunSummary,
    ServiceInfo,
    Steps,
)
from .runs import Run, RunTable, Settings
from .uploads.inbox import Inbox

V = TypeVar("V")

_POOL_BYTES = 64 * 1024 * 1024
_NUM_THREADS = 8
_NUM_READERS, _NUM_RUNS, _NUM_JOURNALS = 8, 4096, 16
_NUM_FILE_READS, _NUM_CASTS, _NUM_OVERFLOW_ERRORS = 16, 2, 256
_MAX_STATE_BYTES = 64 * 1024
_MAX_STEP = 2**53


class Cache(Generic[V]):
    """The `max_values` values that were used last, by key. Usable from any thread."""

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._values: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value of a key, made by `make` if it is missing; two threads may both make it."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        made = make()
        with self._lock:
            found = self._values.setdefault(key, made)
            while len(self._values) > self._max_values:
                self._values.popitem(last=False)
        return found

    def find(self, key: Hashable) -> V | None:
        """Return the value of a key, if any."""
        with self._lock:
            return self._values.get(key)


class Library:
    """The runs that settings name, their checkpoints and journals as far as they have been read, and uploads."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.runs = RunTable(settings)
        self.inbox = Inbox(self.runs, settings.files)
        self._checkpoints: Cache[RunCheckpoints] = Cache(_NUM_RUNS)
        self._journals: Cache[RunJournals] = Cache(_NUM_JOURNALS)
        self._short_journals: Cache[RunJournals] = Cache(_NUM_RUNS)
        self._readers: Cache[CheckpointReader] = Cache(_NUM_READERS)
        self.layouts: Cache[Any] = Cache(_NUM_READERS)
        """Cache of weights; see `zstore.serve.weights`."""
        self.overflow_errors: Cache[str] = Cache(_NUM_OVERFLOW_ERRORS)
        """Why values do not fit a type, found during a download: the next one is refused with it."""
        self.file_reads = anyio.CapacityLimiter(_NUM_FILE_READS)
        self.casts = anyio.CapacityLimiter(_NUM_CASTS)
        self._resources: IoResources | None = None
        self._stack = contextlib.ExitStack()
        self._lock = threading.Lock()

    def close(self) -> None:
        """End the threads; running reads fail."""
        with self._lock:
            self._stack.close()

    def checkpoints(self, run: Run) -> RunCheckpoints:
        """Return the checkpoints of a run."""
        return self._checkpoints.get(run.folder.location, lambda: RunCheckpoints(run.folder))

    def journals(self, run: Run) -> RunJournals:
        """Return the journals of a run, with a sample of their steps."""
        return self._journals.get(run.folder.location, lambda: RunJournals(run.folder))

    def short_journals(self, run: Run) -> RunJournals:
        """Return the journals of a run with only the last step, for the list of all."""
        return self._short_journals.get(run.folder.location, lambda: RunJournals(run.folder, max_steps=0))

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


open_router = APIRouter(tags=["service"])
router = APIRouter(prefix="/api", tags=["runs"])


@open_router.get("/healthz")
def _health() -> dict[str, str]:
    return {"status": "ok"}


@open_router.get("/api")
def _service(library: Shared) -> ServiceInfo:
    settings = library.settings
    return ServiceInfo(version=__version__, needs_token=not settings.is_open, takes_uploads=settings.token is not None)


@router.get("/runs")
def _runs(library: Shared) -> RunList:
    return RunList(runs=[_summary(library, run) for run in library.runs.all().values()])


@router.get("/runs/{run}")
def _run(run: NamedRun, library: Shared) -> RunDetail:
    return library.journals(run).detail(_summary(library, run))


@router.get("/runs/{run}/steps")
def _steps(
    run: NamedRun,
    library: Shared,
    after: Annotated[int, Query(ge=-1, le=_MAX_STEP)] = -1,
    points: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> Steps:
    return library.journals(run).steps(after, points)


@router.get("/runs/{run}/placement")
def _placement(run: NamedRun, library: Shared) -> Placement:
    return library.journals(run).placement()


@router.get("/runs/{run}/checkpoints")
def _checkpoints(run: NamedRun, library: Shared) -> CheckpointList:
    return library.checkpoints(run).listed()


@router.get("/runs/{run}/checkpoints/{checkpoint:path}/arrays")
def _arrays(run: NamedRun, checkpoint: str, library: Shared) -> ArrayList:
    path, info = library.checkpoints(run).find(checkpoint)
    arrays = library.reader(info).arrays
    base = f"zarr/{quote(run.name, safe='')}/{quote(path)}"
    return ArrayList(
        arrays=[
            ArrayEntry(
                name=name,
                dtype=arrays[name].spec.dtype,
                shape=list(arrays[name].spec.shape),
                nbytes=arrays[name].spec.nbytes,
                num_shards=arrays[name].grid.num_shards,
                url=f"{base}/{quote(arrays[name].folder)}",
            )
            for name in sorted(arrays, key=natural_key)
        ]
    )


@router.get("/runs/{run}/checkpoints/{checkpoint:path}")
def _checkpoint(run: NamedRun, checkpoint: str, library: Shared) -> CheckpointDetail:
    entry, info = library.checkpoints(run).entry(checkpoint)
    arrays, record = library.reader(info).arrays, info.record
    return CheckpointDetail(
        entry=entry,
        location=info.location,
        id=record.id,
        training_world_size=record.training_world_size,
        num_arrays=len(arrays),
        array_bytes=sum(array.spec.nbytes for array in arrays.values()),
        state=_cut(encode_state(record.state, "state")),
    )


def _summary(library: Library, run: Run) -> RunSummary:
    """Return a run in short: the last lines of its newest journal, and its newest checkpoint."""
    num_checkpoints, newest, problem = 0, None, None
    try:
        num_checkpoints, newest = library.checkpoints(run).summary()
    except (ZstoreError, OSError) as error:
        problem = str(error)
    summary = library.short_journals(run).summary(run.name, run.folder.location)
    times = [summary.updated_at, newest.committed_at if newest else None]
    return summary.model_copy(
        update={
            "num_checkpoints": num_checkpoints,
            "newest": newest,
            "problem": problem,
            "updated_at": max((at for at in times if at is not None), default=None),
        }
    )


def _cut(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state within `_MAX_STATE_BYTES`, its largest values replaced by their size. Numbers are finite."""
    found = json.loads(json.dumps(state), parse_constant=lambda _: None)
    sizes = {key: len(json.dumps(value)) for key, value in found.items()}
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        if len(json.dumps(found)) > _MAX_STATE_BYTES:
            found[key] = f"({sizes[key]} bytes of JSON, not shown)"
    return dict(found)
