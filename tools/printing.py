"""Printing: text out of files made safe for a terminal, tables on stdout, and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PLAIN_COLUMNS = 200
"""Width if stdout is no terminal: names are not cut for a pipe."""


def printable(text: object) -> str:
    r"""Return `text` with line feeds as they are and other control characters as `\x1b`: they would steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(text))


def cell(text: object) -> str:
    """Return text out of a checkpoint as a table shows it: no control characters, on one line."""
    return printable(text).replace("\n", "\\n")


def make_console() -> Console:
    """Return a console on stdout that prints text as it is: a name like `[a]` or `:b:` means nothing to it."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PLAIN_COLUMNS
    return Console(width=width, markup=False, emoji=False, highlight=False)


def make_table(left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """Return a table whose columns `left` are aligned left and may fold; the columns `right` that follow hold numbers."""
    from rich.table import Table

    table = Table()
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", overflow="fold")
    return table


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    print(json.dumps(document, indent=2))
