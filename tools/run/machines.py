"""Ranks on several machines: starts ssh for each, passes signals on and turns their ends into one."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Sequence

from zstore.errors import UsageError

from .ending import STOPPED_EXIT_CODE, RunEnd
from .job import ALIVE_EVERY_S
from .plan import Start
from .signals import Wakeups

_LOOK_S = 0.1
_SSH_FAILED = 255
"""Exit code of ssh if it failed itself."""
_SLACK_S = 10.0
"""Time for the way to a machine and back, beyond the time that its ranks have."""


def run_machines(starts: Sequence[Start]) -> RunEnd:
    """Run what `starts` say and return how their programs ended, by machine; call it in the main thread.

    When this process dies or loses a machine, the agents there end their ranks: their stdin ends. Raises UsageError if
    ssh is not installed.
    """
    with Wakeups() as wakeups, contextlib.ExitStack() as stack:
        machines = Machines(stack)
        # A stopped launcher would seem to be gone.
        before = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        stack.callback(signal.signal, signal.SIGTSTP, before)
        for start in starts:
            machines.start(start)
        while machines.are_running():
            came, _ = wakeups.wait(_LOOK_S)
            for number in came:
                machines.pass_on(number)
            machines.look()
        return machines.ended()


class Machines:
    """The programs that reach the machines."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._patience_s = 0.0
        self._came: list[int] = []
        self._first: str | None = None
        self._kill_at = float("inf")
        self._told_kill = False
        self._alive_at = 0.0

    def start(self, start: Start) -> None:
        """Start one and give it its job."""
        self._patience_s = start.job.shutdown_timeout_s
        try:
            # A session of its own: Ctrl-C in a terminal is for this process, which passes it on.
            process = subprocess.Popen(start.command, stdin=subprocess.PIPE, start_new_session=True)
        except FileNotFoundError as error:
            raise UsageError(f"no program {start.command[0]!r} on PATH, which reaches the other machines") from error
        self._processes[start.name] = process
        self._stack.callback(_end, process)
        _tell(process, start.job.to_json())

    def are_running(self) -> bool:
        """Return whether any runs."""
        return any(process.poll() is None for process in self._processes.values())

    def pass_on(self, number: int) -> None:
        """Pass a signal on to the ranks; the second SIGINT kills them."""
        if number == signal.SIGINT and number in self._came:
            self._kill_at = 0.0
        elif number == signal.SIGINT:
            self._end_by(self._patience_s + _SLACK_S)
        self._came.append(number)
        self._tell(f"signal {number}")

    def look(self) -> None:
        """Tell the agents that this process is alive, note who failed, and end programs that are overdue."""
        now = time.monotonic()
        if now > self._alive_at:
            self._alive_at = now + ALIVE_EVERY_S
            self._tell("alive")
        codes = {name: process.poll() for name, process in self._processes.items()}
        failed = [name for name, code in codes.items() if code not in (None, 0, STOPPED_EXIT_CODE)]
        if failed and self._first is None:
            self._first = failed[0]
            self._tell("failed")
            self._end_by(self._patience_s + _SLACK_S)
        if now > self._kill_at:
            for process in self._processes.values() if self._told_kill else ():
                # The connection ends with it: the agent sees that if it did not get the word.
                process.terminate()
            self._tell("kill")
            self._told_kill, self._kill_at = True, now + _SLACK_S

    def _end_by(self, seconds: float) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def _tell(self, word: str) -> None:
        for process in self._processes.values():
            _tell(process, word)

    def ended(self) -> RunEnd:
        """Return how they ended."""
        codes = {name: process.wait() for name, process in self._processes.items()}
        lost = self._first is not None and codes[self._first] == _SSH_FAILED
        hint = "above: ssh could not connect, or lost the connection" if lost else "its output above"
        return RunEnd(codes=codes, first=self._first, came=tuple(self._came), hint=hint)


def _tell(process: subprocess.Popen[bytes], line: str) -> None:
    stream = process.stdin
    if stream is not None and process.poll() is None:
        with contextlib.suppress(OSError):  # it is ending
            stream.write(f"{line}\n".encode())
            stream.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    stream = process.stdin
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.close()
    if process.poll() is None:
        process.terminate()
    process.wait()
