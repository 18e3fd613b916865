"""Waits for signals together with file descriptors, so that no work is done inside a handler."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Sequence
from typing import Any, Self

PASSED_ON = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name))
"""Signals that a launcher passes on to its ranks, and then waits."""


class Wakeups:
    """Notes the signals in PASSED_ON and SIGINT within a `with` block, which is entered in the main thread.

    A signal that was ignored before, as under nohup, stays ignored.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        os.set_blocking(self._read, False)
        self._before: dict[int, Any] = {}
        self._fd_before = -1
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Self:
        self._fd_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (*PASSED_ON, signal.SIGINT):
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, lambda *_: None)  # the descriptor has it
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._fd_before)
        with self._lock:
            self._closed = True
            os.close(self._read)
            os.close(self._write)

    def wake(self) -> None:
        """Have `wait` return; from any thread, and after the block without effect."""
        with self._lock, contextlib.suppress(BlockingIOError):  # full: it will return as it is
            if not self._closed:
                os.write(self._write, b"\0")

    def wait(self, timeout_s: float, others: Sequence[int] = ()) -> tuple[list[int], list[int]]:
        """Return the signals that came, and those of the descriptors `others` that can be read: once there is one, `wake`
        was called, or the time is over."""
        ready, _, _ = select.select([self._read, *others], [], [], max(0.0, timeout_s))
        came = list(os.read(self._read, 4096)) if self._read in ready else []
        # Others, such as SIGCHLD, come here too if the program has a handler of its own for them.
        return [number for number in came if number in self._before], [other for other in ready if other != self._read]
