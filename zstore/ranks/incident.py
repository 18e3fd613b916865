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


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """A rank's answer."""

    at: str
    """Its activity."""
    entered: int
    """Collectives that it entered."""
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
    failures: dict[int, str] = {}
    causes: dict[int, str] = {}
    for other, report in reports.items():
        if other != rank and report.cause is not None:
            causes[other] = f"in {report.at}: {report.cause}"
            failures[other] = report.details
    for other in set(range(world_size)) - set(reports) - {rank}:
        causes[other], failures[other] = "is gone", gone
    if not causes:
        causes, failures = _late(reports, rank)
    if not causes:
        for other, report in reports.items():
            if report.cause is not None or report.lost is not None:
                causes[other] = f"in {report.at}: {report.cause or report.lost}"
                failures[other] = report.details
    ranks = ", ".join(map(str, sorted(causes)))
    text = "; ".join(f"rank {other} {cause}" for other, cause in sorted(causes.items()))
    return RankError(f"rank {ranks} of {world_size} failed ({text}); rank {rank} stops with it, in {at}", failures)


def _late(reports: Mapping[int, RankReport], rank: int) -> tuple[dict[int, str], dict[int, str]]:
    """Return (cause, details) of ranks that left, or that others wait for."""
    left = {other for other, report in reports.items() if report.left and other != rank}
    entered = {other: report.entered for other, report in reports.items() if not report.left}
    late = {other for other, count in entered.items() if count < max(entered.values())} - {rank}
    causes = dict.fromkeys(left, "closed its engine") | {
        other: f"did not come to a collective that others wait in: it is in {reports[other].at}" for other in late
    }
    details = dict.fromkeys(left, "its loop ended: do all ranks take the same number of steps?")
    return causes, details | {other: reports[other].details for other in late}
