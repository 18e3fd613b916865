"""The `zstore` command: its parts, exit codes and errors. What a command does stands in a module of its own.

Exit codes: 0 done, 1 failed or found something, 2 wrong usage. Data goes to stdout, everything else to stderr. Each
command imports its module when it is run, so that `zstore inspect` starts without torch.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from zstore._version import __version__
from zstore.errors import ZstoreError

from . import cli_checkpoints, cli_train
from .rank_errors import exit_code, say

app = typer.Typer(
    name="zstore",
    help="Train models larger than memory, and look after their checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (*cli_train.COMMANDS, *cli_checkpoints.COMMANDS):
    app.command()(_command)


def main() -> None:
    """Run the command with the process's arguments and end the process."""
    if sys.argv[1:2] and sys.argv[1] in {command.__name__ for command in cli_checkpoints.COMMANDS}:
        # They multiply no matrices, for which numpy would start threads: a tenth of the time of `zstore inspect`.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        app()
    except (ZstoreError, OSError) as error:
        say(error)
        sys.exit(exit_code(error))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train models larger than memory, and look after their checkpoints."""
