"""`zstore report`: a run's page as one file with its data inside, to pass on. Needs no service; no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from zstore.serve.report import MAX_BYTES, NUM_ARRAYS, Limits, Report, find_run, refuse_existing, write_report
from zstore.sizes import format_bytes, format_count

from .opening import DEFAULTS, Common, reporting
from .options import parse_size

RunLocation = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run's folder: its checkpoints, its journal, or both; a URL works too."),
]


def report_command(
    run: RunLocation,
    out: Annotated[Path, typer.Option(help="File to write.", metavar="FILE")] = Path("report.html"),
    max_size: Annotated[
        int,
        typer.Option(
            help="Size of the file at most; what does not fit is left out, and it says so.",
            metavar="SIZE",
            parser=parse_size,
            show_default="20MB",
        ),
    ] = MAX_BYTES,
    arrays: Annotated[
        int, typer.Option(help="Statistics of the N largest arrays of the newest checkpoint.", metavar="N", min=0)
    ] = NUM_ARRAYS,
    *,
    common: Common = DEFAULTS,
) -> int:
    """Write the report of `run` to the new file `out`; return the exit code.

    With `json`, one object: `path`, `size_bytes`, `run`, `left_out` (a text for each kind of thing), and what was read.
    Raises CheckpointExistsError where `out` exists, CheckpointNotFoundError where there is no run, UsageError where there
    are several, or `max_size` does not hold the page itself.
    """
    refuse_existing(out)
    found = find_run(run, common.storage_options)
    limits = Limits(max_bytes=max_size, num_arrays=arrays)
    with (
        Report(found, limits) as report,
        reporting(f"report {found.folder.location}", common, total_bytes=report.read_bytes) as progress,
    ):
        progress.say(f"plan: {report.plan_text}, to {out}")
    return 0
