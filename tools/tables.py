"""Where tables are printed: on stdout, as wide as the terminal, or in a pipe as wide as they are."""

from __future__ import annotations

import sys

from rich.console import Console

from .printable import printable

_PLAIN_COLUMNS = 200
"""Width where stdout is no terminal: names are not cut for a pipe."""


def make_console() -> Console:
    """Return a console on stdout that prints text as it is: a name like `[a]` or `:b:` means nothing to it."""
    width = None if sys.stdout.isatty() else _PLAIN_COLUMNS
    return Console(width=width, markup=False, emoji=False, highlight=False)


def cell(text: object) -> str:
    """Return text out of a checkpoint as a table shows it: no control characters, on one line."""
    return printable(text).replace("\n", "\\n")
