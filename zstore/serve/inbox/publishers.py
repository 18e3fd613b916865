"""Runs that publish their weights to a run of the service, each as long as one of its requests is held."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ...open.weights_target import is_taken, publishing, sweep


class Publishers:
    """Which run publishes to a folder. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held: dict[Path, tuple[ExitStack, list[str]]] = {}
        """What holds the folder, and the publisher of each request that is held."""

    def check(self, folder: Path, publisher: str) -> None:
        """Raise UsageError if another one publishes there."""
        with self._lock:
            if folder in self._held and publisher != self._held[folder][1][0]:
                raise is_taken(folder, self._held[folder][1][0])

    @contextmanager
    def holding(self, folder: Path, publisher: str) -> Iterator[None]:
        """Let one run publish to a folder, and remove what a killed one left. Raises UsageError if another does."""
        with self._lock:
            self.check(folder, publisher)
            if folder not in self._held:
                place = ExitStack()
                place.enter_context(publishing(folder, publisher))
                sweep(folder)
                self._held[folder] = place, []
            place, requests = self._held[folder]
            requests.append(publisher)
        try:
            yield
        finally:
            with self._lock:
                requests.pop()
                if not requests:
                    del self._held[folder]
                    place.close()
