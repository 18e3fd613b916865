"""Printing: text made safe for a terminal, tables and JSON on stdout; and a command's progress on stderr."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self, TextIO

from zstore.errors import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PLAIN_COLUMNS = 200
"""Width if stdout is not a terminal, so that names are not cut for a pipe."""
PLAIN_LINE_S = 30.0
"""Seconds between progress lines without a terminal, so that an hour's log stays readable."""
_TERMINAL_LINE_S = 0.2
_CLEAR = "\r\x1b[K"


def printable(text: object) -> str:
    r"""Return `text` with control characters, which could control a terminal, escaped as `\x1b`, except line feeds."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(text))


def cell(text: object) -> str:
    """Return text from a checkpoint for a table cell: without control characters, on one line."""
    return printable(text).replace("\n", "\\n")


def make_console(max_columns: int = sys.maxsize) -> Console:
    """Return a console on stdout that prints text unchanged, including names such as `[a]` or `:b:`."""
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False)
    console.width = min(console.width if sys.stdout.isatty() else _PLAIN_COLUMNS, max_columns)
    return console


def make_table(left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """Return a table with left-aligned columns `left`, followed by right-aligned columns `right` for numbers."""
    from rich.table import Table

    table = Table()
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", overflow="fold")
    return table


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON object to stdout."""
    print(json.dumps(document, indent=2))


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """Shows bytes done of `total_bytes` (None: unknown), with the rate; a final line has the total, the time and the rate.

    After an exception the final line is omitted. Methods may be called on any thread.
    """

    def __init__(
        self,
        title: str,
        total_bytes: int | None = None,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title = printable(title)
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self.document: dict[str, Any] = {}
        """Printed at the end by `--json`, together with `summary`."""
        self._stream = stream or sys.stderr
        self._clear = _CLEAR if self._stream.isatty() else ""
        self._clock = clock
        self._lock = threading.Lock()
        self._started_s = self._last_line_s = clock()
        self._stopped_s: float | None = None

    def __enter__(self) -> Self:
        self._started_s = self._last_line_s = self._clock()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stopped_s = self._clock()
        if kind is None:
            elapsed_s = self._stopped_s - self._started_s
            rate = self._rate(elapsed_s)
            self.print_line(f"{self.title}: {format_bytes(self.done_bytes)} in {elapsed_s:.1f} s{rate}")

    def print_line(self, text: str) -> None:
        """Print a line."""
        print(f"{self._clear}{printable(text)}", file=self._stream, flush=True)

    def advance(self, num_bytes: int) -> None:
        """Add `num_bytes` to the bytes done."""
        with self._lock:
            self.done_bytes += num_bytes
            now_s = self._clock()
            if now_s - self._last_line_s < (_TERMINAL_LINE_S if self._clear else PLAIN_LINE_S):
                return
            self._last_line_s = now_s
            end = "" if self._clear else "\n"
            print(f"{self._clear}{self._line(now_s - self._started_s)}", end=end, file=self._stream, flush=True)

    def summary(self) -> dict[str, float]:
        """Return the current `bytes`, `seconds` and `gb_per_s`, or the totals after the block."""
        elapsed_s = (self._clock() if self._stopped_s is None else self._stopped_s) - self._started_s
        rate = self.done_bytes / elapsed_s / 1e9 if elapsed_s > 0 else 0.0
        return {"bytes": self.done_bytes, "seconds": round(elapsed_s, 6), "gb_per_s": round(rate, 6)}

    def _line(self, elapsed_s: float) -> str:
        done = format_bytes(self.done_bytes)
        if self.total_bytes:
            done += f" of {format_bytes(self.total_bytes)} ({100 * self.done_bytes / self.total_bytes:.0f} %)"
        return f"{self.title}: {done}{self._rate(elapsed_s)}"

    def _rate(self, elapsed_s: float) -> str:
        """Return the rate; empty below one second, most of which is startup."""
        return f", {format_bytes(self.done_bytes / elapsed_s)}/s" if elapsed_s >= 1 and self.done_bytes else ""
