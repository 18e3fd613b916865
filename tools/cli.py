"""The `zstore` command: its subcommands, exit codes and errors. Each command is a separate module.

Exit codes: 0 success, 1 failure or findings, 2 invalid usage. Data goes to stdout, everything else to stderr. A command's
module is imported when the command runs, so that `zstore inspect` starts without torch, and `zstore --help` without numpy.
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
    "train": "Train a small language model on text, as a demo. Also works as `torchrun ... -m zstore train`.",
    "run": "Start a training script on one or more machines. With --as-deepspeed it may import deepspeed.",
    "plan": "Check whether a model fits on a machine, and with which config.",
    "config": 'Explain every key of a config, and find errors. Also shows the values for "auto".',
    "doctor": "Examine this machine and its drive, and recommend what to do.",
    "ls": "List the checkpoints in a folder. Shows step, world size, size on disk, shared size, age.",
    "inspect": "Show the contents of a checkpoint. Shows its step, sizes, and arrays with shapes, types and bytes.",
    "verify": "Check a checkpoint for damage. Reads all of it; the exit code is 1 if it is damaged.",
    "diff": "Show which arrays differ between two checkpoints. The exit code is 1 if any differ.",
    "consolidate": "Write a checkpoint's weights as safetensors. The files have the Hugging Face layout.",
    "reshard": "Copy a checkpoint, for another number of GPUs or to a bucket. The copy may be compressed.",
    "convert": "Convert a checkpoint of DeepSpeed, PyTorch or Hugging Face. Writes zstore, safetensors or torch files.",
    "prune": "Delete checkpoints that no rule keeps. Shows how much space that frees.",
    "serve": "Show runs and checkpoints in a browser. Also serves Zarr arrays, weights and JSON.",
}
"""The help of each command; the command list shows its first sentence."""
_HELP = """Train models larger than memory, and manage their checkpoints.

\b
Start with:
  zstore doctor                   what this machine and its drive can do
  zstore plan --model gpt-base    whether a model fits here, and with which config
"""
_MODULES = {"run": ".run.command"}
"""Modules of commands that are not in a file of the same name."""
_TORCH_COMMANDS = ("train", "run", "doctor")


class Commands(TyperGroup):
    """Imports a command's module when the command runs; `--help` imports no modules."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and the remaining arguments."""
        from .options import for_typer

        name, _, remaining = super().resolve_command(ctx, args)
        module = importlib.import_module(_MODULES.get(str(name), f".{name}"), __package__)
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        settings: dict[str, Any] = {key: getattr(module, key.upper(), None) for key in ("epilog", "context_settings")}
        command = for_typer(getattr(module, f"{name}_command"))
        single.command(name, help=COMMANDS[str(name)].replace(". ", ".\n\n", 1), **settings)(command)
        return name, typer.main.get_command(single), remaining


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
    """Run the command with the process's arguments, and exit."""
    if sys.argv[1:2] and sys.argv[1] not in _TORCH_COMMANDS:
        # Other commands do no matrix products: numpy's threads for them would cost `zstore inspect` a tenth of its time.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # They need no pydantic plugins: looking for some reads every installed package.
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        app()
    except (ZstoreError, OSError) as error:
        if os.environ.get("ZSTORE_TRACEBACK") == "1":
            traceback.print_exception(error)
        else:
            rank = f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
            print(printable(f"zstore: {rank}{error}"), file=sys.stderr, flush=True)
        _exit_process(2 if isinstance(error, UsageError) else 1)
    except SystemExit as request:
        _exit_process(request.code)


def _exit_process(code: str | int | None) -> None:
    """Exit. A rank skips the interpreter's shutdown, since threads of torch's process groups that return into it would abort
    the process, although everything has been saved."""
    if isinstance(code, str) or "RANK" not in os.environ:
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _print_version(requested: bool) -> None:
    if requested:
        print(__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train models larger than memory, and manage their checkpoints."""
