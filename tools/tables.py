"""Where tables are printed: on stdout, as wide as the terminal, or in a pipe as wide as they are."""

from __future__ import annotations

import sys

from rich.console import Console

_PLAIN_COLUMNS = 200
"""Width where stdout is no terminal: names are not cut for a pipe."""


def make_console() -> Console:
    """Return a console on stdout."""
    return Console(width=None if sys.stdout.isatty() else _PLAIN_COLUMNS, highlight=False)
