"""Torch's elastic agent, with other rules for how ranks end.

[Note: an agent that lets ranks end by themselves]
Torch's agent ends all ranks of a machine as soon as one has ended with a code, and stops at a signal. Ranks of zstore need
longer: they save when a signal comes and end with 75, one a little after the other, and when one fails the others find out
who it was and say so. So the agent runs in a thread of its own, in which it sets no handlers; the main thread waits for signals
and for the launcher's words and passes them on; and ranks are reported to torch as healthy until all have ended, or their
time is over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from .ending import STOPPED_EXIT_CODE, RunEnd
from .guard import LauncherGuard

INTERVAL_S = 0.05
"""Time between checks of the ranks."""


class NeverStarted(Exception):  # noqa: N818 - an end, not an error
    """The run was ended before its ranks started."""


class Agent(LocalElasticAgent):
    """Torch's agent with other rules for ending; `run` in one thread, the other public methods from another.

    See [Note: an agent that lets ranks end by themselves].
    """

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, guard: LauncherGuard, patience_s: float) -> None:
        super().__init__(spec, logs)
        self._guard = guard
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._ending = False
        """No ranks are started any more."""
        self._end_at: float | None = None
        """When ranks that still run are killed."""
        self._others_failed = False
        """Whether ranks of other machines failed: these need not be waited for."""
        self._first: int | None = None
        """Local rank of the first to fail."""
        self.came: list[int] = []
        """Signals that were passed on."""

    def pass_on(self, number: int) -> None:
        """Send a signal to every rank."""
        with self._lock:
            self.came.append(number)
            self._ending = True
            for process in self._processes():
                process.send_signal(number)  # no effect if it ended

    def end_within(self, seconds: float) -> None:
        """Kill the ranks that still run after `seconds`."""
        with self._lock:
            self._ending = True
            self._end_at = min(self._end_at or float("inf"), time.monotonic() + seconds)

    def others_failed(self) -> None:
        """End the ranks as after a failure on this machine."""
        self._others_failed = True
        self.end_within(self._patience_s)

    def may_leave(self) -> bool:
        """Return whether nothing is left to do here, though torch's agent may still wait for other machines."""
        with self._lock:
            if not self._ending or any(process.poll() is None for process in self._processes()):
                return False
            late = self._end_at is not None and time.monotonic() > self._end_at
            return self._pcontext is None or self._others_failed or late

    def ended(self) -> RunEnd:
        """Return how the ranks ended, by their names."""
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        codes = [process.poll() for process in self._processes()]
        return RunEnd(
            codes={f"rank {rank}": code for rank, code in zip(ranks, codes, strict=False) if code is not None},
            first=None if self._first is None else f"rank {ranks[self._first]}",
            came=tuple(self.came),
        )

    def _processes(self) -> list[Any]:
        """The ranks' processes by local rank; none before they start."""
        handlers: Any = getattr(self._pcontext, "subprocess_handlers", {})
        return [handlers[local_rank].proc for local_rank in sorted(handlers)]

    # -- called by torch's agent, in its thread ------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with self._lock:
            if self._ending:
                raise NeverStarted
            self._first = self._end_at = None
            with _told(self._guard):
                pids: dict[int, Any] = super()._start_workers(worker_group)
            self._guard.watch(pids.values())
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        processes = self._processes()
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0, STOPPED_EXIT_CODE)]
        with self._lock:
            if failed and self._first is None:
                self._first = failed[0]
                self._end_at = min(self._end_at or float("inf"), time.monotonic() + self._patience_s)
            if self._ending:
                self._remaining_restarts = 0
            late = self._end_at is not None and time.monotonic() > self._end_at
        if None in codes:
            if late:
                self._kill(processes)
            return RunResult(state=WorkerState.HEALTHY)
        if not failed:
            nothing = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=nothing)
        found: RunResult = super()._monitor_workers(worker_group)
        return found

    @staticmethod
    def _kill(processes: list[Any]) -> None:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _told(guard: LauncherGuard) -> Iterator[None]:
    """Tell the guard of each rank as it starts: this process may be killed before torch's agent has started the others."""
    module: Any = subprocess_handler
    popen = module.Popen

    def start(*args: Any, **options: Any) -> Any:
        process = popen(*args, **options)
        guard.add(process.pid)
        return process

    module.Popen = start
    try:
        yield
    finally:
        module.Popen = popen


@contextlib.contextmanager
def agent(spec: WorkerSpec, patience_s: float) -> Iterator[Agent]:
    """Yield an agent for `spec`; at the end no rank of it runs any more, however the block ends."""
    if "LOGLEVEL" not in os.environ:
        # It would log that it sets no handlers, and how ranks ended: we say that ourselves.
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    guard = LauncherGuard(patience_s)
    with tempfile.TemporaryDirectory(prefix="zstore-run-", ignore_cleanup_errors=True) as logs:
        one = Agent(spec, DefaultLogsSpecs(log_dir=logs), guard, patience_s)
        try:
            yield one
        finally:
            one.end_within(0)
            one._kill(one._processes())
            guard.close()
