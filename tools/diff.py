"""`zstore diff`: which arrays of two checkpoints differ, by checksums if chunks are equal, else by their bytes. No torch."""

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
    after: Annotated[str, typer.Argument(metavar="B", help="The checkpoint to compare it with, in the same form.")],
    *,
    common: Common = DEFAULTS,
) -> int:
    """Compare two checkpoints and print the arrays that differ; return the exit code, 1 if any differ.

    Arrays with the same chunks in both are compared by checksums without reading; other arrays are read. With `json`, one
    object: `before`, `after`, `differ`, `num_same`, `arrays` (those that differ, with type and shape in each checkpoint or
    null), and the bytes read.
    """
    halved = replace(common, num_pools=2)
    with open_location(before, halved) as old, open_location(after, halved) as new:
        with reporting(f"diff {old.location} {new.location}", common, old, new, total_bytes=0) as progress:
            names = sorted({*old.arrays, *new.arrays}, key=natural_key)
            statuses = {name: _status(old, new, name) for name in names}
            for name in _differing(old, new, [name for name in names if statuses[name] is None], progress):
                statuses[name] = "values"
            differing = [
                {
                    "name": name,
                    "status": status,
                    "before": _describe(old.arrays.get(name)),
                    "after": _describe(new.arrays.get(name)),
                }
                for name, status in statuses.items()
                if status is not None and status != "same"
            ]
            progress.print_line(f"{len(differing)} of {len(statuses)} arrays differ")
            progress.document |= {
                "before": old.location,
                "after": new.location,
                "differ": bool(differing),
                "num_same": len(statuses) - len(differing),
                "arrays": differing,
            }
        if differing and not common.json:
            make_console().print(_table(differing))
    return 1 if differing else 0


def _status(before: ArraySource, after: ArraySource, name: str) -> Status | None:
    """Return the status according to metadata and checksums; None if the array's bytes must be read."""
    old, new = before.arrays.get(name), after.arrays.get(name)
    if old is None or new is None:
        return "added" if old is None else "removed"
    if old.spec.shape != new.spec.shape:
        return "shape"
    if old.spec.dtype != new.spec.dtype:
        return "dtype"
    # Equal values may have different compressed bytes and so different checksums.
    if old.grid != new.grid or old.codec is not None or new.codec is not None:
        return None
    for shard in range(old.grid.num_shards):
        old_crcs, new_crcs = before.shard_crcs(name, shard), after.shard_crcs(name, shard)
        if old_crcs is None or new_crcs is None:
            return None
        if list(old_crcs) != list(new_crcs):
            return "values"
    return "same"


def _differing(before: ArraySource, after: ArraySource, names: Sequence[str], progress: ProgressBar) -> set[str]:
    """Read these arrays of both checkpoints and return the names of those whose bytes differ."""
    ranges = [(name, 0, before.array(name).spec.numel) for name in names]
    progress.total_bytes = 2 * sum(before.array(name).spec.nbytes for name in names)
    differing: set[str] = set()
    with contextlib.ExitStack() as stack:
        old_reader, new_reader = (stack.enter_context(ReadAhead(source, ranges)) for source in (before, after))
        while (span := old_reader.take()) is not None:
            new_bytes = np.empty(span.nbytes, np.uint8)
            new_reader.read(span.name, span.first, span.stop, new_bytes)
            if not np.array_equal(span.data, new_bytes):
                differing.add(span.name)
            progress.advance(2 * span.nbytes)
            old_reader.release(span)
    return differing


def _describe(array: StoredArray | None) -> str | None:
    return None if array is None else f"{array.spec.dtype} {list(array.spec.shape)}"


def _table(differing: Sequence[Mapping[str, Any]]) -> Table:
    table = make_table(("array", "difference"), ())
    for row in differing:
        texts = {
            "values": "values",
            "added": f"only in the second: {row['after']}",
            "removed": f"only in the first: {row['before']}",
        }
        table.add_row(cell(row["name"]), cell(texts.get(row["status"], f"{row['before']} -> {row['after']}")))
    return table
