"""`zstore pull`: a folder that inference servers open, kept at the weights that a run publishes. No torch."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from zstore.errors import CheckpointNotFoundError, StorageError
from zstore.open.pull import Pulled, pull
from zstore.remote.url import parse_options
from zstore.sizes import format_bytes

from .options import Json, StorageOption
from .printing import printable


def pull_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="The folder that a run publishes to, or http://HOST:PORT/RUN/weights of a service."
        ),
    ],
    into: Annotated[
        Path, typer.Option(help="The folder to keep current: new, empty, or of an earlier pull.", metavar="FOLDER")
    ],
    *,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with each new version, until interrupted.")] = False,
    every: Annotated[
        float, typer.Option(help="Seconds from one look for a new version to the next.", metavar="SECONDS", min=0.01)
    ] = 1.0,
    as_json: Json = False,
    storage_option: StorageOption = None,
) -> int:
    """Bring `into` to the newest version at `source`; with `follow` go on, and wait for what is not there yet.

    With `as_json`, a line of JSON for each version: `version`, `step`, `is_new`, `read_bytes`, `path` and `seconds`.
    """
    options, told = parse_options(storage_option or ()), ""
    while True:
        began = time.monotonic()
        try:
            done = pull(source, into, storage_options=options)
        except (CheckpointNotFoundError, StorageError) as error:
            if not follow:
                raise
            if str(error) != told:
                told = str(error)
                print(printable(f"zstore: {told}; looking again"), file=sys.stderr, flush=True)
        else:
            told = ""
            if done.is_new or not follow:
                _tell(done, into, time.monotonic() - began, as_json=as_json)
        if not follow:
            return 0
        time.sleep(every)


def _tell(done: Pulled, into: Path, seconds: float, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**asdict(done), "path": str(into), "seconds": round(seconds, 6)}), flush=True)
        return
    read = f", {format_bytes(done.read_bytes)} read, in {seconds:.1f} s" if done.is_new else " already"
    print(printable(f"{into} has version {done.version}, of step {done.step}{read}"), file=sys.stderr, flush=True)
