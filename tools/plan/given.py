"""Whether a given config fits, and if not, what to change in it."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zstore.sizes import format_bytes

from ..printing import make_console, make_table, print_json
from .choices import Costs, memories
from .job import PlannedJob
from .report import cells, headline, make_outcome_table, notes_of, outcome_document, shape_document


def print_given(job: PlannedJob, mine: Costs, rungs: Sequence[Costs], *, json: bool) -> int:
    """Print the needs of the config beside the memory available, and if it does not fit, the first rung of the ladder that
    does; return 0 if it fits, else 1."""
    first = None if mine.fits else next((rung for rung in rungs if rung.fits), None)
    changes = [] if first is None else list(differences(job.base or {}, first.config))
    notes = notes_of(job, first or mine)
    if json:
        print_json(
            {
                **shape_document(job),
                "fits": mine.fits,
                "mine": outcome_document(mine),
                "instead": None if first is None else outcome_document(first),
                "changes": [{"key": key, "from": before, "to": after} for key, before, after in changes],
                "notes": notes,
            }
        )
    else:
        _print(job, mine, rungs, first, changes)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    if not mine.fits and first is None:
        print("zstore: nothing that was tried fits: add memory, disk or ranks", file=sys.stderr)
    return 0 if mine.fits else 1


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, value before, value after) of each key that differs; None: it is missing."""
    for name in dict.fromkeys((*before, *after)):
        one, other = before.get(name), after.get(name)
        if isinstance(one, Mapping) or isinstance(other, Mapping):
            one, other = (value if isinstance(value, Mapping) else {} for value in (one, other))
            yield from differences(one, other, f"{prefix}{name}.")
        elif one != other:
            yield f"{prefix}{name}", one, other


def _print(
    job: PlannedJob,
    mine: Costs,
    rungs: Sequence[Costs],
    first: Costs | None,
    changes: Sequence[tuple[str, Any, Any]],
) -> None:
    console = make_console()
    console.print(headline(job), soft_wrap=True)
    table = make_table(("memory",), ("needed", "usable", "used"), "this config")
    for name, needed, usable in memories(mine, job.machine):
        if usable is None:
            table.add_row(name, format_bytes(needed), "not known", "")
        elif needed or name != "device":
            table.add_row(name, format_bytes(needed), format_bytes(usable), f"{100 * needed / max(1, usable):.0f} %")
    console.print(table)
    table = make_outcome_table(
        job, "the plan" if mine.fits else "the plan, and the ladder: each rung adds to the ones before", ("rung",)
    )
    table.add_row(mine.title, *cells(job, mine))
    for one in () if mine.fits else rungs:
        table.add_row(one.title + (" <- the first that fits" if one is first else ""), *cells(job, one))
    console.print(table)
    console.print("it fits" if mine.fits else f"it does not fit: {'; '.join(mine.lacking)}", soft_wrap=True)
    if first is None:
        return
    console.print("change this:")
    for key, before, after in changes:
        told = "remove it" if after is None else json_module.dumps(after)
        console.print(
            f"  {key}: {told}" + ("" if before is None else f" (is {json_module.dumps(before)})"), soft_wrap=True
        )
