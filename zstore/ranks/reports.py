"""What ranks report about themselves, regularly and when one of them has failed, and the verdict on all reports.

[Note: sound or broken]
A call that raised on every rank after the same number of collectives leaves the ranks in step: each raises its own
error and the run is sound. It is broken, for good, if a rank does not answer, if a collective failed, if a rank waits
in a collective that a failed one will never enter, or if a rank has not failed within `SAME_S`.
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

ABSENT_S = 3.0
"""A live process answers within this, even if its main thread is blocked."""
SAME_S = 10.0
"""How long a failed rank waits for the same failure of ranks that are still at work."""
LOOK_S = 0.5
"""Between two looks at other ranks' reports."""
_MAX_MISSED = 9
"""Heartbeats after which a rank counts as lost."""
_NO_ANSWER = "no response: the process was killed, or its machine is down or unreachable"


class Outcome(Enum):
    """The outcome of an incident. See [Note: sound or broken]."""

    SOUND = "sound"
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """A rank's place, or its answer."""

    at: str = "an unknown place"
    """Its activity."""
    entered: int = 0
    """Collectives that it entered."""
    group_entered: int = 0
    """Collectives begun in the process group of all ranks, if the rank is in a collective that is not the engine's."""
    cause: str | None = None
    """Its error on one line."""
    details: str = ""
    """The traceback of the error, or the main thread's current stack."""
    lost: str | None = None
    """Why it can no longer communicate with the others."""
    left: bool = False
    """It closed its engine."""
    final: bool = False
    """No handler catches the error."""

    def joined(self, later: RankReport) -> RankReport:
        """Return the report of both: an error stays known when a collective fails because of it."""
        first = self if self.cause is not None else later
        return replace(first, lost=self.lost or later.lost, final=self.final or later.final)


@dataclass
class Activity:
    """The place of a rank in its work. Kept by the engine and the collectives, read by the watch."""

    phase: str = ""
    """The engine's call, such as "forward"; empty outside of its calls."""
    unit: str = ""
    """The unit that is at work in the phase, if known."""
    collective: str = ""
    """The collective that the rank is in."""
    entered: int = 0
    """Collectives entered so far."""

    def __str__(self) -> str:
        parts = [self.phase or "the training loop"]
        parts += [f"unit {self.unit!r}"] if self.unit else []
        parts += [f"collective {self.collective}"] if self.collective else []
        return ", ".join(parts)

    def report(self, **more: Any) -> RankReport:
        """Return a report from this place."""
        return RankReport(at=str(self), entered=self.entered, **more)


def judge(reports: Mapping[int, RankReport], world_size: int, waited_s: float) -> Outcome | None:
    """Return the outcome of the reports; None while an answer may still change it."""
    present = [report for report in reports.values() if not report.left]
    errors = [report for report in present if report.cause is not None]
    missing = len(reports) < world_size
    if missing and waited_s < ABSENT_S:
        return None
    if missing or any(report.lost is not None or report.final for report in present):
        # The last rank, after all others have left, needs no agreement.
        return Outcome.SOUND if len(present) <= 1 and not missing and errors else Outcome.BROKEN
    if len(errors) == len(present) and len({report.entered for report in present}) == 1:
        return Outcome.SOUND
    if errors and max(report.entered for report in present) > min(report.entered for report in errors):
        return Outcome.BROKEN
    return Outcome.BROKEN if waited_s >= SAME_S else None


def explain(reports: Mapping[int, RankReport], world_size: int, rank: int, at: str) -> RankError:
    """Return the error that rank `rank` raises at `at`."""
    others = {other: report for other, report in reports.items() if other != rank}
    found = {other: (f"in {r.at}: {r.cause}", r.details) for other, r in others.items() if r.cause is not None}
    found |= {other: ("is gone", _NO_ANSWER) for other in range(world_size) if other not in reports and other != rank}
    found = found or _late(reports, rank)
    if not found:
        failed = {other: r for other, r in reports.items() if r.cause is not None or r.lost is not None}
        found = {other: (f"in {r.at}: {r.cause or r.lost}", r.details) for other, r in failed.items()}
    ranks = ", ".join(map(str, sorted(found)))
    text = "; ".join(f"rank {other} {cause}" for other, (cause, _) in sorted(found.items()))
    failures = {other: details for other, (_, details) in found.items()}
    return RankError(f"rank {ranks} of {world_size} failed ({text}); rank {rank} stops with it, in {at}", failures)


def _late(reports: Mapping[int, RankReport], rank: int) -> dict[int, tuple[str, str]]:
    """Return (cause, details) of ranks that left, or that others wait for."""
    left = {other for other, report in reports.items() if report.left and other != rank}
    present = {other: report for other, report in reports.items() if not report.left}
    last = max((report.entered for report in present.values()), default=0)
    late = {other: report for other, report in present.items() if report.entered < last and other != rank}
    return dict.fromkeys(left, ("closed its engine", "its loop ended: do all ranks take the same number of steps?")) | {
        other: (f"did not reach a collective that others wait in: it is in {report.at}", report.details)
        for other, report in late.items()
    }


class Presence:
    """Each rank's place on the board: posted once the rank stays there, and again as a heartbeat. After `silent_s` without one
    the next rank that has not left counts as lost."""

    def __init__(self, board: Board, rank: int, world_size: int, activity: Activity, silent_s: float | None) -> None:
        self._period_s = math.inf if silent_s is None else silent_s / _MAX_MISSED
        self.pause_s = min(LOOK_S, self._period_s)
        self._board, self._rank, self._activity = board, rank, activity
        self._others = [(rank + distance) % world_size for distance in range(1, world_size)]
        self._trainer = threading.get_ident()
        self._last = self._posted = RankReport()
        self._number, self._next_at = 0, math.inf if silent_s is None else 0.0
        self._seen: tuple[int, int] = (-1, 0)
        """The neighbour, and the number of its latest post."""
        self._missed = 0

    def of(self, rank: int) -> tuple[int, RankReport]:
        """Return the number of a rank's latest post, and its place."""
        number, place = self._board.read(f"place/{rank}") or (0, {})
        return number, RankReport(**place)

    def look(self) -> str | None:
        """Post this rank's place when it is due, and check the neighbour's; return how the neighbour was lost, if it was."""
        place, now = self._place(), time.monotonic()
        stays, self._last = place == self._last != self._posted, place
        due = now >= self._next_at
        if stays or due:
            self._post(place if stays else self._posted)
        if not due:
            return None
        self._next_at = now + self._period_s
        places = ((other, *self.of(other)) for other in self._others)
        seen = next(((other, number) for other, number, place in places if not place.left), None)
        if seen is None:
            return None
        self._missed, self._seen = self._missed + 1 if seen == self._seen else 0, seen
        lost = self._missed >= _MAX_MISSED
        return f"rank {seen[0]} sent no heartbeat for {self._period_s * _MAX_MISSED:.0f} s" if lost else None

    def leave(self) -> None:
        """Post that this rank closed its engine."""
        self._post(RankReport(at="the end", entered=self._activity.entered, left=True))

    def with_stack(self, lost: str | None = None) -> RankReport:
        """Return this rank's place with the stack of its main thread."""
        frame = sys._current_frames().get(self._trainer)
        details = "" if frame is None else "it is at\n" + "".join(traceback.format_stack(frame))
        return self._activity.report(details=details, lost=lost)

    def _place(self) -> RankReport:
        collective = None if self._activity.collective else _collective_of(self._trainer)
        if collective is None:
            return self._activity.report()
        # The count alone proves nothing: it also includes point-to-point transfers.
        at = f"{self._activity}, collective {collective}"
        return RankReport(at=at, entered=self._activity.entered, group_entered=count_collectives())

    def _post(self, place: RankReport) -> None:
        self._posted, self._number = place, self._number + 1
        self._board.post(f"place/{self._rank}", [self._number, asdict(place)])


def _collective_of(thread: int) -> str | None:
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
