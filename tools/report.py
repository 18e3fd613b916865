"""`zstore report`: a run's page as one file with its data inside, to pass on. Needs no service; no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from zstore.errors import CheckpointExistsError, UsageError
from zstore.io import Files
from zstore.serve.report.report import MAX_BYTES, NUM_ARRAYS, Limits, Report, open_run
from zstore.sizes import format_bytes

from .listing import check_listing
from .opening import DEFAULT_MEMORY_BYTES, DEFAULTS, Common, check_arrays, reporting
from .options import size_option

RunLocation = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run's folder: its checkpoints, its journal, or both; a URL works too."),
]


def report_command(
    run: RunLocation,
    out: Annotated[Path, typer.Option(help="File to write.", metavar="FILE")] = Path("report.html"),
    max_size: Annotated[
        int,
        size_option(
            "Size of the file at most; what does not fit is left out, and the report says so.", show_default="20MB"
        ),
    ] = MAX_BYTES,
    arrays: Annotated[
        int, typer.Option(help="Statistics of the N largest arrays of the newest checkpoint.", metavar="N", min=0)
    ] = NUM_ARRAYS,
    *,
    common: Common = DEFAULTS,
) -> int:
    """Write the report of `run` to the new file `out`; return the exit code.

    With `json`, one object: `path`, `run`, `size_bytes`, `left_out` (a text for each kind of thing), and the bytes read.
    Raises CheckpointExistsError if `out` exists, CheckpointNotFoundError if there is no run, UsageError if there are several
    or `max_size` is too small for any report, BudgetError if a memory limit is too small for the metadata.
    """
    if common.also:
        raise UsageError("a report is of one folder: copy the parts of its checkpoints there, and leave --also out")
    _refuse_existing(out)
    memory_bytes = common.memory_bytes or DEFAULT_MEMORY_BYTES
    with open_run(run, common.storage_options, memory_bytes) as (library, found):
        check_listing(found.folder, common)
        report = Report(library, found, Limits(max_bytes=max_size, num_arrays=arrays))
        check_arrays(report.most_arrays, found.folder.location, common)
        title = f"report {found.folder.location}"
        with reporting(title, common, total_bytes=report.read_bytes) as progress:
            progress.say(f"plan: {report.plan_text}, to {out}")
            size_bytes = _write(out, report.text(progress.advance).encode())
            for text in report.left_out:
                progress.say(f"not in it: {text}")
            progress.say(f"wrote {format_bytes(size_bytes)} to {out}: open it in a browser")
            progress.document |= {
                "path": str(out),
                "run": found.name,
                "size_bytes": size_bytes,
                "left_out": list(report.left_out),
            }
    return 0


def _refuse_existing(out: Path) -> None:
    if os.path.lexists(out):
        raise CheckpointExistsError(f"{out} exists: remove it, or name another file to write")


def _write(out: Path, data: bytes) -> int:
    """Write a new file, whole or not at all; return its bytes."""
    files = Files()
    files.make_folder(out.absolute().parent)
    part = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        files.write_small(part, data)
        _refuse_existing(out)
        files.rename(part, out)
    finally:
        files.unlink(part)
    files.sync_folder(out.absolute().parent)
    return len(data)
