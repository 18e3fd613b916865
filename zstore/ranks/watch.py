"""Failure detection: when one rank fails, all ranks stop promptly and report the cause.

[Note: the watch]
Each rank has a thread that polls a shared key-value board twice a second for an alarm; periodically it
posts the rank's place, as a heartbeat, and looks for its neighbour's. The alarm is raised by a rank with an escaped error, with
a failed collective (a process at the other end died), or whose neighbour sends no heartbeat. Then every rank's thread reports
its place, whatever its main thread does, and all reach the same verdict (`incident`). If the run is broken, connections
are cut: whoever waits in a collective, here or elsewhere, gets its error at once and raises RankError with the reports.
Nothing hangs afterwards, not even the end of the process. Missed heartbeats are counted in the observer's own polls, so that
a machine that was asleep reports no loss.

A slow rank is not a failure. One that hangs while its thread keeps running is caught by the process
group's own timeout.

[Note: the watch's threads]
A thread of the rank (the trainer's; any that has a collective fail) hands its report over as `_alarm`, and waits until it was
answered: `_alarm` is None then, or the run is broken, or the watch's thread ended. Reports that meet are joined; one that comes
while the outcome of another is clear already is the next incident's.

    the watch's thread alone    `_incident`, and all of `Presence` but `of`
    all, under `_changed`       `_alarm`, `_what_others_said`, `_closing`, `_ended`, `failed`, which is set once
    all, without it             `failed` and `_reports` are read atomically; `agreed` and `_raised` choose an error's text

[Note: meeting]
If two ranks enter different collectives, these fail with the backend's own error, and with gloo by an abort. Scripts
written for replicated models save on the main process only, so ranks synchronise on the board before the first collective of a
save or a load. A waiting rank looks at the next rank: one that closed its engine, or that has entered a collective which this
rank has not, will never come. If only some ranks make a call, at least one of them has a neighbour elsewhere, and its
error ends all.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

import torch.distributed as torch_dist

from ..errors import RankError, UsageError
from ..io.closing import start_threads
from .board import Board, Connections, store_port
from .incident import ABSENT_S, SAME_S, Activity, Outcome, RankReport, explain, judge

_log = logging.getLogger("zstore")

_LOOK_S = 0.5
_PAUSE_S = 0.05
_LEAST_PAUSE_S = 0.001
_ANSWER_S = ABSENT_S + SAME_S + 5
_MOST_MISSED = 9
"""Heartbeats after which a rank counts as lost."""
_GONE = "no response: the process was killed, or its machine is down or unreachable"


class Watch:
    """This rank's part of the watch; see the notes. Before `begin`, errors affect only this rank."""

    board: Board
    _presence: Presence
    _rank: int
    _world_size: int
    _aborts: bool

    def __init__(self) -> None:
        self.begun = False
        self.activity = Activity()
        """What this rank is currently doing."""
        self.connections = Connections()
        """To the other ranks, of all groups."""
        self.when_broken: list[Callable[[], None]] = []
        """Further cleanup callbacks for when the run is broken; called from the watch's thread."""
        self.failed: RankError | None = None
        """The error that ended the run, if any."""
        self.agreed = False
        """Whether all ranks know of the error that is about to be raised in the call at hand, so that it is no failure."""
        self._raised = False
        """Whether this rank raised why the run is over."""
        self._incident = self._num_meetings = 0
        self._changed = threading.Condition()
        self._alarm: RankReport | None = None
        self._reports: dict[int, RankReport] = {}
        self._what_others_said = ""
        self._closing = False
        self._ended = True
        self._threads: list[threading.Thread] = []

    def begin(
        self, gather: Callable[[Any], list[Any]], rank: int, world_size: int, *, aborts: bool, silent_s: float | None
    ) -> None:
        """Begin to watch (all ranks); `gather` is an all-gather. To cut a collective, the process group `aborts`,
        or connections are shut down. `silent_s` is the heartbeat timeout; None disables it."""
        self._rank, self._world_size, self._aborts = rank, world_size, aborts
        self.connections.store_port = store_port()
        # Learn the connections before any rank can fail on its own here.
        rows = gather([uuid.uuid4().hex, self.connections.listed()])
        self.connections.learn([listed for _, listed in rows], rank)
        self.board = Board.connect(f"watch/{rows[0][0]}")
        if silent_s is not None:
            self.connections.give_up_store(silent_s)
        self._presence = Presence(self.board, rank, world_size, self.activity, silent_s)
        self.begun, self._ended = True, False
        self._threads = start_threads(1, self._serve, f"zstore-watch-{rank}")
        if not self._threads:  # the interpreter ends
            self._ended = True

    # -- called by the rank -------------------------------------------------------------------------------------------

    def require_sound(self) -> None:
        """Raise RankError, once, if the run is broken, and from then on UsageError."""
        if self.failed is None:
            return
        if not self._raised:
            self._raised = True
            raise self.failed
        first = str(self.failed).splitlines()[0]
        raise UsageError(
            f"this run's process group is down because {first}. Restart the processes and load the last checkpoint"
        )

    def require_others(self) -> None:
        """Raise RankError if a rank was lost, any number of times."""
        if self.failed is not None:
            raise RankError(str(self.failed), {})

    def escaped(self, error: BaseException, *, final: bool = False) -> None:
        """Tell the others of an error that ends a call on this rank, and return once the outcome is clear.

        Errors that all ranks agreed on since the call began are not reported again. `final`: nothing will handle it.
        """
        if not self.begun or self.agreed or error is self.failed:
            return
        final = final or not isinstance(error, Exception)
        if self.failed is None:
            cause = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
            details = "".join(traceback.format_exception(error))
            self._raise_alarm(self.activity.report(cause=cause, details=details, final=final))
        if self.failed is None and isinstance(error, RankError):
            # It may name only the rank, without its error.
            error.add_note(self._what_others_said)
        if self.failed is not None:
            if not self._raised and set(self.failed.failures) - {self._rank}:
                error.add_note(str(self.failed))
            self._raised = True

    def lost(self, error: BaseException) -> RankError:
        """Return the error to raise for a collective that failed."""
        if self.failed is None:
            self._raise_alarm(self.activity.report(lost=f"{type(error).__name__}: {error}"))
        self._raised = True
        return self._break({})  # if it is not broken, all other ranks have left on their own

    def close(self) -> None:
        """End the watch; a second call does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=2 * ABSENT_S)

    def tell_uncaught(self) -> None:
        """Report the uncaught error that ends the interpreter, if any."""
        if not threading.main_thread().is_alive() and not self._ended:
            uncaught = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
            if uncaught is not None:
                self.escaped(uncaught, final=True)

    @property
    def has_raised(self) -> bool:
        """Whether the run has ended and this rank has raised the reason."""
        return self.failed is not None and self._raised

    def _raise_alarm(self, report: RankReport) -> None:
        with self._changed:
            self._alarm = report if self._alarm is None else self._alarm.joined(report)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._alarm is None or self._ended, _ANSWER_S)
            unanswered = self._alarm if self.failed is None else None
        if unanswered is not None:
            self._without_board()

    # -- meeting --------------------------------------------------------------------------------------------------

    def meet(self, call: str) -> None:
        """Return once all ranks are in `call` (all ranks). Raises UsageError if another rank will never make this call."""
        self._num_meetings += 1
        key = f"meeting/{self._num_meetings}"
        # If the board fails, its process is gone: the call's own collectives give a better error.
        with suppress(torch_dist.DistError):
            if self.board.add(f"{key}/ranks", 1) == self._world_size:
                self.board.post(f"{key}/call", call)
            elif (found := self._met(f"{key}/call", call)) not in (None, call):
                self._refuse(call, f"another rank is in {found}")

    def _met(self, key: str, call: str) -> str | None:
        """Wait until the last rank has posted its call, and return that; None if a connection to another rank ended, or it
        took as long as a collective may: then the call's own collectives report it."""
        started = time.monotonic()
        pause_s, next_look = _LEAST_PAUSE_S, started + _LOOK_S
        connections = self.connections.there()
        while (found := self.board.read(key)) is None:
            if time.monotonic() > next_look:
                self.require_sound()
                where = self._elsewhere()
                if where is not None and self.board.read(key) is None:
                    self._refuse(call, where)
                lasted_s = time.monotonic() - started
                if connections - self.connections.there() or lasted_s > torch_dist.default_pg_timeout.total_seconds():
                    return None
                next_look = time.monotonic() + _LOOK_S
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)
        return str(found)

    def _elsewhere(self) -> str | None:
        """Return the place of the next rank, if it will not come any more."""
        other = (self._rank + 1) % self._world_size
        _, place = self._presence.of(other)
        if place.left:
            return f"rank {other} closed its engine"
        ahead = place.entered > self.activity.entered or place.entered_by_anybody > entered_by_anybody()
        return f"rank {other} is in {place.at}" if ahead else None

    def _refuse(self, call: str, where: str) -> NoReturn:
        error = UsageError(
            f"{call} was called on rank {self._rank} while {where}: every rank must call it, so move it out of "
            "conditions such as `if accelerator.is_main_process` or `if rank == 0`"
        )
        self.escaped(error, final=True)  # the other ranks will not raise the same error
        raise error

    # -- the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while self.failed is None:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or self._alarm is not None, self._presence.pause_s)
                    leaves = self._closing and self._alarm is None
                if leaves:
                    self._presence.leave()
                    return
                if (lost := self._presence.look()) is not None:
                    found = self._presence.present(lost=lost)
                    with self._changed:
                        self._alarm = self._alarm or found
                if self._alarm is not None or self.board.read(f"alarm/{self._incident}"):
                    self._resolve(self._incident)
                    self._incident += 1
        except RuntimeError:
            # The board is gone, with the process that held it. Calls that need the others will fail.
            if self._alarm is not None:
                self._without_board()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _resolve(self, number: int) -> None:
        """Report until the outcome of the incident is clear."""
        started = time.monotonic()
        pause_s = _PAUSE_S * max(1.0, self._world_size / 64)
        last: RankReport | None = None
        while True:
            alarm = self._alarm
            report = alarm or self._presence.present()
            if report != last:
                self.board.post(f"report/{number}/{self._rank}", asdict(report))
                last = report
            self.board.post(f"alarm/{number}", True)
            reports = self._reports = self._collected(number)
            outcome = judge(reports, self._world_size, time.monotonic() - started)
            if outcome is Outcome.BROKEN or (outcome is None and self.board.read(f"broken/{number}")):
                self.board.post(f"broken/{number}", True)
                # If this process hosts the store, keep it alive until every reporting rank has read the verdict.
                readers = sum(not report.left for report in reports.values())
                num_read, end = self.board.add(f"read/{number}", 1), time.monotonic() + ABSENT_S
                while self._rank == 0 and num_read < readers and time.monotonic() < end:
                    time.sleep(pause_s)
                    num_read = self.board.add(f"read/{number}", 0)
                self._break(reports)
                return
            if outcome is Outcome.SOUND:
                break
            time.sleep(pause_s)
        with self._changed:
            self._what_others_said = "\n".join(
                f"--- rank {rank}, in {report.at} ---\n{report.details.rstrip()}"
                for rank, report in reports.items()
                if rank != self._rank
            )
            self._reports = {}
            if self._alarm is alarm:
                self._alarm = None
            self._changed.notify_all()

    def _collected(self, number: int) -> dict[int, RankReport]:
        reports: dict[int, RankReport] = {}
        for rank in range(self._world_size):
            if (report := self.board.read(f"report/{number}/{rank}")) is not None:
                reports[rank] = RankReport(**report)
            elif (place := self._presence.of(rank)[1]).left:
                reports[rank] = place
        return reports

    # -- the end of the run, by whichever thread finds it first -------------------------------------------------------

    def _break(self, reports: Mapping[int, RankReport]) -> RankError:
        """End the run: unblock every rank waiting on this one, and vice versa."""
        with self._changed:
            if self.failed is not None:
                return self.failed
            alarm = self._alarm
            if alarm is not None:
                reports = {**reports, self._rank: alarm}
            at = reports[self._rank].at if self._rank in reports else str(self.activity)
            broken = self.failed = explain(reports, self._world_size, self._rank, at, _GONE)
        if alarm is None and not self.activity.phase:
            # The script may be in its own collective, whose error would not mention this.
            _log.error("%s", str(broken).splitlines()[0])
        # Every collective ends that this rank waits in, or that others wait in for this rank.
        if self._aborts:
            torch_dist.distributed_c10d._abort_process_group()
        self.connections.cut()
        for give_up in self.when_broken:
            give_up()
        return broken

    def _without_board(self) -> None:
        """End the run when the store is unreachable."""
        reports = dict.fromkeys(range(self._world_size), RankReport()) | self._reports
        if self.connections.store_port is not None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            del reports[0]  # it was rank 0's process that held it; otherwise torchrun's, or a file
        self.connections.cut(store=True)  # the main thread, or one that saves, may wait for its answer
        self._break(reports)


class Presence:
    """Each rank's status on the board: posted when it settles, and re-posted as a heartbeat. After `silent_s`
    without one the next rank that has not left counts as lost."""

    def __init__(self, board: Board, rank: int, world_size: int, activity: Activity, silent_s: float | None) -> None:
        self._period_s = math.inf if silent_s is None else silent_s / _MOST_MISSED
        self.pause_s = min(_LOOK_S, self._period_s)
        self._board, self._rank, self._activity = board, rank, activity
        self._others = [(rank + distance) % world_size for distance in range(1, world_size)]
        self._trainer = threading.get_ident()
        self._last = self._posted = RankReport()
        self._number, self._next_at = 0, math.inf if silent_s is None else 0.0
        self._seen: tuple[int, int] = (-1, 0)
        """The neighbour, and the number of its latest post."""
        self._missed = 0

    def of(self, rank: int) -> tuple[int, RankReport]:
        """Return a rank's post counter and its latest status."""
        number, place = self._board.read(f"place/{rank}") or (0, {})
        return number, RankReport(**place)

    def look(self) -> str | None:
        """Post this rank's place when it is time, and look for the neighbour's; return how that was lost, if it was."""
        place, now = self._place(), time.monotonic()
        stays, self._last = place == self._last != self._posted, place
        due = now >= self._next_at
        if stays or due:
            self._post(place if stays else self._posted)
        if not due:
            return None
        self._next_at = now + self._period_s
        there = ((other, *self.of(other)) for other in self._others)
        seen = next(((other, number) for other, number, place in there if not place.left), None)
        if seen is None:
            return None
        self._missed, self._seen = self._missed + 1 if seen == self._seen else 0, seen
        lost = self._missed >= _MOST_MISSED
        return f"rank {seen[0]} sent no heartbeat for {self._period_s * _MOST_MISSED:.0f} s" if lost else None

    def leave(self) -> None:
        """Post that this rank closed its engine."""
        self._post(RankReport(at="the end", entered=self._activity.entered, left=True))

    def present(self, lost: str | None = None) -> RankReport:
        """Return this rank's current status with a stack trace."""
        frame = sys._current_frames().get(self._trainer)
        details = "" if frame is None else "it is at\n" + "".join(traceback.format_stack(frame))
        return self._activity.report(details=details, lost=lost)

    def _place(self) -> RankReport:
        collective = None if self._activity.collective else collective_of(self._trainer)
        if collective is None:
            return self._activity.report()
        # The count alone proves nothing: it also includes point-to-point transfers.
        at = f"{self._activity}, collective {collective}"
        return RankReport(at=at, entered=self._activity.entered, entered_by_anybody=entered_by_anybody())

    def _post(self, place: RankReport) -> None:
        self._posted, self._number = place, self._number + 1
        self._board.post(f"place/{self._rank}", [self._number, asdict(place)])


def collective_of(thread: int) -> str | None:
    """Return the collective of torch.distributed that a thread is in; None if it is in none."""
    frame, found = sys._current_frames().get(thread), None
    while frame is not None:
        if frame.f_globals.get("__name__") == torch_dist.distributed_c10d.__name__:
            found = f"torch.distributed.{frame.f_code.co_name}"
        elif found is not None:
            break
        frame = frame.f_back
    return found


def entered_by_anybody() -> int:
    """Return how many collectives the process group of all ranks has begun on this rank; 0 if it does not count them."""
    with suppress(RuntimeError, ValueError):
        group: Any = torch_dist.distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())
    return 0
