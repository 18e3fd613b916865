"""What all requests share."""

from __future__ import annotations

import asyncio

import anyio
from starlette.requests import Request

from .auth import Access
from .downloads import Downloads
from .endless import Endless
from .glance import Glances
from .history import History
from .inbox import Inbox
from .jobs import Jobs
from .kept import Kept
from .models import ArrayStatistics, Difference
from .opened import RemoteSizes
from .readers import NUM_HEAVY, Readers
from .runs import Run, Runs
from .settings import Settings
from .sources import Sources
from .timeline import Timeline
from .transfers import Transfers
from .upload_limits import UploadLimits
from .visible import Checkpoints

_MOST_HISTORIES, _MOST_TIMELINES, _MOST_STATISTICS, _MOST_DIFFERENCES = 8, 64, 8192, 32


class Service:
    """One service: its settings, its runs, and what is kept between requests."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.access = Access(settings)
        self.endless = Endless()
        self.runs = Runs(settings)
        self.inbox = Inbox(self.runs, keep_last=settings.keep_last)
        self.upload_limits = UploadLimits()
        self.checkpoints = Checkpoints()
        self.remote_sizes = RemoteSizes()
        self.transfers = Transfers(settings.memory_bytes // 4)
        self.downloads = Downloads(settings.memory_bytes // 4)
        self.sources = Sources(settings.memory_bytes // 8)
        self.glances = Glances()
        self._histories: Kept[str, History] = Kept(_MOST_HISTORIES)
        self._timelines: Kept[str, Timeline] = Kept(_MOST_TIMELINES)
        self.statistics: Kept[tuple[str, str], ArrayStatistics] = Kept(_MOST_STATISTICS)
        """By the checkpoint's id and the array: a checkpoint never changes."""
        self.differences: Kept[tuple[str | None, ...], Difference] = Kept(_MOST_DIFFERENCES)
        """By place and id of both checkpoints, and the array whose values were compared."""
        self.readers = Readers(settings.memory_bytes)
        self.jobs = Jobs()
        self.heavy = anyio.CapacityLimiter(NUM_HEAVY)
        """Of requests that read values."""
        self.ending = asyncio.Event()
        """Set when the service ends: what goes on for as long as somebody listens ends then."""

    def history(self, run: Run) -> History:
        """Return the journals of a run, as far as they were read."""
        return self._histories.get_or_make(run.folder.location, lambda: History(run.folder))

    def timeline(self, run: Run) -> Timeline:
        """Return the checkpoints of a run."""
        return self._timelines.get_or_make(run.folder.location, lambda: Timeline(run.folder))

    def close(self) -> None:
        """End what goes on; blocks."""
        self.jobs.close()
        self.readers.close()


def service_of(request: Request) -> Service:
    """Return the service that a request came to."""
    found: Service = request.app.state.service
    return found


def run_of(request: Request) -> Run:
    """Return the run that the path of a request names; call it in a thread. Raises CheckpointNotFoundError."""
    return service_of(request).runs.get(request.path_params["run"])
