"""`zstore diff`: which arrays of two checkpoints differ, and how much. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from zstore.open.compare import Comparison, compare_values, plan_comparison

from .opening import DEFAULTS, Common, open_location, reporting
from .printing import cell, make_console, make_table

if TYPE_CHECKING:
    from rich.table import Table


def diff_command(
    before: Annotated[
        str,
        typer.Argument(
            metavar="A", help="A checkpoint: its folder or URL, DIR:TAG, or a folder of checkpoints (then its newest)."
        ),
    ],
    after: Annotated[
        str, typer.Argument(metavar="B", help="The checkpoint to compare it with, given in the same way.")
    ],
    *,
    values: Annotated[
        bool, typer.Option("--values", help="Read what differs, and show how many elements differ and by how much.")
    ] = False,
    common: Common = DEFAULTS,
) -> int:
    """Compare two checkpoints and print the arrays that differ; return the exit code, 1 if one does.

    If both have the same chunks, their checksums tell without reading; `values` reads the chunks that differ. Arrays with
    different chunks, or without checksums, are read anyway. With `json`, one object: `before`, `after`, `differ`,
    `num_same`, `arrays` (those that differ), and the bytes read.
    """
    part = replace(common, num_pools=2)
    with open_location(before, part) as old, open_location(after, part) as new:
        plan = plan_comparison(old, new, values=values)
        title, total_bytes = f"diff {old.location} {new.location}", plan.read_bytes(old, new)
        with reporting(title, common, old, new, total_bytes=total_bytes) as progress:
            compare_values(old, new, plan, progress.advance)
            comparisons = list(plan.comparisons.values())
            differing = [comparison for comparison in comparisons if comparison.differs]
            progress.say(f"{len(differing)} of {len(comparisons)} arrays differ")
            progress.document |= {
                "before": old.location,
                "after": new.location,
                "differ": bool(differing),
                "num_same": len(comparisons) - len(differing),
                "arrays": [comparison.document() for comparison in differing],
            }
        if differing and not common.json:
            make_console().print(_table(differing))
    return 1 if differing else 0


def _table(differing: Sequence[Comparison]) -> Table:
    table = make_table(("array", "what"), ("chunks", "elements", "max abs", "rms"))
    for one in differing:
        chunks = "" if one.chunks is None else f"{one.chunks_changed} of {one.chunks}"
        elements = "" if one.changed is None else f"{one.changed} of {one.numel}"
        if one.nonfinite:
            elements += f" ({one.nonfinite} not finite)"
        numbers = ["" if number is None else f"{number:.6g}" for number in (one.max_abs, one.rms)]
        table.add_row(cell(one.name), cell(_what(one)), chunks, elements, *numbers)
    return table


def _what(one: Comparison) -> str:
    if one.status == "added":
        return f"only in the second: {one.after}"
    if one.status == "removed":
        return f"only in the first: {one.before}"
    return "values" if one.status == "values" else f"{one.before} -> {one.after}"
