"""Failure detection: when one rank fails, all ranks stop promptly and report the cause.

[Note: the watch]
Each rank has a thread, its watch, which polls a message board twice a second.
- **A rank reports** an error that escapes from a call (`report_error`) or a failed collective (`lost`); its watch reports a
  neighbour without heartbeats. That is an alarm on the board: every watch then posts a report, whatever its main thread does.
- **Every watch decides** for itself, all reaching the same verdict, since `judge` depends only on the reports. If the run
  is broken it cuts the connections: a rank waiting in a collective gets its error at once, and raises RankError with them.
- **The rank that reported waits** until its watch has decided, at most `_ANSWER_S`. Concurrent reports are merged; one
  that arrives after an outcome is clear starts a new incident.

Nothing hangs afterwards, not even the end of the process. Missed heartbeats are counted in the observer's own polls, so
that a machine that was asleep reports no loss. A slow rank is not a failure; one that hangs while its watch runs is
caught by the process group's own timeout. Only the watch's thread uses `_incident`, and `Presence` except for `of`;
what it shares with the rank's threads is read without a lock, and changed under `_changed`.

[Note: calls of all ranks]
If two ranks enter different collectives, these fail with the backend's own error, and with gloo by an abort. Scripts
written for replicated models save on the main process only, so ranks synchronise on the board before the first
collective of a save or a load. A waiting rank looks at the next rank: if it has closed its engine, or entered a
collective that this rank has not, it will never arrive. If only some ranks make a call, at least one of them has a
neighbour elsewhere, and its error stops all ranks.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from enum import Enum
from typing import Any, NoReturn

import torch.distributed as torch_dist

from ..errors import RankError, UsageError
from ..io.closing import start_threads
from .board import Board, Connections, store_port
from .reports import (
    ABSENT_S,
    LOOK_S,
    SAME_S,
    Activity,
    Outcome,
    Presence,
    RankReport,
    count_collectives,
    explain,
    judge,
)

_log = logging.getLogger("zstore")

_MAX_PAUSE_S = 0.05
_MIN_PAUSE_S = 0.001
_ANSWER_S = ABSENT_S + SAME_S + 5


class WatchState(Enum):
    """What this rank knows about the run."""

    UNWATCHED = "unwatched"
    """Not started: an error affects only this rank's call."""
    WATCHING = "watching"
    """The thread is polling and deciding."""
    LEAVING = "leaving"
    """`close` was called: the thread decides on any alarm, and ends."""
    LEFT = "left"
    """The thread ended, or could not be started: nothing is left to decide on a report, so it breaks the run."""
    BROKEN = "broken"
    """`failed` says why the run ended; no call of this rank has raised it yet."""
    RAISED = "raised"
    """A call of this rank has raised why the run ended; further calls raise UsageError."""


_THREAD_DECIDES = (WatchState.WATCHING, WatchState.LEAVING)


class Watch:
    """This rank's part of the watch; see the notes. Before `begin`, errors affect only this rank."""

    board: Board
    _presence: Presence
    _rank: int
    _world_size: int
    _aborts: bool

    def __init__(self) -> None:
        self.state = WatchState.UNWATCHED
        self.failed: RankError | None = None
        """The error that ended the run, if any."""
        self.activity = Activity()
        """What this rank is currently doing."""
        self.connections = Connections()
        """To the other ranks, of all groups."""
        self.when_broken: list[Callable[[], None]] = []
        """Further cleanup callbacks for when the run is broken; called from the watch's thread."""
        self.agreed = False
        """Whether all ranks know of the error about to be raised in the current call, so it does not count as a failure."""
        self._incident = self._num_barriers = 0
        self._changed = threading.Condition()
        self._alarm: RankReport | None = None
        """This rank's report that waits for the outcome."""
        self._reports: dict[int, RankReport] = {}
        """Reports of the current incident."""
        self._others_details = ""
        """The other ranks' reports of the last incident that the run survived."""
        self._threads: list[threading.Thread] = []

    def begin(
        self, gather: Callable[[Any], list[Any]], rank: int, world_size: int, *, aborts: bool, timeout_s: float | None
    ) -> None:
        """Begin to watch (all ranks); `gather` is an all-gather. To interrupt a collective, the process group is aborted if
        it `aborts`; otherwise connections are shut down. `timeout_s` is the heartbeat timeout; None disables it."""
        self._rank, self._world_size, self._aborts = rank, world_size, aborts
        self.connections.store_port = store_port()
        # Learn the connections before any single rank can fail.
        rows = gather([uuid.uuid4().hex, self.connections.listed()])
        self.connections.learn([listed for _, listed in rows], rank)
        self.board = Board.connect(f"watch/{rows[0][0]}")
        if timeout_s is not None:
            self.connections.give_up_store(timeout_s)
        self._presence = Presence(self.board, rank, world_size, self.activity, timeout_s)
        self.state = WatchState.WATCHING
        self._threads = start_threads(1, self._serve, f"zstore-watch-{rank}")
        if not self._threads:  # the interpreter is shutting down
            self.state = WatchState.LEFT

    def raise_if_broken(self) -> None:
        """Raise RankError, once, if the run is broken, and from then on UsageError."""
        if self.failed is None:
            return
        if self.state is WatchState.BROKEN:
            self.state = WatchState.RAISED
            raise self.failed
        first = str(self.failed).splitlines()[0]
        raise UsageError(
            f"this run's process group is down because {first}. Restart the processes and load the last checkpoint"
        )

    def raise_if_rank_lost(self) -> None:
        """Raise RankError if a rank was lost; unlike `raise_if_broken`, on every call."""
        if self.failed is not None:
            raise RankError(str(self.failed), {})

    def report_error(self, error: BaseException, *, final: bool = False) -> None:
        """Report an error that ends a call on this rank, and return once the outcome is clear.

        Errors that all ranks agreed on since the call began are not reported again. `final`: nothing will catch it.
        """
        if self.state is WatchState.UNWATCHED or self.agreed or error is self.failed:
            return
        final = final or not isinstance(error, Exception)
        if self.failed is None:
            cause = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
            details = "".join(traceback.format_exception(error))
            self._report(self.activity.report(cause=cause, details=details, final=final))
        if self.failed is None and isinstance(error, RankError):
            # It may name only the rank, without its error.
            error.add_note(self._others_details)
        if self.failed is not None:
            if self.state is WatchState.BROKEN and set(self.failed.failures) - {self._rank}:
                error.add_note(str(self.failed))
            self.state = WatchState.RAISED

    def lost(self, error: BaseException) -> RankError:
        """Return the error to raise for a collective that failed."""
        if self.failed is None:
            self._report(self.activity.report(lost=f"{type(error).__name__}: {error}"))
        broken = self._break({})  # if it is not broken, all other ranks have left on their own
        self.state = WatchState.RAISED
        return broken

    def close(self) -> None:
        """End the watch; a second call does nothing."""
        with self._changed:
            if self.state is WatchState.WATCHING:
                self.state = WatchState.LEAVING
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=2 * ABSENT_S)

    def report_uncaught(self) -> None:
        """Report the uncaught error that ends the interpreter, if any."""
        if not threading.main_thread().is_alive() and self.state in _THREAD_DECIDES:
            uncaught = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
            if uncaught is not None:
                self.report_error(uncaught, final=True)

    def _report(self, report: RankReport) -> None:
        with self._changed:
            self._alarm = report if self._alarm is None else self._alarm.joined(report)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._alarm is None or self.state not in _THREAD_DECIDES, _ANSWER_S)
            unanswered = self._alarm if self.failed is None else None
        if unanswered is not None:
            self._break_without_board()

    def synchronise(self, call: str) -> None:
        """Return once all ranks are in `call` (all ranks). Raises UsageError if another rank will never make this call."""
        self._num_barriers += 1
        key = f"meeting/{self._num_barriers}"
        # If the board fails, its process ended: the call's own collectives give a better error.
        with suppress(torch_dist.DistError):
            if self.board.add(f"{key}/ranks", 1) == self._world_size:
                self.board.post(f"{key}/call", call)
            elif (found := self._last_call(f"{key}/call", call)) not in (None, call):
                self._refuse(call, f"another rank is in {found}")

    def _last_call(self, key: str, call: str) -> str | None:
        """Wait until the last rank has posted its call, and return that; None if a connection to another rank ended, or
        it timed out like a collective: then the call's own collectives report it."""
        started = time.monotonic()
        pause_s, next_look = _MIN_PAUSE_S, started + LOOK_S
        connections = self.connections.open_now()
        while (found := self.board.read(key)) is None:
            if time.monotonic() > next_look:
                self.raise_if_broken()
                place = self._place_elsewhere()
                if place is not None and self.board.read(key) is None:
                    self._refuse(call, place)
                lasted_s = time.monotonic() - started
                if (
                    connections - self.connections.open_now()
                    or lasted_s > torch_dist.default_pg_timeout.total_seconds()
                ):
                    return None
                next_look = time.monotonic() + LOOK_S
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        return str(found)

    def _place_elsewhere(self) -> str | None:
        """Return where the next rank is, if it will never arrive."""
        other = (self._rank + 1) % self._world_size
        _, place = self._presence.of(other)
        if place.left:
            return f"rank {other} closed its engine"
        ahead = place.entered > self.activity.entered or place.group_entered > count_collectives()
        return f"rank {other} is in {place.at}" if ahead else None

    def _refuse(self, call: str, place: str) -> NoReturn:
        error = UsageError(
            f"{call} was called on rank {self._rank} while {place}: every rank must call it, so move it out of "
            "conditions such as `if accelerator.is_main_process` or `if rank == 0`"
        )
        self.report_error(error, final=True)  # the other ranks will not raise the same error
        raise error

    def _serve(self) -> None:
        try:
            while self.failed is None:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._alarm is not None or self.state is not WatchState.WATCHING, self._presence.pause_s
                    )
                    leaves = self.state is WatchState.LEAVING and self._alarm is None
                if leaves:
                    self._presence.leave()
                    return
                if (lost := self._presence.look()) is not None:
                    found = self._presence.with_stack(lost)
                    with self._changed:
                        self._alarm = self._alarm or found
                if self._alarm is not None or self.board.read(f"alarm/{self._incident}"):
                    self._resolve()
                    self._incident += 1
        except RuntimeError:
            # The board is lost, with the process that hosts it. Calls that need other ranks will fail.
            if self._alarm is not None:
                self._break_without_board()
        finally:
            with self._changed:
                if self.state in _THREAD_DECIDES:
                    self.state = WatchState.LEFT
                self._changed.notify_all()

    def _resolve(self) -> None:
        """Report until the outcome of the incident is clear, then act on it."""
        number, started = self._incident, time.monotonic()
        pause_s = _MAX_PAUSE_S * max(1.0, self._world_size / 64)
        last: RankReport | None = None
        outcome: Outcome | None = None
        while True:
            alarm = self._alarm
            report = alarm or self._presence.with_stack()
            if report != last:
                self.board.post(f"report/{number}/{self._rank}", asdict(report))
                last = report
            self.board.post(f"alarm/{number}", True)
            self._reports = self._collected(number)
            outcome = judge(self._reports, self._world_size, time.monotonic() - started)
            if outcome is not None or self.board.read(f"broken/{number}"):
                break
            time.sleep(pause_s)
        if outcome is Outcome.SOUND:
            self._clear_alarm(alarm)
            return
        self.board.post(f"broken/{number}", True)
        # If this process hosts the store, keep it alive until every reporting rank has read the verdict.
        readers = sum(not report.left for report in self._reports.values())
        num_read, end = self.board.add(f"read/{number}", 1), time.monotonic() + ABSENT_S
        while self._rank == 0 and num_read < readers and time.monotonic() < end:
            time.sleep(pause_s)
            num_read = self.board.add(f"read/{number}", 0)
        self._break(self._reports)

    def _clear_alarm(self, alarm: RankReport | None) -> None:
        """End an incident that the run survived; a later alarm belongs to the next."""
        with self._changed:
            self._others_details = "\n".join(
                f"--- rank {rank}, in {report.at} ---\n{report.details.rstrip()}"
                for rank, report in self._reports.items()
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

    def _break(self, reports: Mapping[int, RankReport]) -> RankError:
        """End the run: unblock every rank waiting on this one, and vice versa."""
        with self._changed:
            if self.failed is not None:
                return self.failed
            alarm = self._alarm
            if alarm is not None:
                reports = {**reports, self._rank: alarm}
            at = reports[self._rank].at if self._rank in reports else str(self.activity)
            broken = explain(reports, self._world_size, self._rank, at)
            self.state, self.failed = WatchState.BROKEN, broken  # in this order, for readers without the lock
        if alarm is None and not self.activity.phase:
            # The script may be in its own collective, whose error would not mention this.
            _log.error("%s", str(broken).splitlines()[0])
        # End every collective that this rank is waiting in, or in which others wait for this rank.
        if self._aborts:
            torch_dist.distributed_c10d._abort_process_group()
        self.connections.cut()
        for give_up in self.when_broken:
            give_up()
        return broken

    def _break_without_board(self) -> None:
        """End the run when the store is unreachable."""
        reports = dict.fromkeys(range(self._world_size), RankReport()) | self._reports
        if self.connections.store_port is not None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            del reports[0]  # it was rank 0's process that hosted it; otherwise torchrun's, or a file
        self.connections.cut(store=True)  # the main thread, or one that saves, may wait for its answer
        self._break(reports)
