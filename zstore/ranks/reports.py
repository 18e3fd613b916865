"""The ranks' status reports: heartbeats, reports of failures, and the verdict on all reports of an incident.

[Note: healthy or broken]
If a call raised on every rank after the same number of collectives, the ranks are still in step: each raises its own
error and the run is healthy. It is permanently broken if a rank does not respond, if a collective failed, if a rank waits
in a collective that a failed rank will never enter, or if a rank has not failed too within `AGREEMENT_TIMEOUT_S`.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

import torch.distributed as torch_dist

from ..errors import RankError
from .board import Board

RESPONSE_TIMEOUT_S = 3.0
"""A live process responds within this time, even if its main thread is blocked."""
AGREEMENT_TIMEOUT_S = 10.0
"""How long a failed rank waits for the same failure of ranks that are still running."""
POLL_INTERVAL_S = 0.5
"""Interval between polls of other ranks' reports."""
_MAX_MISSED_HEARTBEATS = 9
"""Consecutive missed heartbeats after which a rank counts as lost."""
_NO_RESPONSE = "no response: the process was killed, or its machine is down or unreachable"


class Outcome(Enum):
    """The outcome of an incident. See [Note: healthy or broken]."""

    HEALTHY = "healthy"
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """A rank's status: a heartbeat, or its report of an incident."""

    location: str = "an unknown place"
    """Description of its activity."""
    num_collectives: int = 0
    """Collectives that it has entered."""
    num_group_collectives: int = 0
    """Collectives begun in the process group of all ranks, if the rank is in a collective that is not the engine's."""
    cause: str | None = None
    """Its error, as one line."""
    details: str = ""
    """The traceback of the error, or the main thread's current stack."""
    connection_error: str | None = None
    """Why it can no longer communicate with other ranks."""
    is_closed: bool = False
    """Whether it closed its engine."""
    is_fatal: bool = False
    """Whether no handler will catch the error."""

    def merged(self, later: RankReport) -> RankReport:
        """Return both reports as one: an error is not lost when a collective fails because of it."""
        first = self if self.cause is not None else later
        error = self.connection_error or later.connection_error
        return replace(first, connection_error=error, is_fatal=self.is_fatal or later.is_fatal)

    def failure(self) -> tuple[str, str]:
        """Return the error with its location, and the details."""
        return f"in {self.location}: {self.cause or self.connection_error}", self.details


@dataclass
class Activity:
    """What a rank is doing. Updated by the engine and the collectives, read by the watch."""

    phase: str = ""
    """The engine's call, such as "forward"; empty outside of its calls."""
    unit: str = ""
    """The unit that is running in the phase, if known."""
    collective: str = ""
    """The collective that the rank is in."""
    num_collectives: int = 0
    """Collectives entered so far."""

    def __str__(self) -> str:
        parts = [self.phase or "the training loop"]
        parts += [f"unit {self.unit!r}"] if self.unit else []
        parts += [f"collective {self.collective}"] if self.collective else []
        return ", ".join(parts)

    def report(self, **more: Any) -> RankReport:
        """Return a report of this activity."""
        return RankReport(location=str(self), num_collectives=self.num_collectives, **more)


def judge(reports: Mapping[int, RankReport], world_size: int, waited_s: float) -> Outcome | None:
    """Return the outcome of the reports; None while further reports may change it."""
    present = [report for report in reports.values() if not report.is_closed]
    errors = [report for report in present if report.cause is not None]
    missing = len(reports) < world_size
    if missing and waited_s < RESPONSE_TIMEOUT_S:
        return None
    if missing or any(report.connection_error is not None or report.is_fatal for report in present):
        # The last rank, after all others have left, needs no agreement.
        return Outcome.HEALTHY if len(present) <= 1 and not missing and errors else Outcome.BROKEN
    if len(errors) == len(present) and len({report.num_collectives for report in present}) == 1:
        return Outcome.HEALTHY
    if errors and max(report.num_collectives for report in present) > min(report.num_collectives for report in errors):
        return Outcome.BROKEN
    return Outcome.BROKEN if waited_s >= AGREEMENT_TIMEOUT_S else None


def explain(reports: Mapping[int, RankReport], world_size: int, rank: int, location: str) -> RankError:
    """Return the error that rank `rank` raises in `location`."""
    causes = {other: r.failure() for other, r in reports.items() if other != rank and r.cause is not None}
    gone = set(range(world_size)) - {*reports, rank}
    causes = causes | dict.fromkeys(gone, ("is gone", _NO_RESPONSE)) or _late_ranks(reports, rank)
    if not causes:
        failed = {other: r for other, r in reports.items() if r.cause is not None or r.connection_error is not None}
        causes = {other: r.failure() for other, r in failed.items()}
    ranks = ", ".join(map(str, sorted(causes)))
    text = "; ".join(f"rank {other} {cause}" for other, (cause, _) in sorted(causes.items()))
    failures = {other: details for other, (_, details) in causes.items()}
    message = f"rank {ranks} of {world_size} failed ({text}); rank {rank} is stopping too, in {location}"
    return RankError(message, failures)


def _late_ranks(reports: Mapping[int, RankReport], rank: int) -> dict[int, tuple[str, str]]:
    """Return (cause, details) of ranks that closed their engine, or that others wait for."""
    closed = {other for other, report in reports.items() if report.is_closed and other != rank}
    present = {other: report for other, report in reports.items() if not report.is_closed}
    last = max((report.num_collectives for report in present.values()), default=0)
    late = {other: report for other, report in present.items() if report.num_collectives < last and other != rank}
    cause = "closed its engine", "its loop ended: do all ranks take the same number of steps?"
    return dict.fromkeys(closed, cause) | {
        other: (f"did not reach a collective that others wait in: it is in {report.location}", report.details)
        for other, report in late.items()
    }


class Heartbeats:
    """The ranks' status on the board: posted when it has stayed the same between two polls, and again as a heartbeat. A rank
    watches the next rank with an open engine, which counts as lost after `timeout_s` without a heartbeat."""

    def __init__(self, board: Board, rank: int, world_size: int, activity: Activity, timeout_s: float | None) -> None:
        self._period_s = math.inf if timeout_s is None else timeout_s / _MAX_MISSED_HEARTBEATS
        self.pause_s = min(POLL_INTERVAL_S, self._period_s)
        self._board, self._rank, self._activity = board, rank, activity
        self._others = [(rank + distance) % world_size for distance in range(1, world_size)]
        self._main_thread = threading.get_ident()
        self._previous = self._posted = RankReport()
        self._num_posts, self._next_heartbeat = 0, math.inf if timeout_s is None else 0.0
        self._last_seen: tuple[int, int] = (-1, 0)
        """The neighbour, and the number of its posts so far."""
        self._missed = 0

    def of(self, rank: int) -> tuple[int, RankReport]:
        """Return the number of a rank's posts, and the latest one."""
        num_posts, report = self._board.read(f"place/{rank}") or (0, {})
        return num_posts, RankReport(**report)

    def check(self) -> str | None:
        """Post this rank's status when due, and check the neighbour's; return why the neighbour counts as lost, or None."""
        report, now = self._current_report(), time.monotonic()
        is_stable, self._previous = report == self._previous != self._posted, report
        is_due = now >= self._next_heartbeat
        if is_stable or is_due:
            self._publish(report if is_stable else self._posted)
        if not is_due:
            return None
        self._next_heartbeat = now + self._period_s
        latest = ((other, *self.of(other)) for other in self._others)
        seen = next(((other, num_posts) for other, num_posts, report in latest if not report.is_closed), None)
        if seen is None:
            return None
        self._missed, self._last_seen = self._missed + 1 if seen == self._last_seen else 0, seen
        if self._missed < _MAX_MISSED_HEARTBEATS:
            return None
        return f"rank {seen[0]} sent no heartbeat for {self._period_s * _MAX_MISSED_HEARTBEATS:.0f} s"

    def leave(self) -> None:
        """Post that this rank closed its engine."""
        self._publish(RankReport(location="the end", num_collectives=self._activity.num_collectives, is_closed=True))

    def stack_report(self, lost: str | None = None) -> RankReport:
        """Return this rank's status with the stack of its main thread."""
        frame = sys._current_frames().get(self._main_thread)
        details = "" if frame is None else "it is at\n" + "".join(traceback.format_stack(frame))
        return self._activity.report(details=details, connection_error=lost)

    def _current_report(self) -> RankReport:
        collective = None if self._activity.collective else _current_collective(self._main_thread)
        if collective is None:
            return self._activity.report()
        # Only with a known collective, because the count also includes point-to-point transfers.
        location = f"{self._activity}, collective {collective}"
        return RankReport(
            location=location, num_collectives=self._activity.num_collectives, num_group_collectives=count_collectives()
        )

    def _publish(self, report: RankReport) -> None:
        self._posted, self._num_posts = report, self._num_posts + 1
        self._board.post(f"place/{self._rank}", [self._num_posts, asdict(report)])


def _current_collective(thread: int) -> str | None:
    """Return the collective of torch.distributed that a thread is in; None if it is in none."""
    frame, found = sys._current_frames().get(thread), None
    while frame is not None:
        if frame.f_globals.get("__name__") == torch_dist.distributed_c10d.__name__:
            found = f"torch.distributed.{frame.f_code.co_name}"
        elif found is not None:
            break
        frame = frame.f_back
    return found


def count_collectives() -> int:
    """Return how many collectives the process group of all ranks has begun on this rank; 0 if it does not count them."""
    with suppress(RuntimeError, ValueError):
        group: Any = torch_dist.distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())
    return 0
