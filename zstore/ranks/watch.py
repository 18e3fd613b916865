"""Watching over the ranks of a run, so that a failure of one ends all, soon and with its cause.

[Note: the watch]
Each rank has a thread that alone talks to the store of the process group: twice a second it looks whether somebody raised the
alarm, and now and then it leaves a sign of life and looks for its neighbour's. The alarm is raised by a rank with an escaped
error, with a failed collective (a process at the other end died), or whose neighbour gives no sign. Then every rank's thread
reports where its rank is, whatever its main thread does, and each comes to the same outcome (`incident`). If the run is broken,
connections are cut: whoever waits in a collective, here or elsewhere, gets its error at once and raises RankError with the
reports. Nothing hangs afterwards, not even the end of the process. Time without a sign is counted in the rank's own looks, so
that a machine that was asleep accuses nobody.

A slow rank is no failure: its thread lives. One that hangs for good while its thread lives is found by the process
group's own timeout.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
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
_MOST_SIGNS_MISSED = 9
_GONE = "it does not answer: its process was killed, or its machine is lost or stopped"


class Watch:
    """This rank's part of the watch; see [Note: the watch]. Made on all ranks in the same order.

    `store` is the process group's, `cut` ends all communication of this rank. `silent_s` is how long a rank
    may give no sign of life; None: for ever.
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
        own: Store = store.clone()  # type: ignore[attr-defined]
        self._pause_s = _PAUSE_S * max(1.0, world_size / 64)
        self._prefix = f"zstore/watch/{own.add(f'zstore/watches/{rank}', 1)}"
        self._shared = store
        self._store = self._prefixed(own)
        self._sign_s = None if silent_s is None else silent_s / _MOST_SIGNS_MISSED
        if silent_s is not None:
            give_up_after(store_port(store), silent_s)
        self._signs, self._next_sign = 0, 0.0
        self._seen: tuple[int, bytes] = (-1, b"")
        self._missed = 0
        self._last_at = self._told_at = ""
        self._incident = 0
        self._reports: dict[int, RankReport] = {}
        self._mine: RankReport | None = None
        self._what_others_said = ""
        self._changed = threading.Condition()
        self._closing = self._ended = self._agreed = self._told = False
        self._broken: RankError | None = None
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
            self._raise_alarm(
                RankReport(
                    at=str(self._activity), entered=self._activity.entered, cause=cause, details=details, final=final
                )
            )
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
            lost = f"{type(error).__name__}: {error}"
            self._raise_alarm(RankReport(at=str(self._activity), entered=self._activity.entered, lost=lost))
        self._told = True
        broken = self._broken
        if broken is None:  # every other rank is gone by itself
            broken = self._break()
        return broken

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

    def _raise_alarm(self, report: RankReport) -> None:
        with self._changed:
            self._mine = report
            self._changed.notify_all()
            answered = self._changed.wait_for(lambda: self._mine is None or self._ended, _ANSWER_S)
        if (self._ended or not answered) and not self.broken:
            self._without_store()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while self._broken is None:
                with self._changed:
                    pause_s = _LOOK_S if self._sign_s is None else min(_LOOK_S, self._sign_s)
                    self._changed.wait_for(lambda: self._closing or self._mine is not None, pause_s)
                if self._closing and self._mine is None:
                    self._store.set(f"left/{self._rank}", str(self._activity.entered))
                    return
                self._give_and_look_for_signs()
                self._say_where()
                if self._mine is not None or self._store.check([f"alarm/{self._incident}"]):
                    self._resolve()
        except RuntimeError:
            # The store is gone, with the process that held it. Calls that need the others will fail.
            if self._mine is not None:
                self._without_store()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _give_and_look_for_signs(self) -> None:
        """Leave a sign of life when it is time, and note a report if the next rank that has not left gives none."""
        now = time.monotonic()
        if self._sign_s is None or now < self._next_sign:
            return
        self._next_sign = now + self._sign_s
        self._signs += 1
        self._store.set(f"sign/{self._rank}", str(self._signs))
        others = [(self._rank + distance) % self._world_size for distance in range(1, self._world_size)]
        neighbour = next((other for other in others if not self._store.check([f"left/{other}"])), None)
        if neighbour is None:
            return
        sign = self._store.get(f"sign/{neighbour}") if self._store.check([f"sign/{neighbour}"]) else b""
        self._missed = self._missed + 1 if self._seen == (neighbour, sign) else 0
        self._seen = neighbour, sign
        if self._missed >= _MOST_SIGNS_MISSED:
            silent_s = self._sign_s * _MOST_SIGNS_MISSED
            found = self._present(lost=f"rank {neighbour} gave no sign of life for {silent_s:.0f} s")
            with self._changed:
                self._mine = self._mine or found

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
        return RankReport(at=str(self._activity), entered=self._activity.entered, details=details, lost=lost)

    def _resolve(self) -> None:
        """Report until the outcome of the incident is clear."""
        started, number = time.monotonic(), self._incident
        outcome: Outcome | None = None
        last: RankReport | None = None
        while outcome is None:
            report = self._mine or self._present()
            if report != last:
                self._store.set(f"report/{number}/{self._rank}", json.dumps(asdict(report)))
                last = report
            self._store.set(f"alarm/{number}", "1")
            self._collect(number)
            outcome = judge(self._reports, self._world_size, time.monotonic() - started)
            if outcome is None and self._store.check([f"broken/{number}"]):
                outcome = Outcome.BROKEN
            if outcome is None:
                time.sleep(self._pause_s)
        if outcome is Outcome.SOUND:
            others = {rank: report for rank, report in self._reports.items() if rank != self._rank}
            self._what_others_said = "\n".join(
                f"--- rank {rank}, in {report.at} ---\n{report.details.rstrip()}" for rank, report in others.items()
            )
        if outcome is Outcome.BROKEN:
            self._store.set(f"broken/{number}", "1")
            self._wait_for_readers(number)
            self._break()
        with self._changed:
            self._incident += 1
            self._reports, self._mine = {}, None
            self._changed.notify_all()

    def _collect(self, number: int) -> None:
        for rank in range(self._world_size):
            if self._store.check([f"report/{number}/{rank}"]):
                self._reports[rank] = RankReport(**json.loads(self._store.get(f"report/{number}/{rank}")))
            elif self._store.check([f"left/{rank}"]):
                entered = int(self._store.get(f"left/{rank}"))
                self._reports[rank] = RankReport(at="the end", entered=entered, left=True)

    def _wait_for_readers(self, number: int) -> None:
        """Keep the store, which may be in this process, until all that reported have read."""
        self._store.add(f"read/{number}", 1)
        end = time.monotonic() + ABSENT_S
        readers = sum(not report.left for report in self._reports.values())
        while time.monotonic() < end and self._store.add(f"read/{number}", 0) < readers:
            time.sleep(self._pause_s)

    def _break(self) -> RankError:
        """End the run: nobody waits for this rank any more, nor this rank for anybody."""
        reports = dict(self._reports)
        if self._mine is not None:
            reports[self._rank] = self._mine
        at = reports[self._rank].at if self._rank in reports else str(self._activity)
        broken = self._broken = explain(reports, self._world_size, self._rank, at, _GONE)
        if self._mine is None and not self._activity.phase:
            # Perhaps in a collective of the training loop, whose error does not say so.
            _log.error("%s", str(broken).splitlines()[0])
        self._cut()
        return broken

    def _without_store(self) -> None:
        """End the run when nobody can be asked for the cause."""
        unknown = RankReport(at="an unknown place", entered=0)
        self._reports = dict.fromkeys(range(self._world_size), unknown) | self._reports
        if _in_rank_0(self._store):
            del self._reports[0]
        cut_to(store_port(self._shared))  # the main thread, or one that saves, may wait for its answer
        self._break()


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
