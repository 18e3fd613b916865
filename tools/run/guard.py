"""A process that terminates the ranks of a launcher that died without doing so, for instance because it was killed.

It runs this file in a Python without packages, and reads from stdin: `rank PID` for each rank, `clear` once they have ended.
When stdin is closed, the ranks get SIGTERM, and after a grace period what remains of their process groups gets SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import Any

_POLL_INTERVAL_S = 0.05


class LauncherGuard(contextlib.AbstractContextManager["LauncherGuard"]):
    """The launcher's side of the guard process."""

    def __init__(self, grace_period_s: float) -> None:
        """`grace_period_s`: time between SIGTERM and SIGKILL."""
        self._process: Any = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(grace_period_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, pid: int) -> None:
        """Terminate a rank, which leads a process group, if this process dies."""
        self._send(f"rank {pid}\n")

    def clear(self) -> None:
        """Remove all ranks, which have ended."""
        self._send("clear\n")

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _send(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the guard was killed
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()


def _terminate_orphans(grace_period_s: float) -> None:
    pids: list[int] = []
    for line in sys.stdin:
        request, *arguments = line.split()
        pids = [*pids, int(arguments[0])] if request == "rank" else []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline_s = time.monotonic() + grace_period_s
    while any(map(_is_alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(_POLL_INTERVAL_S)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    _terminate_orphans(float(sys.argv[1]))
