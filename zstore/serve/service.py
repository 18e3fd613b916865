"""What all requests share."""

from __future__ import annotations

from starlette.requests import Request

from .auth import Access
from .downloads import Downloads
from .endless import Endless
from .opened import RemoteSizes
from .runs import Run, Runs
from .settings import Settings
from .sources import Sources
from .transfers import Transfers
from .visible import Checkpoints


class Service:
    """One service: its settings, its runs, and what is kept between requests."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.access = Access(settings)
        self.endless = Endless()
        self.runs = Runs(settings)
        self.checkpoints = Checkpoints()
        self.remote_sizes = RemoteSizes()
        self.transfers = Transfers(settings.memory_bytes // 4)
        self.downloads = Downloads(settings.memory_bytes // 4)
        self.sources = Sources(settings.memory_bytes // 8)


def service_of(request: Request) -> Service:
    """Return the service that a request came to."""
    found: Service = request.app.state.service
    return found


def run_of(request: Request) -> Run:
    """Return the run that the path of a request names; call it in a thread. Raises CheckpointNotFoundError."""
    return service_of(request).runs.get(request.path_params["run"])
