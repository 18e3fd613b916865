"""Counters of the bytes that move over each link, and of the time that somebody waits for it.

A link is a name: a collective, a direction between two tiers, reading ahead. Code that moves bytes counts them there, in
any thread:

    with links.moving("host_to_device", nbytes):            # the caller waits for the whole of it
        target.copy_(source)

    links.begin("prefetch", nbytes)                         # begun here, waited for elsewhere
    with links.waiting("prefetch", "not there in time"):
        ticket.wait()
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace


@dataclass(kw_only=True)
class LinkStatistics:
    """The work of one link of this rank since the start."""

    operations: int = 0
    bytes: int = 0
    """Bytes of operations begun, including those under way."""
    busy_s: float = 0.0
    """Time from the beginning of each operation until it was seen to be done, summed: concurrent operations each count."""
    stall_s: dict[str, float] = field(default_factory=dict)
    """Seconds for which a caller waited, by cause."""

    def since(self, before: LinkStatistics) -> LinkStatistics:
        """Return the counts since `before`."""
        return LinkStatistics(
            operations=self.operations - before.operations,
            bytes=self.bytes - before.bytes,
            busy_s=self.busy_s - before.busy_s,
            stall_s={cause: seconds - before.stall_s.get(cause, 0.0) for cause, seconds in self.stall_s.items()},
        )


def total_of_links(links: Iterable[LinkStatistics]) -> LinkStatistics:
    """Return several links as one."""
    sums = LinkStatistics()
    for link in links:
        sums.operations += link.operations
        sums.bytes += link.bytes
        sums.busy_s += link.busy_s
        for cause, seconds in link.stall_s.items():
            sums.stall_s[cause] = sums.stall_s.get(cause, 0.0) + seconds
    return sums


class LinkCounters:
    """Counters by link. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, LinkStatistics] = {}

    def begin(self, link: str, nbytes: int) -> None:
        """Count an operation of `nbytes`."""
        with self._lock:
            counts = self._counts.setdefault(link, LinkStatistics())
            counts.operations += 1
            counts.bytes += nbytes

    def busy(self, link: str, seconds: float) -> None:
        """Count the time of an operation that was begun."""
        with self._lock:
            self._counts.setdefault(link, LinkStatistics()).busy_s += seconds

    def stalled(self, link: str, cause: str, seconds: float) -> None:
        """Count time for which a caller waited."""
        with self._lock:
            stall_s = self._counts.setdefault(link, LinkStatistics()).stall_s
            stall_s[cause] = stall_s.get(cause, 0.0) + seconds

    @contextmanager
    def waiting(self, link: str, cause: str) -> Iterator[None]:
        """Count a `with` block as waiting."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.stalled(link, cause, time.perf_counter() - started)

    @contextmanager
    def moving(self, link: str, nbytes: int, cause: str | None = "blocking call") -> Iterator[None]:
        """Count a `with` block as one operation of `nbytes` whose whole time the caller waits; a caller that loses
        nothing, such as a thread that works ahead, gives None as the cause."""
        self.begin(link, nbytes)
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.busy(link, seconds)
            if cause is not None:
                self.stalled(link, cause, seconds)

    def statistics(self) -> dict[str, LinkStatistics]:
        """Return the counters of every link that was used."""
        with self._lock:
            return {link: replace(counts, stall_s=dict(counts.stall_s)) for link, counts in self._counts.items()}
