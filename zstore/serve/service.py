"""What all requests share."""

from __future__ import annotations

from starlette.requests import Request

from .inbox import Inbox
from .limits import Limits
from .opened import RemoteSizes
from .runs import Run, Runs
from .settings import Settings
from .transfers import Transfers
from .visible import Checkpoints


class Service:
    """One service: its settings, its runs, and what is kept between requests."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.runs = Runs(settings)
        self.inbox = Inbox(self.runs, keep_last=settings.keep_last)
        self.limits = Limits()
        self.checkpoints = Checkpoints()
        self.remote_sizes = RemoteSizes()
        self.transfers = Transfers(settings.memory_bytes // 4)


def service_of(request: Request) -> Service:
    """Return the service that a request came to."""
    found: Service = request.app.state.service
    return found


def run_of(request: Request) -> Run:
    """Return the run that the path of a request names; call it in a thread. Raises CheckpointNotFoundError."""
    return service_of(request).runs.get(request.path_params["run"])
