"""A process that ends the ranks of a launcher that died without doing so, because it was killed for instance.

It runs this file in a Python without packages, and reads on stdin: `rank PID` for each rank, `forget` once they ended.
When stdin ends, the ranks get SIGTERM, and after a grace period what is left of their process groups gets SIGKILL.
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
    """The launcher's side."""

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
        """Let a rank, the leader of a process group, end if this process dies."""
        self._send(f"rank {pid}\n")

    def forget(self) -> None:
        """Forget the ranks, which ended."""
        self._send("forget\n")

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _send(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the guard was killed
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()


def _end_orphans(grace_period_s: float) -> None:
    pids: list[int] = []
    for line in sys.stdin:
        word, *rest = line.split()
        pids = [*pids, int(rest[0])] if word == "rank" else []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + grace_period_s
    while any(map(_is_alive, pids)) and time.monotonic() < end:
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
    _end_orphans(float(sys.argv[1]))
