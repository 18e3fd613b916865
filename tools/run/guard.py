"""A process beside a launcher that ends its ranks when the launcher dies without doing so, killed for instance.

It runs as a file, in a Python without packages, and reads on stdin: `rank PID` for each rank, `forget` once they ended.
When stdin ends, the ranks get SIGTERM, and after a while the rest of their process groups gets SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

_LOOK_S = 0.05


class LauncherGuard(contextlib.AbstractContextManager["LauncherGuard"]):
    """The launcher's side."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: how long the ranks may take after SIGTERM."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(patience_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, pid: int) -> None:
        """End this rank, the leader of a process group, if this process dies."""
        self._tell(f"rank {pid}\n")

    def forget(self) -> None:
        """Let go of the ranks."""
        self._tell("forget\n")

    def __exit__(self, *_: object) -> None:
        stream = self._process.stdin
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
        self._process.wait()

    def _tell(self, text: str) -> None:
        stream = self._process.stdin
        if stream is not None:
            with contextlib.suppress(OSError):  # it was ended from outside
                stream.write(text.encode())
                stream.flush()


def _stand_by(patience_s: float) -> None:
    ranks: list[int] = []
    for line in sys.stdin:
        word, *rest = line.split()
        ranks = [*ranks, int(rest[0])] if word == "rank" else []
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + patience_s
    while any(map(_is_there, ranks)) and time.monotonic() < end:
        time.sleep(_LOOK_S)
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    _stand_by(float(sys.argv[1]))
