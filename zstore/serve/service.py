"""The state that all requests share."""

from __future__ import annotations

import functools

import anyio
from starlette.requests import Request

from .auth import Permissions
from .files.downloads import Downloads
from .files.opened import RemoteSizes
from .files.plans import Plans
from .files.transfers import Transfers
from .files.visible import VisibleCheckpoints
from .inbox.inbox import Inbox
from .inbox.limits import UploadLimits
from .jobs import Jobs
from .runs import Run
from .settings import Settings
from .streams import Streams
from .views.library import Library
from .views.readers import NUM_HEAVY


class Service(Library):
    """One service: its settings, its runs, and the values that are kept between requests."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.access = Permissions(settings)
        self.streams = Streams()
        self.checkpoints = VisibleCheckpoints()
        self.remote_sizes = RemoteSizes()
        self.transfers = Transfers(self.memory.files_bytes)
        self.downloads = Downloads(self.memory.weights_bytes)
        self.plans = Plans()
        self.jobs = Jobs()
        self.inbox = Inbox(self.runs, self.jobs, keep_last=settings.keep_last, files=settings.files)
        self.upload_limits = UploadLimits()

    @functools.cached_property
    def heavy(self) -> anyio.CapacityLimiter:
        """The limiter of requests that read values; made on the event loop."""
        return anyio.CapacityLimiter(NUM_HEAVY)

    def close(self) -> None:
        """End all work; blocks."""
        self.jobs.close()
        self.transfers.close()
        super().close()


def service_of(request: Request) -> Service:
    """Return the service that a request came to."""
    found: Service = request.app.state.service
    return found


def run_of(request: Request) -> Run:
    """Return the run that the path of a request names; call it in a thread. Raises CheckpointNotFoundError."""
    return service_of(request).runs.get(request.path_params["run"])
