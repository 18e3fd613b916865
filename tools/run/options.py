"""Options of `zstore run`. Each may be written with underscores as well, as torchrun and DeepSpeed do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from zstore.errors import UsageError

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
    launcher_args: Annotated[
        str,
        typer.Option(help="More arguments for ssh, as one word.", metavar="ARGS"),
    ] = ""
    ssh_port: Annotated[int | None, typer.Option(help="Port of ssh.", min=1, max=65535)] = None
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
        if self.no_local_rank and not self.as_deepspeed:
            raise UsageError("--no-local-rank belongs to --as-deepspeed; without it no --local_rank is passed")
