"""The data that views of runs read, and its caches. Knows no web server: a report is made of it too."""

from __future__ import annotations

from ..cache import Cache, Renewed
from ..files.visible import VisibleCheckpoints
from ..models import ArrayStatistics, Difference
from ..runs import Run, Runs
from ..settings import Settings
from .history import History
from .readers import Memory, Readers
from .summaries import RunSummaries
from .timeline import Timeline

_MOST_HISTORIES, _MOST_TIMELINES, _MOST_STATISTICS, _MOST_DIFFERENCES = 64, 64, 8192, 32


class Library:
    """The runs that settings name, with their journals and checkpoints. Usable from any thread; to be closed."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.runs = Runs(settings)
        self.checkpoints = VisibleCheckpoints()
        self.summaries = RunSummaries(self.checkpoints)
        self.listing = Renewed(lambda: [self.summaries.of(run) for run in self.runs.all().values()])
        """All runs in short, of very many as they were some seconds ago."""
        self._histories: Cache[str, History] = Cache(_MOST_HISTORIES)
        self._timelines: Cache[str, Timeline] = Cache(_MOST_TIMELINES)
        self.statistics: Cache[tuple[str, str], ArrayStatistics] = Cache(_MOST_STATISTICS)
        """By the checkpoint's id and the array: a checkpoint never changes."""
        self.differences: Cache[tuple[str | None, ...], Difference] = Cache(_MOST_DIFFERENCES)
        """By place and id of both checkpoints, and the array whose values were compared."""
        self.memory = Memory.divide(settings.memory_bytes)
        self.readers = Readers(self.memory)

    def history(self, run: Run) -> History:
        """Return the journals of a run, as far as they were read."""
        return self._histories.get_or_make(run.folder.location, lambda: History(run.folder))

    def timeline(self, run: Run) -> Timeline:
        """Return the checkpoints of a run."""
        return self._timelines.get_or_make(run.folder.location, lambda: Timeline(run.folder))

    def close(self) -> None:
        """End all work; blocks."""
        self.readers.close()
