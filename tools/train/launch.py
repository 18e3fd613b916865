"""Starts the processes of a run on this machine, forwards signals to them, and turns their exit codes into one."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from zstore.errors import ZstoreError

STOPPED_EXIT_CODE = 75
"""Of ranks that saved and stopped because of a signal; the engine's."""

_LAUNCHER = "ZSTORE_LAUNCHER"
"""Variable with the process id of the launcher."""
_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.05
_END_WELL_S = 20.0
"""How long ranks may take to exit by themselves once one failed: they exchange their errors meanwhile."""
_PASSED_ON = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name))


def launch(command: Sequence[str], num_ranks: int) -> None:
    """Run `command` in `num_ranks` processes of one group, each with the variables that torchrun sets; return when all
    ended well.

    SIGTERM, SIGUSR1 and SIGHUP go to every rank. Raises SystemExit with code 75 where the ranks saved and stopped because
    of one, with 128 and the signal's number where one ended them, and ZstoreError where a rank failed.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # Here and not in rank 0: the port is free, and the store outlives every rank.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    Ranks(command, num_ranks, store.port).wait()


def end_with_launcher() -> None:
    """Have this rank get SIGTERM when the process that launched it dies, if there is one (Linux)."""
    launcher = os.environ.get(_LAUNCHER)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if str(os.getppid()) != launcher:  # it died before
        os.kill(os.getpid(), signal.SIGTERM)


class Ranks:
    """The processes, and the signals that came for them."""

    def __init__(self, command: Sequence[str], num_ranks: int, port: int) -> None:
        self._came: list[int] = []
        self._stopped_at: float | None = None
        """When Ctrl-C came, or the first rank failed."""
        # Before they start: a signal that comes now must reach them.
        self._processes: list[subprocess.Popen[bytes]] = []
        self._before = {number: signal.signal(number, self._pass_on) for number in (*_PASSED_ON, signal.SIGINT)}
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            _LAUNCHER: str(os.getpid()),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks))),
        }
        for rank in range(num_ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._processes.append(subprocess.Popen(command, env=os.environ | shared | own))
            self._signal([number for number in self._came if number != signal.SIGINT], self._processes[-1:])

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)
        if number == signal.SIGINT:
            # From a terminal it reached the ranks as well: they are told once more only where they stay.
            self._stopped_at = self._stopped_at or time.monotonic()
        else:
            self._signal([number], self._processes)

    @staticmethod
    def _signal(numbers: Sequence[int], processes: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            for number in numbers:
                process.send_signal(number)  # nothing where it ended

    def wait(self) -> None:
        """Wait until all ended; see `launch`."""
        try:
            while any(process.poll() is None for process in self._processes):
                self._end_soon()
                time.sleep(_LOOK_S)
        finally:
            self._signal([signal.SIGKILL], self._processes)
            for number, handler in self._before.items():
                signal.signal(number, handler)
        self._judge([process.returncode for process in self._processes])

    def _end_soon(self) -> None:
        """Once a rank failed, or Ctrl-C came, end those that do not end by themselves."""
        if any(process.poll() not in (None, 0, STOPPED_EXIT_CODE) for process in self._processes):
            self._stopped_at = self._stopped_at or time.monotonic()
        if self._stopped_at is not None and time.monotonic() - self._stopped_at > _END_WELL_S:
            again = signal.SIGINT in self._came and self._came.count(signal.SIGINT) < 2
            self._signal([signal.SIGINT if again else signal.SIGKILL], self._processes)
            self._came += [signal.SIGINT] * again
            self._stopped_at = time.monotonic()

    def _judge(self, codes: Sequence[int]) -> None:
        if not any(codes):
            return
        if set(codes) <= {0, STOPPED_EXIT_CODE}:
            raise SystemExit(STOPPED_EXIT_CODE)
        if self._came:
            number = self._came[-1]
            name = signal.Signals(number).name
            print(f"zstore: stopped by {name}; committed checkpoints remain valid", file=sys.stderr)
            raise SystemExit(128 + number)
        failed = [str(rank) for rank, code in enumerate(codes) if code]
        where = f"ranks {', '.join(failed)}" if failed[1:] else f"rank {failed[0]}"
        raise ZstoreError(f"training failed on {where}; see the error above")
