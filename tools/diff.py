"""`zstore diff`: which arrays of two checkpoints differ, by checksums if both are cut alike, else by their bytes. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer

from zstore.checkpoint import ArraySource, ReadAhead, StoredArray, natural_key

from .options import DEFAULTS, Common, open_location, reporting
from .printing import ProgressBar, cell, make_console, make_table

if TYPE_CHECKING:
    from rich.table import Table

Status = Literal["same", "values", "added", "removed", "shape", "dtype"]


def diff_command(
    before: Annotated[
        str,
        typer.Argument(
            metavar="A", help="A checkpoint: its folder or URL, DIR@TAG, or a folder of checkpoints (then its newest)."
        ),
    ],
    after: Annotated[
        str, typer.Argument(metavar="B", help="The checkpoint to compare it with, given in the same way.")
    ],
    *,
    common: Common = DEFAULTS,
) -> int:
    """Compare two checkpoints and print the arrays that differ; return the exit code, 1 if one does.

    If both have the same chunks, their checksums are compared without reading; other arrays are read. With `json`, one object:
    `before`, `after`, `differ`, `num_same`, `arrays` (those that differ: type and shape in each, null if it has no such
    array), and the bytes read.
    """
    part = replace(common, num_pools=2)
    with open_location(before, part) as old, open_location(after, part) as new:
        with reporting(f"diff {old.location} {new.location}", common, old, new, total_bytes=0) as progress:
            names = sorted({*old.arrays, *new.arrays}, key=natural_key)
            found = {name: _status(old, new, name) for name in names}
            for name in _differing(old, new, [name for name in names if found[name] is None], progress):
                found[name] = "values"
            differing = [
                {
                    "name": name,
                    "status": status,
                    "before": _describe(old.arrays.get(name)),
                    "after": _describe(new.arrays.get(name)),
                }
                for name, status in found.items()
                if status is not None and status != "same"
            ]
            progress.say(f"{len(differing)} of {len(found)} arrays differ")
            progress.document |= {
                "before": old.location,
                "after": new.location,
                "differ": bool(differing),
                "num_same": len(found) - len(differing),
                "arrays": differing,
            }
        if differing and not common.json:
            make_console().print(_table(differing))
    return 1 if differing else 0


def _status(before: ArraySource, after: ArraySource, name: str) -> Status | None:
    """Return the status by metadata and checksums; None if an array's bytes must be read."""
    old, new = before.arrays.get(name), after.arrays.get(name)
    if old is None or new is None:
        return "added" if old is None else "removed"
    if old.spec.shape != new.spec.shape:
        return "shape"
    if old.spec.dtype != new.spec.dtype:
        return "dtype"
    # Checksums of compressed bytes say nothing about equal values.
    if old.grid != new.grid or old.codec is not None or new.codec is not None:
        return None
    for shard in range(old.grid.num_shards):
        ours, theirs = before.shard_crcs(name, shard), after.shard_crcs(name, shard)
        if ours is None or theirs is None:
            return None
        if list(ours) != list(theirs):
            return "values"
    return "same"


def _differing(before: ArraySource, after: ArraySource, names: Sequence[str], progress: ProgressBar) -> set[str]:
    """Read these arrays of both, at once, and return the names of those whose bytes differ."""
    ranges = [(name, 0, before.array(name).spec.numel) for name in names]
    progress.total_bytes = 2 * sum(before.array(name).spec.nbytes for name in names)
    found: set[str] = set()
    with contextlib.ExitStack() as opened:
        ours, theirs = (opened.enter_context(ReadAhead(source, ranges)) for source in (before, after))
        while (span := ours.take()) is not None:
            other = np.empty(span.nbytes, np.uint8)
            theirs.read(span.name, span.first, span.stop, other)
            if not np.array_equal(span.data, other):
                found.add(span.name)
            progress.advance(2 * span.nbytes)
            ours.release(span)
    return found


def _describe(array: StoredArray | None) -> str | None:
    return None if array is None else f"{array.spec.dtype} {list(array.spec.shape)}"


def _table(differing: Sequence[Mapping[str, Any]]) -> Table:
    table = make_table(("array", "what"), ())
    for one in differing:
        texts = {
            "values": "values",
            "added": f"only in the second: {one['after']}",
            "removed": f"only in the first: {one['before']}",
        }
        table.add_row(cell(one["name"]), cell(texts.get(one["status"], f"{one['before']} -> {one['after']}")))
    return table
