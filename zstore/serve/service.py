"""What all requests share."""

from __future__ import annotations

import anyio
from starlette.requests import Request

from .auth import Access
from .downloads import Downloads
from .endless import Endless
from .jobs import Jobs
from .library import Library
from .opened import RemoteSizes
from .readers import NUM_HEAVY
from .runs import Run
from .settings import Settings
from .sources import Sources
from .transfers import Transfers
from .visible import Checkpoints


class Service(Library):
    """One service: its settings, its runs, and what is kept between requests."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.access = Access(settings)
        self.endless = Endless()
        self.checkpoints = Checkpoints()
        self.remote_sizes = RemoteSizes()
        self.transfers = Transfers(settings.memory_bytes // 4)
        self.downloads = Downloads(settings.memory_bytes // 4)
        self.sources = Sources(settings.memory_bytes // 8)
        self.jobs = Jobs()
        self.heavy = anyio.CapacityLimiter(NUM_HEAVY)
        """Of requests that read values."""

    def close(self) -> None:
        """End what goes on; blocks."""
        self.jobs.close()
        super().close()


def service_of(request: Request) -> Service:
    """Return the service that a request came to."""
    found: Service = request.app.state.service
    return found


def run_of(request: Request) -> Run:
    """Return the run that the path of a request names; call it in a thread. Raises CheckpointNotFoundError."""
    return service_of(request).runs.get(request.path_params["run"])
