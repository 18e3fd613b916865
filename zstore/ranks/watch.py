"""Watching over the ranks of a run, so that a failure of one ends all, soon and with its cause.

[Note: the watch]
Each rank has a thread that alone talks to the store of the process group: twice a second it looks whether somebody raised the
alarm, and now and then it sends a heartbeat and looks for its neighbour's. The alarm is raised by a rank with an escaped
error, with a failed collective (a process at the other end died), or whose neighbour sends no heartbeat. Then every rank's
thread reports where its rank is, whatever its main thread does, and each comes to the same outcome (`incident`). If the run is
broken, connections are cut: whoever waits in a collective, here or elsewhere, gets its error at once and raises RankError with
the reports. Nothing hangs afterwards, not even the end of the process. Time without a heartbeat is counted in the rank's own
looks, so that a machine that was asleep reports no loss.

A slow rank is no failure: its thread lives. One that hangs for good while its thread lives is found by the process
group's own timeout.

[Note: the watch's threads]
A thread of the rank (the trainer's; any that has a collective fail) hands its report over as `_alarm`, and waits until it was
answered: `_alarm` is None then, or the run is broken, or the watch's thread ended. Reports that meet are joined; one that comes
while the outcome of another is clear already is the next incident's.

    the watch's thread alone    `_store`, `_heartbeats`, `_last_at`, `_told_at`, `_incident`
    all, under `_changed`       `_alarm`, `_what_others_said`, `_closing`, `_ended`, `_broken`, which is set once
    all, without it             `_broken` and `_reports` are read, as wholes; `_agreed` and `_told` choose an error's text
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch.distributed as torch_dist

from ..errors import RankError, UsageError
from ..io.closing import start_threads
from .connections import cut_to, give_up_after
from .incident import ABSENT_S, SAME_S, Activity, Outcome, RankReport, explain, judge

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_log = logging.getLogger("zstore")

_LOOK_S = 0.5
_PAUSE_S = 0.05
_ANSWER_S = ABSENT_S + SAME_S + 5
_MOST_MISSED = 9
"""Heartbeats after which a rank counts as lost."""
_GONE = "it does not answer: its process was killed, or its machine is lost or stopped"


class Watch:
    """This rank's part of the watch; see both notes. Made on all ranks in the same order.

    `store` is the process group's, `cut` ends all communication of this rank. `silent_s` is how long a rank
    may send no heartbeat; None: for ever.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        activity: Activity,
        store: Store,
        cut: Callable[[], None],
        silent_s: float | None,
    ) -> None:
        self._rank, self._world_size, self._activity, self._cut = rank, world_size, activity, cut
        connection: Store = store.clone()  # type: ignore[attr-defined]
        self._pause_s = _PAUSE_S * max(1.0, world_size / 64)
        self._prefix = f"zstore/watch/{connection.add(f'zstore/watches/{rank}', 1)}"
        self._shared = store
        self._store = self._prefixed(connection)
        self._heartbeats: Heartbeats | None = None
        if silent_s is not None:
            give_up_after(store_port(store), silent_s)
            self._heartbeats = Heartbeats(rank, world_size, self._store, silent_s)
        self._last_at = self._told_at = ""
        self._incident = 0
        self._changed = threading.Condition()
        self._alarm: RankReport | None = None
        self._reports: dict[int, RankReport] = {}
        self._what_others_said = ""
        self._closing = self._ended = False
        self._broken: RankError | None = None
        self._agreed = self._told = False
        self._trainer = threading.get_ident()
        self._threads = start_threads(1, self._serve, f"zstore-watch-{rank}")
        if not self._threads:  # the interpreter ends
            self._ended = True

    # -- called by the rank -------------------------------------------------------------------------------------------

    def begin_call(self) -> None:
        """Begin a call that may fail on one rank; raises if the run is broken."""
        self.require_sound()
        self._agreed = False

    def agree(self) -> None:
        """Note that all ranks know of the error that is about to be raised."""
        self._agreed = True

    def require_sound(self) -> None:
        """Raise RankError, once, if the run is broken, and from then on UsageError."""
        if self._broken is None:
            return
        if not self._told:
            self._told = True
            raise self._broken
        first = str(self._broken).splitlines()[0]
        raise UsageError(
            f"the ranks of this run no longer talk to each other, since {first}. Start the processes anew and load the "
            "last checkpoint"
        )

    def require_others(self) -> None:
        """Raise RankError if the run is broken, any number of times."""
        if self._broken is not None:
            raise RankError(str(self._broken), {})

    def escaped(self, error: BaseException, *, final: bool = False) -> None:
        """Tell the others of an error that ends a call on this rank, and return once the outcome is clear.

        Errors that all ranks agreed on since the call began are no news. `final` is one that nobody will handle.
        """
        if self._agreed or error is self._broken:
            return
        final = final or not isinstance(error, Exception)
        if self._broken is None:
            cause = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
            details = "".join(traceback.format_exception(error))
            self._raise_alarm(self._report(cause=cause, details=details, final=final))
        if self._broken is None and isinstance(error, RankError):
            # It may name the rank alone, without its error.
            error.add_note(self._what_others_said)
        if self._broken is not None:
            if not self._told and set(self._broken.failures) - {self._rank}:
                error.add_note(str(self._broken))
            self._told = True

    def lost(self, error: BaseException) -> RankError:
        """Return the error to raise for a collective that failed."""
        if self._broken is None:
            self._raise_alarm(self._report(lost=f"{type(error).__name__}: {error}"))
        self._told = True
        return self._break({})  # if it is not broken, every other rank is gone by itself

    def close(self) -> None:
        """End the watch."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=2 * ABSENT_S)

    def tell_uncaught(self) -> None:
        """Tell the others of the error that ends the interpreter, if one does."""
        if not threading.main_thread().is_alive() and not self._ended:
            uncaught = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
            if uncaught is not None:
                self.escaped(uncaught, final=True)

    @property
    def broken(self) -> bool:
        """Whether the run is over."""
        return self._broken is not None

    @property
    def told(self) -> bool:
        """Whether the run is over, and this rank raised why."""
        return self._broken is not None and self._told

    def shared_store(self) -> Store:
        """Return the store with the watch's keys, for the main thread."""
        return self._prefixed(self._shared)

    def entered(self) -> tuple[int, int]:
        """Return how many collectives this rank has entered: the engine's own, and any others in the process group of all
        ranks, as far as that counts them."""
        return self._activity.entered, _entered_by_anybody()

    def _prefixed(self, store: Store) -> Store:
        prefixed: Store = torch_dist.PrefixStore(self._prefix, store)  # type: ignore[attr-defined]
        return prefixed

    def _report(self, **more: Any) -> RankReport:
        return RankReport(at=str(self._activity), entered=self._activity.entered, **more)

    def _raise_alarm(self, report: RankReport) -> None:
        with self._changed:
            self._alarm = report if self._alarm is None else self._alarm.joined(report)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._alarm is None or self._ended, _ANSWER_S)
            unanswered = self._alarm if self._broken is None else None
        if unanswered is not None:
            self._without_store()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            pause_s = _LOOK_S if self._heartbeats is None else min(_LOOK_S, self._heartbeats.period_s)
            while self._broken is None:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or self._alarm is not None, pause_s)
                    leaves = self._closing and self._alarm is None
                if leaves:
                    self._store.set(f"left/{self._rank}", str(self._activity.entered))
                    return
                if self._heartbeats is not None and (lost := self._heartbeats.look()) is not None:
                    found = self._present(lost=lost)
                    with self._changed:
                        self._alarm = self._alarm or found
                self._say_where()
                if self._alarm is not None or self._store.check([f"alarm/{self._incident}"]):
                    self._resolve(self._incident)
                    self._incident += 1
        except RuntimeError:
            # The store is gone, with the process that held it. Calls that need the others will fail.
            if self._alarm is not None:
                self._without_store()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _say_where(self) -> None:
        """Post the place of this rank, once for each place that it stays at; see `meeting`."""
        where, foreign = str(self._activity), None
        if not self._activity.collective and (foreign := collective_of(self._trainer)) is not None:
            where = f"{where}, collective {foreign}"
        at = json.dumps([where, foreign is not None, *self.entered()])
        if at == self._last_at != self._told_at:
            self._store.set(f"at/{self._rank}", at)
            self._told_at = at
        self._last_at = at

    def _present(self, lost: str | None = None) -> RankReport:
        """Return the present place of this rank."""
        frame = sys._current_frames().get(self._trainer)
        details = "" if frame is None else "it is at\n" + "".join(traceback.format_stack(frame))
        return self._report(details=details, lost=lost)

    def _resolve(self, number: int) -> None:
        """Report until the outcome of the incident is clear."""
        started = time.monotonic()
        last: RankReport | None = None
        while True:
            alarm = self._alarm
            report = alarm or self._present()
            if report != last:
                self._store.set(f"report/{number}/{self._rank}", json.dumps(asdict(report)))
                last = report
            self._store.set(f"alarm/{number}", "1")
            reports = self._reports = self._collected(number)
            outcome = judge(reports, self._world_size, time.monotonic() - started)
            if outcome is Outcome.BROKEN or (outcome is None and self._store.check([f"broken/{number}"])):
                self._store.set(f"broken/{number}", "1")
                self._wait_for_readers(number, sum(not report.left for report in reports.values()))
                self._break(reports)
                return
            if outcome is Outcome.SOUND:
                break
            time.sleep(self._pause_s)
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
            if self._store.check([f"report/{number}/{rank}"]):
                reports[rank] = RankReport(**json.loads(self._store.get(f"report/{number}/{rank}")))
            elif self._store.check([f"left/{rank}"]):
                entered = int(self._store.get(f"left/{rank}"))
                reports[rank] = RankReport(at="the end", entered=entered, left=True)
        return reports

    def _wait_for_readers(self, number: int, readers: int) -> None:
        """Keep the store, if it is in this process, until all that reported have read: the others ask nothing more of it."""
        self._store.add(f"read/{number}", 1)
        end = time.monotonic() + ABSENT_S
        while self._rank == 0 and time.monotonic() < end and self._store.add(f"read/{number}", 0) < readers:
            time.sleep(self._pause_s)

    # -- the end of the run, by whichever thread finds it first -------------------------------------------------------

    def _break(self, reports: Mapping[int, RankReport]) -> RankError:
        """End the run: nobody waits for this rank any more, nor this rank for anybody."""
        with self._changed:
            if self._broken is not None:
                return self._broken
            alarm = self._alarm
            if alarm is not None:
                reports = {**reports, self._rank: alarm}
            at = reports[self._rank].at if self._rank in reports else str(self._activity)
            broken = self._broken = explain(reports, self._world_size, self._rank, at, _GONE)
        if alarm is None and not self._activity.phase:
            # Perhaps in a collective of the training loop, whose error does not say so.
            _log.error("%s", str(broken).splitlines()[0])
        self._cut()
        return broken

    def _without_store(self) -> None:
        """End the run when nobody can be asked for the cause."""
        unknown = RankReport(at="an unknown place", entered=0)
        reports = dict.fromkeys(range(self._world_size), unknown) | self._reports
        if _in_rank_0(self._store):
            del reports[0]
        cut_to(store_port(self._shared))  # the main thread, or one that saves, may wait for its answer
        self._break(reports)


class Heartbeats:
    """Heartbeats of this rank, and of the next one that has not left, which counts as lost after `silent_s` without one."""

    def __init__(self, rank: int, world_size: int, store: Store, silent_s: float) -> None:
        self.period_s = silent_s / _MOST_MISSED
        self._rank, self._store = rank, store
        self._others = [(rank + distance) % world_size for distance in range(1, world_size)]
        self._sent, self._next_at = 0, 0.0
        self._seen: tuple[int, bytes] = (-1, b"")
        """The neighbour, and its latest one."""
        self._missed = 0

    def look(self) -> str | None:
        """Send one when it is time, and look for the neighbour's; return how that was lost, if it was."""
        now = time.monotonic()
        if now < self._next_at:
            return None
        self._next_at = now + self.period_s
        self._sent += 1
        self._store.set(f"heartbeat/{self._rank}", str(self._sent))
        neighbour = next((other for other in self._others if not self._store.check([f"left/{other}"])), None)
        if neighbour is None:
            return None
        key = f"heartbeat/{neighbour}"
        seen = neighbour, self._store.get(key) if self._store.check([key]) else b""
        self._missed, self._seen = self._missed + 1 if seen == self._seen else 0, seen
        lost = self._missed >= _MOST_MISSED
        return f"rank {neighbour} sent no heartbeat for {self.period_s * _MOST_MISSED:.0f} s" if lost else None


def store_port(store: Store) -> int | None:
    """Return the port of a store that is reached over TCP."""
    while isinstance(store, torch_dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    port: int | None = store.port if isinstance(store, torch_dist.TCPStore) else None  # type: ignore[attr-defined]
    return port


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


def _entered_by_anybody() -> int:
    """Return how many collectives the process group of all ranks has begun on this rank; 0 if it does not count them."""
    with suppress(RuntimeError, ValueError):
        group: Any = torch_dist.distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())
    return 0


def _in_rank_0(store: Store) -> bool:
    """Return whether rank 0's process holds the store; otherwise torchrun does, or a file."""
    return store_port(store) is not None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
