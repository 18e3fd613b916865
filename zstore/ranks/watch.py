"""Failure detection: when one rank fails, all ranks stop promptly and report the cause.

[Note: the watch]
Each rank has a thread, its watch, which polls a message board twice a second.
- **A rank reports** an error that escapes from a call (`report_error`) or a failed collective (`collective_failed`); its
  watch reports a neighbour whose heartbeats have stopped. This raises an alarm on the board: every watch then posts a
  report, whatever its main thread is doing.
- **Every watch decides** by itself. All reach the same verdict, because `judge` depends only on the reports. If the run is
  broken, the watch cuts the connections: a rank waiting in a collective gets an error immediately, and raises RankError.
- **The reporting rank waits** until its watch has decided, at most `_DECISION_TIMEOUT_S`. Concurrent reports are merged; a
  report that arrives after the decision starts a new incident.

Nothing hangs afterwards, not even process exit. Missed heartbeats are counted in the observer's own polls, so that a
machine that was suspended reports no loss. A slow rank is not a failure; a rank that hangs while its watch runs is caught
by the process group's own timeout. Only the watch's thread uses `_incident`, and `Heartbeats` except for `of`; what it
shares with the rank's threads is read without a lock, and changed while holding `_changed`.

[Note: calls of all ranks]
If two ranks enter different collectives, these fail with the backend's own error, and gloo aborts the process. Scripts
written for replicated models save only on the main process, so ranks synchronize on the board before the first collective
of a save or a load. A waiting rank checks the next rank: if that has closed its engine, or entered a collective that this
rank has not, it will never arrive. If only some ranks make a call, at least one of them has a neighbour that does not,
and its error stops all ranks.
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
    AGREEMENT_TIMEOUT_S,
    POLL_INTERVAL_S,
    RESPONSE_TIMEOUT_S,
    Activity,
    Heartbeats,
    Outcome,
    RankReport,
    count_collectives,
    explain,
    judge,
)

_log = logging.getLogger("zstore")

_MAX_POLL_S = 0.05
_MIN_POLL_S = 0.001
_DECISION_TIMEOUT_S = RESPONSE_TIMEOUT_S + AGREEMENT_TIMEOUT_S + 5


class WatchState(Enum):
    """What this rank knows about the run."""

    NOT_STARTED = "unwatched"
    """Not started: an error affects only this rank's call."""
    WATCHING = "watching"
    """The thread is running: it polls, and decides on alarms."""
    CLOSING = "closing"
    """`close` was called: the thread decides on a pending alarm, and ends."""
    CLOSED = "closed"
    """The thread has ended, or could not be started. No thread can decide on a report, so any report breaks the run."""
    BROKEN = "broken"
    """The run has ended with the error `failed`, which no call of this rank has raised yet."""
    RAISED = "raised"
    """A call of this rank has raised `failed`; further calls raise UsageError."""


_DECIDING = (WatchState.WATCHING, WatchState.CLOSING)


class Watch:
    """This rank's part of the watch; see the notes. Before `begin`, errors affect only this rank."""

    board: Board
    _heartbeats: Heartbeats
    _rank: int
    _world_size: int
    _aborts: bool

    def __init__(self) -> None:
        self.state = WatchState.NOT_STARTED
        self.failed: RankError | None = None
        """The error that ended the run, in the states BROKEN and RAISED."""
        self.activity = Activity()
        """What this rank is currently doing."""
        self.connections = Connections()
        """Connections to the other ranks, of all process groups."""
        self.on_broken: list[Callable[[], None]] = []
        """Cleanup callbacks, called in the watch's thread when the run is broken."""
        self.error_is_shared = False
        """Whether all ranks know the error about to be raised in the current call, so that it is not reported as a failure."""
        self._incident = self._num_barriers = 0
        self._changed = threading.Condition()
        self._alarm: RankReport | None = None
        """This rank's report, while it waits for the outcome."""
        self._reports: dict[int, RankReport] = {}
        """Reports of the current incident."""
        self._other_reports = ""
        """Text of the other ranks' reports in the last incident that the run survived."""
        self._threads: list[threading.Thread] = []

    def begin(
        self, gather: Callable[[Any], list[Any]], rank: int, world_size: int, *, aborts: bool, timeout_s: float | None
    ) -> None:
        """Start to watch (all ranks); `gather` is an all-gather. To interrupt collectives, a broken run's process group is
        aborted if `aborts`; its connections are shut down in any case. `timeout_s` is the heartbeat timeout, or None."""
        self._rank, self._world_size, self._aborts = rank, world_size, aborts
        self.connections.store_port = store_port()
        # Identify the connections before a rank can fail.
        rows = gather([uuid.uuid4().hex, self.connections.list_endpoints()])
        self.connections.learn([listed for _, listed in rows], rank)
        self.board = Board.connect(f"watch/{rows[0][0]}")
        if timeout_s is not None:
            self.connections.limit_silence(timeout_s)
        self._heartbeats = Heartbeats(self.board, rank, world_size, self.activity, timeout_s)
        self.state = WatchState.WATCHING
        self._threads = start_threads(1, self._run, f"zstore-watch-{rank}")
        if not self._threads:  # the interpreter is shutting down
            self.state = WatchState.CLOSED

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

    def report_error(self, error: BaseException, *, is_fatal: bool = False) -> None:
        """Report an error that ends a call on this rank, and return once the watch has decided.

        Does nothing if the error is shared by all ranks. `is_fatal`: no handler will catch it.
        """
        if self.state is WatchState.NOT_STARTED or self.error_is_shared or error is self.failed:
            return
        is_fatal = is_fatal or not isinstance(error, Exception)
        if self.failed is None:
            cause = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
            details = "".join(traceback.format_exception(error))
            self._raise_alarm(self.activity.report(cause=cause, details=details, is_fatal=is_fatal))
        if self.failed is None and isinstance(error, RankError):
            # The error may name only the failed rank, without its error.
            error.add_note(self._other_reports)
        if self.failed is not None:
            if self.state is WatchState.BROKEN and set(self.failed.failures) - {self._rank}:
                error.add_note(str(self.failed))
            self.state = WatchState.RAISED

    def collective_failed(self, error: BaseException) -> RankError:
        """Return the error to raise for a collective that failed."""
        if self.failed is None:
            self._raise_alarm(self.activity.report(connection_error=f"{type(error).__name__}: {error}"))
        broken = self._stop_run({})  # if it is not broken, all other ranks have closed their engines
        self.state = WatchState.RAISED
        return broken

    def close(self) -> None:
        """End the watch; a second call does nothing."""
        with self._changed:
            if self.state is WatchState.WATCHING:
                self.state = WatchState.CLOSING
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=2 * RESPONSE_TIMEOUT_S)

    def report_uncaught(self) -> None:
        """Report the uncaught error that ends the interpreter, if any."""
        if not threading.main_thread().is_alive() and self.state in _DECIDING:
            uncaught = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
            if uncaught is not None:
                self.report_error(uncaught, is_fatal=True)

    def _raise_alarm(self, report: RankReport) -> None:
        with self._changed:
            self._alarm = report if self._alarm is None else self._alarm.merged(report)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._alarm is None or self.state not in _DECIDING, _DECISION_TIMEOUT_S)
            unanswered = self._alarm if self.failed is None else None
        if unanswered is not None:
            self._stop_run_without_board()

    def synchronize(self, call: str) -> None:
        """Return once all ranks are in `call` (all ranks). Raises UsageError if another rank will never make this call."""
        self._num_barriers += 1
        key = f"meeting/{self._num_barriers}"
        # If the board fails, its host process has ended: the call's own collectives raise a better error.
        with suppress(torch_dist.DistError):
            if self.board.add(f"{key}/ranks", 1) == self._world_size:
                self.board.post(f"{key}/call", call)
            elif (found := self._wait_for_last_rank(f"{key}/call", call)) not in (None, call):
                self._raise_misplaced_call(call, f"another rank is in {found}")

    def _wait_for_last_rank(self, key: str, call: str) -> str | None:
        """Wait until the last rank has posted its call, and return that. None if a connection to another rank ended, or at
        the timeout of collectives: then the call's own collectives report the failure."""
        started = time.monotonic()
        pause_s, next_check = _MIN_POLL_S, started + POLL_INTERVAL_S
        connections = self.connections.still_open()
        while (found := self.board.read(key)) is None:
            if time.monotonic() > next_check:
                self.raise_if_broken()
                location = self._neighbour_location()
                if location is not None and self.board.read(key) is None:
                    self._raise_misplaced_call(call, location)
                is_late = time.monotonic() - started > torch_dist.default_pg_timeout.total_seconds()
                if is_late or connections - self.connections.still_open():
                    return None
                next_check = time.monotonic() + POLL_INTERVAL_S
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)
        return str(found)

    def _neighbour_location(self) -> str | None:
        """Return what the next rank is doing, if it will never arrive."""
        neighbour = (self._rank + 1) % self._world_size
        _, report = self._heartbeats.of(neighbour)
        if report.is_closed:
            return f"rank {neighbour} closed its engine"
        is_ahead = report.num_collectives > self.activity.num_collectives
        is_ahead = is_ahead or report.num_group_collectives > count_collectives()
        return f"rank {neighbour} is in {report.location}" if is_ahead else None

    def _raise_misplaced_call(self, call: str, location: str) -> NoReturn:
        error = UsageError(
            f"{call} was called on rank {self._rank} while {location}: every rank must call it, so move it out of "
            "conditions such as `if accelerator.is_main_process` or `if rank == 0`"
        )
        self.report_error(error, is_fatal=True)  # the other ranks will not raise the same error
        raise error

    def _run(self) -> None:
        try:
            while self.failed is None:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._alarm is not None or self.state is not WatchState.WATCHING,
                        self._heartbeats.pause_s,
                    )
                    closes = self.state is WatchState.CLOSING and self._alarm is None
                if closes:
                    self._heartbeats.leave()
                    return
                if (lost := self._heartbeats.check()) is not None:
                    report = self._heartbeats.stack_report(lost)
                    with self._changed:
                        self._alarm = self._alarm or report
                if self._alarm is not None or self.board.read(f"alarm/{self._incident}"):
                    self._resolve()
                    self._incident += 1
        except RuntimeError:
            # The board is lost with the process that hosts it. Calls that need other ranks will fail.
            if self._alarm is not None:
                self._stop_run_without_board()
        finally:
            with self._changed:
                if self.state in _DECIDING:
                    self.state = WatchState.CLOSED
                self._changed.notify_all()

    def _resolve(self) -> None:
        """Report until the outcome of the incident is known, then act on it."""
        number, started = self._incident, time.monotonic()
        pause_s = _MAX_POLL_S * max(1.0, self._world_size / 64)
        last: RankReport | None = None
        outcome: Outcome | None = None
        while True:
            alarm = self._alarm
            report = alarm or self._heartbeats.stack_report()
            if report != last:
                self.board.post(f"report/{number}/{self._rank}", asdict(report))
                last = report
            self.board.post(f"alarm/{number}", True)
            self._reports = self._read_reports(number)
            outcome = judge(self._reports, self._world_size, time.monotonic() - started)
            if outcome is not None or self.board.read(f"broken/{number}"):
                break
            time.sleep(pause_s)
        if outcome is Outcome.HEALTHY:
            self._clear_alarm(alarm)
            return
        self.board.post(f"broken/{number}", True)
        # If this process hosts the store, keep it alive until every reporting rank has read the verdict.
        readers = sum(not report.is_closed for report in self._reports.values())
        num_read, end = self.board.add(f"read/{number}", 1), time.monotonic() + RESPONSE_TIMEOUT_S
        while self._rank == 0 and num_read < readers and time.monotonic() < end:
            time.sleep(pause_s)
            num_read = self.board.add(f"read/{number}", 0)
        self._stop_run(self._reports)

    def _clear_alarm(self, alarm: RankReport | None) -> None:
        """End an incident that the run survived; a later alarm belongs to the next incident."""
        with self._changed:
            self._other_reports = "\n".join(
                f"--- rank {rank}, in {report.location} ---\n{report.details.rstrip()}"
                for rank, report in self._reports.items()
                if rank != self._rank
            )
            self._reports = {}
            if self._alarm is alarm:
                self._alarm = None
            self._changed.notify_all()

    def _read_reports(self, number: int) -> dict[int, RankReport]:
        reports: dict[int, RankReport] = {}
        for rank in range(self._world_size):
            if (report := self.board.read(f"report/{number}/{rank}")) is not None:
                reports[rank] = RankReport(**report)
            elif (report := self._heartbeats.of(rank)[1]).is_closed:
                reports[rank] = report
        return reports

    def _stop_run(self, reports: Mapping[int, RankReport]) -> RankError:
        """End the run: unblock this rank and every rank that waits for it."""
        with self._changed:
            if self.failed is not None:
                return self.failed
            alarm = self._alarm
            if alarm is not None:
                reports = {**reports, self._rank: alarm}
            location = reports[self._rank].location if self._rank in reports else str(self.activity)
            broken = explain(reports, self._world_size, self._rank, location)
            self.state, self.failed = WatchState.BROKEN, broken  # in this order, for readers without the lock
        if alarm is None and not self.activity.phase:
            # The script may be in a collective of its own, whose error would not mention this.
            _log.error("%s", str(broken).splitlines()[0])
        # End every collective in which this rank waits, or others wait for it.
        if self._aborts:
            torch_dist.distributed_c10d._abort_process_group()
        self.connections.cut()
        for callback in self.on_broken:
            callback()
        return broken

    def _stop_run_without_board(self) -> None:
        """End the run when the store is unreachable."""
        reports = dict.fromkeys(range(self._world_size), RankReport()) | self._reports
        if self.connections.store_port is not None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            del reports[0]  # rank 0's process hosted the store; otherwise torchrun does, or it is a file
        self.connections.cut(store=True)  # other threads may be waiting for its response
        self._stop_run(reports)
