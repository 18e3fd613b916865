"""`zstore run`: starts a script's ranks on this machine, or on several over ssh.

Each option may be written with underscores as well, as torchrun and DeepSpeed do.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from zstore.errors import UsageError

from .plan import make_jobs

CONTEXT_SETTINGS = {
    # Arguments after the script are the script's.
    "allow_interspersed_args": False,
    "token_normalize_func": lambda name: name.replace("_", "-"),
}

EPILOG = """
\b
Examples:
  zstore run train.py --lr 1e-4                      # a rank for each GPU of this machine, or one rank
  zstore run --nproc 2 train.py                      # two ranks
  zstore run --include localhost:0,2 train.py        # on two GPUs
  zstore run --hostfile hosts train.py               # all machines of a hostfile, over ssh
  zstore run --hostfile hosts --include a@b:0,1 train.py
  zstore run --hostfile hosts --exclude b:3 train.py
  zstore run --as-deepspeed train.py --deepspeed_config ds.json      # a script that imports deepspeed
  zstore run --module package.train --lr 1e-4        # a module
  zstore run --no-python ./train.sh                  # a program of any kind

\b
Exit codes: 0 all ranks ended well, 75 they saved and stopped because of a signal, 128 + N a
signal ended them, 2 wrong usage, else that of the rank, or the machine, that failed first.
"""


_RANKS = "Ranks on each machine. Default: its slots, else its GPUs, or 1."
_EXPORT = "Variable that ranks on other machines get too, NAME or NAME=VALUE; may be repeated."
_DEEPSPEED = "Answer `import deepspeed` in the script with zstore, for this run alone."


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options on the command line. None or "": not given."""

    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Script, or with --module a module.")]
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Given to the script as they are.")] = (
        None
    )
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc", "--nproc-per-node", "--num-gpus", "--num-accelerators", help=_RANKS, min=1, metavar="N"
        ),
    ] = None
    nnodes: Annotated[
        int | None,
        typer.Option("--nnodes", "--num-nodes", help="Machines: the first N that there are.", min=1, metavar="N"),
    ] = None
    hostfile: Annotated[
        Path | None,
        typer.Option("--hostfile", "-H", help="File with a line `HOST slots=N` for each machine.", metavar="FILE"),
    ] = None
    include: Annotated[
        str, typer.Option("--include", "-i", help="Use only these: HOST[:SLOT,...][@HOST...]", metavar="HOSTS")
    ] = ""
    exclude: Annotated[
        str, typer.Option("--exclude", "-e", help="Use all but these: HOST[:SLOT,...][@HOST...]", metavar="HOSTS")
    ] = ""
    as_deepspeed: Annotated[bool, typer.Option("--as-deepspeed", help=_DEEPSPEED)] = False
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as for `python -m`.")] = False
    no_python: Annotated[bool, typer.Option("--no-python", help="SCRIPT is a program; do not start it by Python.")] = (
        False
    )
    no_local_rank: Annotated[
        bool, typer.Option("--no-local-rank", help="With --as-deepspeed: do not pass --local_rank=N to the script.")
    ] = False
    launcher_args: Annotated[str, typer.Option(help="Arguments for ssh, like '-p 2222'.", metavar="ARGS")] = ""
    master_addr: Annotated[
        str, typer.Option(help="Address of the first machine. Default: its name.", metavar="HOST")
    ] = ""
    master_port: Annotated[
        int | None,
        typer.Option(
            help="Port on the first machine. Default: 29500, on a machine alone one that is free.",
            min=1,
            max=65535,
            metavar="PORT",
        ),
    ] = None
    export: Annotated[list[str] | None, typer.Option(help=_EXPORT, metavar="NAME[=VALUE]")] = None
    max_restarts: Annotated[
        int, typer.Option(help="Start ranks anew so often after a failure; on one machine.", min=0)
    ] = 0
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that ranks have to end after another failed, after Ctrl-C, or once the launcher is gone.",
            min=0,
            metavar="S",
        ),
    ] = 30.0

    def __post_init__(self) -> None:
        together = [
            ("--module", self.module, "--no-python", self.no_python),
            ("--as-deepspeed", self.as_deepspeed, "--no-python", self.no_python),
            ("--include", bool(self.include), "--exclude", bool(self.exclude)),
        ]
        for one, has_one, other, has_other in together:
            if has_one and has_other:
                raise UsageError(f"{one} and {other} cannot both be given; leave one out")


def run_command(options: RunOptions) -> int:
    """Run the script as `options` say; return the exit code of the run."""
    jobs = make_jobs(options, os.environ, _count_gpus)
    if jobs[0].ssh:
        from .machines import hint_of, run_machines

        ended = run_machines(jobs)
        ended.say(hint=hint_of(ended))
    else:
        from .ranks import run_ranks

        ended = run_ranks(jobs[0])
        ended.say()
    return ended.exit_code


def _count_gpus() -> int:
    """Those of the machine: slots replace CUDA_VISIBLE_DEVICES."""
    visible = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        from .ranks import count_gpus

        return count_gpus()
    finally:
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
