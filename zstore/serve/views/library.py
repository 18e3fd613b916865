"""What views of runs read, and what is kept of it. Knows no web server: a report is made of it too."""

from __future__ import annotations

from ..kept import Kept
from ..models import ArrayStatistics, Difference
from ..runs import Run, Runs
from ..settings import Settings
from .glance import Glances
from .history import History
from .readers import Readers
from .timeline import Timeline

_MOST_HISTORIES, _MOST_TIMELINES, _MOST_STATISTICS, _MOST_DIFFERENCES = 8, 64, 8192, 32


class Library:
    """The runs that settings name, with their journals and checkpoints. Usable from any thread; to be closed."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.runs = Runs(settings)
        self.glances = Glances()
        self._histories: Kept[str, History] = Kept(_MOST_HISTORIES)
        self._timelines: Kept[str, Timeline] = Kept(_MOST_TIMELINES)
        self.statistics: Kept[tuple[str, str], ArrayStatistics] = Kept(_MOST_STATISTICS)
        """By the checkpoint's id and the array: a checkpoint never changes."""
        self.differences: Kept[tuple[str | None, ...], Difference] = Kept(_MOST_DIFFERENCES)
        """By place and id of both checkpoints, and the array whose values were compared."""
        self.readers = Readers(settings.memory_bytes)

    def history(self, run: Run) -> History:
        """Return the journals of a run, as far as they were read."""
        return self._histories.get_or_make(run.folder.location, lambda: History(run.folder))

    def timeline(self, run: Run) -> Timeline:
        """Return the checkpoints of a run."""
        return self._timelines.get_or_make(run.folder.location, lambda: Timeline(run.folder))

    def close(self) -> None:
        """End what goes on; blocks."""
        self.readers.close()
