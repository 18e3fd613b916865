"""The table of `docs/store.md`, made of signatures and docstrings: python -m tests.open.api writes it anew."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import zstore
from zstore.open.store import Store

PAGE = Path(__file__).parents[2] / "docs" / "store.md"
_TABLE = re.compile(r"(?<=<!-- api -->\n).*?(?=\n\n)", re.DOTALL)


def table() -> str:
    """Return a row for each public call: how it is called, and the first paragraph of its docstring."""
    calls = {"open_store": zstore.open_store} | {
        name: call for name, call in vars(Store).items() if not name.startswith("_")
    }
    rows = ["| call | effect |", "|---|---|"]
    for name, call in calls.items():
        signature = inspect.signature(call)
        given = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
        text = str(inspect.Signature([each for each in given if each.name != "self"]))
        first = " ".join((inspect.getdoc(call) or "").split("\n\n")[0].split())
        rows.append(f"| `{name}{text}` | {first} |")
    return "\n".join(rows)


def shown() -> str:
    """Return the table that the page has."""
    (found,) = _TABLE.findall(PAGE.read_text())
    return str(found)


if __name__ == "__main__":
    PAGE.write_text(_TABLE.sub(lambda _: table(), PAGE.read_text(), count=1))
