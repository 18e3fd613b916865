"""The state that all requests share."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

import anyio
from starlette.requests import Request

from .auth import Permissions, require_token
from .files.castings import Castings
from .files.downloads import Downloads
from .files.layouts import Layouts
from .files.opened import RemoteSizes
from .inbox.inbox import Inbox
from .jobs import Jobs
from .metrics import Metrics
from .runs import Run, Runs
from .settings import Settings
from .views.library import Library
from .views.readers import NUM_HEAVY
from .webhooks import Webhooks

_MOST_FILES = 32
"""Files of uploads that are read at a time, with about 2 MiB each; others wait with their connections."""


class EventStreams:
    """The tasks that answer with an event stream, which has no end of its own. Used on the event loop alone."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self.are_closed = False
        """Whether the service is shutting down."""

    def add(self, task: asyncio.Task[object] | None) -> None:
        """Register the task that answers a request; it is forgotten when it ends."""
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Cancel all streams."""
        self.are_closed = True
        for task in list(self._tasks):
            task.cancel()


class Service(Library):
    """One service: its settings, its runs, and the values that are kept between requests."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.access = Permissions(settings)
        self.streams = EventStreams()
        self.metrics = Metrics()
        self.remote_sizes = RemoteSizes()
        self.downloads = Downloads(self.memory.downloads_bytes)
        self.castings = Castings(self.downloads, self.runs.kept)
        self.layouts = Layouts()
        self.jobs = Jobs(next(filter(Path.is_dir, self.runs.local_roots()), None), settings.files)
        self.inbox = Inbox(self.runs, self.jobs, settings)
        self.webhooks = Webhooks(settings, self.listing.get, self.runs.local_roots())
        self.upload_files = asyncio.Semaphore(_MOST_FILES)
        self.large_bodies = asyncio.Semaphore(1)
        """For JSON of over a megabyte, and the objects that are made of it."""

    @functools.cached_property
    def heavy(self) -> anyio.CapacityLimiter:
        """The limiter of requests that read values; made on the event loop."""
        return anyio.CapacityLimiter(NUM_HEAVY)

    def close(self) -> None:
        """End all work; blocks."""
        self.webhooks.close()
        self.jobs.close()
        self.downloads.close()
        super().close()


def service_of(request: Request) -> Service:
    """Return the service that a request came to."""
    found: Service = request.app.state.service
    return found


def runs_of(request: Request) -> Runs:
    """Return the runs that are there for a request: all ways from a name to a run go through it. Raises HTTPException (401)."""
    return service_of(request).runs.limited_to(require_token(request).sees)


def run_of(request: Request) -> Run:
    """Return the run that the path of a request names; call it in a thread. Raises CheckpointNotFoundError."""
    return runs_of(request).get(request.path_params["run"])
