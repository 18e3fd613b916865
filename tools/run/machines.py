"""Ranks on several machines: ssh starts this module's `main` on each, and says on its stdin what to do.

The first line is the job, as JSON; each that follows is the number of a signal, SIGKILL to end the ranks at once. The end of
the lines means that the launcher or the connection is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from pydantic import TypeAdapter

from zstore.errors import UsageError, ZstoreError

from .ranks import Control, RunEnd, RunJob, catching_signals, run_ranks, supervise

_SLACK_S = 10.0
"""Time for the way to a machine and back, beyond the time that its ranks have."""


class _Machine(subprocess.Popen[bytes]):
    """The ssh that runs the ranks of a machine."""

    def __init__(self, job: RunJob) -> None:
        # A session of its own: Ctrl-C in a terminal is for this process, which passes it on.
        super().__init__(job.ssh, stdin=subprocess.PIPE, start_new_session=True)
        self._killed_s: float | None = None
        self._tell(json.dumps(dataclasses.asdict(job)))

    def send_signal(self, number: int) -> None:
        """Pass a signal on to its ranks."""
        self._tell(str(number))

    def kill(self) -> None:
        """End its ranks, and after a while the connection: the other end sees that if it did not get the word."""
        if self._killed_s is None:
            self._killed_s = time.monotonic()
            self._tell(str(int(signal.SIGKILL)))
        elif time.monotonic() > self._killed_s + _SLACK_S:
            super().send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End the connection."""
        if self.stdin is not None:
            with contextlib.suppress(OSError):
                self.stdin.close()
        super().send_signal(signal.SIGTERM)
        self.wait()

    def _tell(self, line: str) -> None:
        if self.stdin is not None and self.poll() is None:
            with contextlib.suppress(OSError):  # it is ending
                self.stdin.write(f"{line}\n".encode())
                self.stdin.flush()


def run_machines(jobs: Sequence[RunJob]) -> RunEnd:
    """Run `jobs` over ssh and return how they ended, by machine; call it in the main thread.

    When this process dies or loses a machine, the ranks there end: their side's stdin ends. Raises UsageError if ssh is not
    installed.
    """
    machines: dict[str, _Machine] = {}
    with catching_signals() as arrived:
        try:
            for job in jobs:
                machines[job.machine] = _Machine(job)
            return supervise(machines, arrived, jobs[0].shutdown_timeout_s + _SLACK_S)
        except FileNotFoundError as error:
            raise UsageError(f"no program {jobs[0].ssh[0]!r} on PATH, which reaches the other machines") from error
        finally:
            for machine in machines.values():
                machine.close()


def main() -> int:
    """Run the ranks of this machine as the launcher says on stdin; return the exit code."""
    # The ranks' stdin is empty: this process's input is not for them.
    control = Control(os.dup(0))
    first: list[str] = []
    while not first:
        first = control.take()
        if control.lost:
            return 1
    job = TypeAdapter(RunJob).validate_json(first[0])
    try:
        ended = run_ranks(job, control)
    except (ZstoreError, OSError) as error:
        print(f"zstore: {job.machine}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    ended.say(job.machine)
    return ended.exit_code
