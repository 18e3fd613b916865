"""Signals: those that ask a run to save and stop, as a scheduler sends them before it takes the machine away, and Ctrl-C at
a moment that does no harm.

[Note: stopping by a signal]
A handler only notes the signal. It is one of `World.messages`, which travel with what the ranks exchange in each step anyway,
so that after the same step all of them know, whichever rank was signalled. Then the state is saved, and the process ends
with code 75, which says: run me again. A second signal takes effect at once, as if nobody handled it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from zstore.errors import UsageError
from zstore.ranks.world import World

STOPPED_EXIT_CODE = 75
"""Exit code of a run that saved and stopped because of a signal: EX_TEMPFAIL, try again."""

STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class StopSignals:
    """Handles signals for the length of a run. See [Note: stopping by a signal]."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pid = os.getpid()
        self._noted: int | None = None  # the signal that this rank got
        self._before: dict[int, Any] = {}

    def watch(self, numbers: Iterable[int] = STOP_SIGNALS) -> None:
        """Note these signals from now on in place of ending the process. Raises UsageError outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("signals can be watched from the main thread only: call this where the script starts")
        self._world.messages["signal"] = lambda: self._noted
        for number in numbers:
            if number not in self._before:
                self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A forked child, as a data loader's worker, has the handler but not the run.
        if os.getpid() != self._pid or self._noted is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._noted = number
        name = signal.Signals(number).name
        text = f"zstore: rank {self._world.rank}: {name}: will stop after this step; a second signal stops at once\n"
        # Not print: this may come in the middle of one.
        os.write(2, text.encode())

    @property
    def requested(self) -> signal.Signals | None:
        """The signal that some rank got, once all ranks know of it."""
        heard = self._world.received.get("signal", [])
        number = self._noted if self._world.world_size == 1 else max(heard, default=None)
        return None if number is None else signal.Signals(number)

    def close(self) -> None:
        """Restore the former handlers of the signals; a second call does nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        before, self._before = self._before, {}
        for number, handler in before.items():
            # None: the former handler was not Python's.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Let a SIGINT that comes during the block take effect at its end; for blocks of milliseconds.

    Python runs handlers in the main thread alone, so in other threads this does nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
