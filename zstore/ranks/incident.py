"""Reports of ranks to each other when one of them failed, and their outcome. Pure.

[Note: sound or broken]
A call that raised on every rank after the same number of collectives leaves the ranks in step: each raises its own
error and the run is sound. It is broken, for good, if a rank does not answer, if a collective failed, if a rank waits
in a collective that a failed one will never enter, or if a rank has not failed within `SAME_S`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ..errors import RankError

ABSENT_S = 3.0
"""A live process answers within this, even if its main thread is blocked."""
SAME_S = 10.0
"""How long a failed rank waits for the same failure of ranks that are still at work."""


class Outcome(Enum):
    """The outcome of an incident. See [Note: sound or broken]."""

    SOUND = "sound"
    BROKEN = "broken"


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
        """Return a report from here."""
        return RankReport(at=str(self), entered=self.entered, **more)


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """A rank's place, or its answer."""

    at: str = "an unknown place"
    """Its activity."""
    entered: int = 0
    """Collectives that it entered."""
    entered_by_anybody: int = 0
    """Collectives begun in the process group of all ranks, if it is in one that is not the engine's."""
    cause: str | None = None
    """Its error on one line."""
    details: str = ""
    """The traceback of the error, or that of the main thread now."""
    lost: str | None = None
    """Why it can no longer talk to the others."""
    left: bool = False
    """It closed its engine."""
    final: bool = False
    """Nobody will handle the error."""

    def joined(self, later: RankReport) -> RankReport:
        """Return the report of both: an error stays known when a collective fails because of it."""
        first = self if self.cause is not None else later
        return replace(first, lost=self.lost or later.lost, final=self.final or later.final)


def judge(reports: Mapping[int, RankReport], world_size: int, waited_s: float) -> Outcome | None:
    """Return the outcome of the reports; None while an answer may still change it."""
    there = [report for report in reports.values() if not report.left]
    errors = [report for report in there if report.cause is not None]
    missing = len(reports) < world_size
    if missing and waited_s < ABSENT_S:
        return None
    if missing or any(report.lost is not None or report.final for report in there):
        # Ranks that left by themselves wait for nobody.
        return Outcome.SOUND if len(there) <= 1 and not missing and errors else Outcome.BROKEN
    if len(errors) == len(there) and len({report.entered for report in there}) == 1:
        return Outcome.SOUND
    if errors and max(report.entered for report in there) > min(report.entered for report in errors):
        return Outcome.BROKEN
    return Outcome.BROKEN if waited_s >= SAME_S else None


def explain(reports: Mapping[int, RankReport], world_size: int, rank: int, at: str, gone: str) -> RankError:
    """Return the error that rank `rank` raises at `at`; `gone` is the known state of ranks without a report."""
    others = {other: report for other, report in reports.items() if other != rank}
    found = {other: (f"in {r.at}: {r.cause}", r.details) for other, r in others.items() if r.cause is not None}
    found |= {other: ("is gone", gone) for other in range(world_size) if other not in reports and other != rank}
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
    there = {other: report for other, report in reports.items() if not report.left}
    last = max((report.entered for report in there.values()), default=0)
    late = {other: report for other, report in there.items() if report.entered < last and other != rank}
    return dict.fromkeys(left, ("closed its engine", "its loop ended: do all ranks take the same number of steps?")) | {
        other: (f"did not come to a collective that others wait in: it is in {report.at}", report.details)
        for other, report in late.items()
    }
