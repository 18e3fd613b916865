"""The `zstore` command: its subcommands, exit codes and errors. Each command is a separate module.

Exit codes: 0 done, 1 failed or found something, 2 invalid usage. Data goes to stdout, everything else to stderr. A command's
module is imported when the command is run, so that `zstore inspect` starts without torch, and `zstore --help` without numpy.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from zstore._version import __version__
from zstore.errors import UsageError, ZstoreError

from .printing import printable

COMMANDS = {
    "train": "Train a small language model on text, to try things out. `torchrun ... -m zstore train` works too.",
    "run": "Start a training script, on one machine or several. With --as-deepspeed it may import deepspeed.",
    "plan": "See whether a model fits on a machine, and with which config.",
    "config": 'Explain every key of a config, and find its mistakes. Shows the values for "auto" too.',
    "doctor": "Examine this machine and its drive, and say what to do.",
    "ls": "List the checkpoints in a folder. Shows step, world size, size on disk, shared size, age.",
    "inspect": "Show what a checkpoint has in it. Shows its step, its sizes, and arrays with shapes, types and bytes.",
    "verify": "Check that a checkpoint is undamaged. Reads all of it; exit code 1 if it is not.",
    "diff": "Show which arrays differ between two checkpoints. Exit code 1 if any does.",
    "consolidate": "Write a checkpoint's weights as safetensors. The files have the layout of Hugging Face.",
    "reshard": "Copy a checkpoint, for another number of GPUs or to a bucket. The copy may be compressed.",
    "convert": "Convert a checkpoint of DeepSpeed, PyTorch or Hugging Face. Writes zstore's, safetensors or torch files.",
    "prune": "Delete the checkpoints that you do not keep. Shows how much space that frees.",
    "serve": "Show runs and checkpoints in a browser. Serves Zarr arrays, weights and JSON too.",
}
"""The help of each command; the list of all has its first sentence."""
_HELP = """Train models larger than memory, and manage their checkpoints.

\b
Type this first:
  zstore doctor                   what this machine and its drive can do
  zstore plan --model gpt-base    whether a model fits here, and with which config
"""
_MODULES = {"run": ".run.command"}
"""Modules of the commands that are not in a file of their name."""
_WITH_TORCH = ("train", "run", "doctor")


class Commands(TyperGroup):
    """Imports a command's module when the command runs; `--help` imports none."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and the remaining arguments."""
        from .options import for_typer

        name, _, rest = super().resolve_command(ctx, args)
        module = importlib.import_module(_MODULES.get(str(name), f".{name}"), __package__)
        one = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        more: dict[str, Any] = {key: getattr(module, key.upper(), None) for key in ("epilog", "context_settings")}
        command = for_typer(getattr(module, f"{name}_command"))
        one.command(name, help=COMMANDS[str(name)].replace(". ", ".\n\n", 1), **more)(command)
        return name, typer.main.get_command(one), rest


def _exit(code: int | None, **_options: Any) -> None:
    if code:
        raise typer.Exit(code)


app = typer.Typer(
    name="zstore",
    cls=Commands,
    help=_HELP,
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    result_callback=_exit,
)
for _name, _help in COMMANDS.items():
    app.command(_name, short_help=_help.partition(". ")[0].removesuffix("."))(lambda: None)


def main() -> None:
    """Run the command with the process's arguments and end the process."""
    if sys.argv[1:2] and sys.argv[1] not in _WITH_TORCH:
        # The others multiply no matrices: the threads that numpy starts for that cost `zstore inspect` a tenth of its time.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # And no plugin of pydantic is for their configs: to look for one reads every package that is installed.
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        app()
    except (ZstoreError, OSError) as error:
        if os.environ.get("ZSTORE_TRACEBACK") == "1":
            traceback.print_exception(error)
        else:
            rank = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
            print(printable(f"zstore: {rank}{error}"), file=sys.stderr, flush=True)
        _end(2 if isinstance(error, UsageError) else 1)
    except SystemExit as ended:
        _end(ended.code)


def _end(code: str | int | None) -> None:
    """End the process. A rank skips the interpreter's shutdown: threads of torch's process groups that return into it abort
    the process, after everything has been saved."""
    if isinstance(code, str) or "RANK" not in os.environ:
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


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
    """Train models larger than memory, and manage their checkpoints."""
