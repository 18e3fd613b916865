"""Progress of a command: a bar if stderr is a terminal, else a plain line every 30 s. Always on stderr."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TextIO

from zstore.errors import listed
from zstore.sizes import format_bytes

from .printing import printable

if TYPE_CHECKING:
    from rich import progress as rich_progress

    from zstore.weights.companions import Companions

PLAIN_LINE_S = 30.0
"""Seconds between plain lines: a log of an hour stays readable."""
_MOST_NAMED = 12
_FORCING = ("FORCE_COLOR", "TTY_COMPATIBLE")
"""Variables by which rich takes any stream for a terminal."""


class Bar:
    """A bar, or plain lines in its place. Used as a context; methods may be called from any thread."""

    def __init__(self, title: str, total: int | None, *, in_bytes: bool, stream: TextIO | None = None) -> None:
        self.title = printable(title)
        self._stream = stream or sys.stderr
        self._bar = _make_bar(self._stream, in_bytes=in_bytes)
        self._task = None if self._bar is None else self._bar.add_task(self.title, total=total)

    def __enter__(self) -> Self:
        if self._bar is not None and self._task is not None:
            self._bar.reset(self._task)
            self._bar.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, **facts: Any) -> bool:
        """Change the bar, as `rich.progress.Progress.update` does; return whether there is one."""
        if self._bar is None or self._task is None:
            return False
        self._bar.update(self._task, **facts)
        return True

    def say(self, text: str) -> None:
        """Print a line on stderr, above the bar if there is one."""
        text = printable(text)
        if self._bar is not None:
            self._bar.console.print(text)
        else:
            print(text, file=self._stream, flush=True)


class ProgressBar(Bar):
    """Bytes done of `total_bytes` (None: unknown), with GB/s; a closing line gives the total, the time and the rate.

    After an exception it closes without the last line.
    """

    def __init__(
        self,
        title: str,
        total_bytes: int | None = None,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(title, total_bytes, in_bytes=True, stream=stream)
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self.document: dict[str, Any] = {}
        """Printed at the end by `--json`, beside `summary`."""
        self._clock = clock
        self._lock = threading.Lock()
        self._started_s = self._last_line_s = clock()
        self._stopped_s: float | None = None

    def __enter__(self) -> Self:
        self._started_s = self._last_line_s = self._clock()
        return super().__enter__()

    def __exit__(self, kind: object, *_: object) -> None:
        super().__exit__(kind)
        self._stopped_s = self._clock()
        if kind is None:
            done = self.summary()
            rate = f"{done['gb_per_s']:.2f} GB/s"
            self.say(f"{self.title}: {format_bytes(self.done_bytes)} in {done['seconds']:.1f} s, {rate}")

    def expect(self, total_bytes: int) -> None:
        """Set the total, if it was not known at the start."""
        with self._lock:
            self.total_bytes = total_bytes
            self.update(total=self.total_bytes)

    def advance(self, num_bytes: int) -> None:
        """Count `num_bytes` more as done."""
        with self._lock:
            self.done_bytes += num_bytes
            if self.update(completed=self.done_bytes):
                return
            now_s = self._clock()
            if now_s - self._last_line_s < PLAIN_LINE_S:
                return
            self._last_line_s = now_s
            text = self._plain_line(now_s - self._started_s)
        self.say(text)

    def summary(self) -> dict[str, float]:
        """Return `bytes`, `seconds` and `gb_per_s` so far, or in total after the block."""
        elapsed_s = (self._clock() if self._stopped_s is None else self._stopped_s) - self._started_s
        rate = self.done_bytes / elapsed_s / 1e9 if elapsed_s > 0 else 0.0
        return {"bytes": self.done_bytes, "seconds": round(elapsed_s, 6), "gb_per_s": round(rate, 6)}

    def _plain_line(self, elapsed_s: float) -> str:
        done = format_bytes(self.done_bytes)
        if self.total_bytes:
            done += f" of {format_bytes(self.total_bytes)} ({100 * self.done_bytes / self.total_bytes:.0f} %)"
        rate = f", {self.done_bytes / elapsed_s / 1e9:.2f} GB/s" if elapsed_s > 0 and self.done_bytes else ""
        return f"{self.title}: {done}{rate}"


def say_left(progress: ProgressBar, beside: Companions) -> None:
    """Say which files of a model were not copied beside its weights, and note for `--json` which were."""
    progress.document |= {"companions": beside.copied, "left_behind": beside.left}
    if beside.left:
        progress.say(f"left behind: {listed(beside.left, _MOST_NAMED)}")


def _make_bar(stream: TextIO, *, in_bytes: bool) -> rich_progress.Progress | None:
    """Return a bar of bytes or of steps on `stream`; None if that is no terminal, and rich need not be loaded."""
    if not stream.isatty() and not any(name in os.environ for name in _FORCING):
        return None
    from rich import progress
    from rich.console import Console

    console = Console(file=stream, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        return None
    text, left = progress.TextColumn("{task.description}", markup=False), progress.TimeRemainingColumn()
    columns: tuple[progress.ProgressColumn, ...] = (progress.MofNCompleteColumn(), left, text)
    if in_bytes:
        columns = (progress.TaskProgressColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn(), left)
    return progress.Progress(text if in_bytes else "step", progress.BarColumn(), *columns, console=console)
