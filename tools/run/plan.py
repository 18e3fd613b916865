"""From options to the jobs to start, where, and with which variables. Reads files and variables, starts nothing.

Each option may be written with underscores as well, as torchrun and DeepSpeed do.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from zstore.errors import UsageError

from .hosts import Hosts, limit, parse_filter, parse_hostfile, select
from .ranks import RunJob

_JOB_HOSTFILE = Path("/job/hostfile")
"""Where DeepSpeed's launcher looks for one."""
_PORT = 29500
_FAR_END = "import sys; from zstore.tools.run.machines import main; sys.exit(main())"
_HERE = ("localhost", "127.0.0.1", "::1")
_RANKS = "Ranks on each machine. Default: its slots, else its GPUs, or 1."
_EXPORT = "Environment variable to pass to ranks on other machines, NAME or NAME=VALUE; may be repeated."
_DEEPSPEED = "Make `import deepspeed` in the script import zstore, for this run only."


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options on the command line. None or "": not given."""

    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Script, or with --module a module.")]
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments passed to the script.")] = (
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
        typer.Option("--nnodes", "--num-nodes", help="Use the first N machines.", min=1, metavar="N"),
    ] = None
    hostfile: Annotated[
        Path | None,
        typer.Option("--hostfile", "-H", help="File with a line `HOST slots=N` for each machine.", metavar="FILE"),
    ] = None
    include: Annotated[
        str, typer.Option("--include", "-i", help="Use only these slots: HOST[:SLOT,...][@HOST...]", metavar="HOSTS")
    ] = ""
    exclude: Annotated[
        str, typer.Option("--exclude", "-e", help="Use all but these slots: HOST[:SLOT,...][@HOST...]", metavar="HOSTS")
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
            help="Port on the first machine. Default: 29500, alone a free one.", min=1, max=65535, metavar="PORT"
        ),
    ] = None
    export: Annotated[list[str] | None, typer.Option(help=_EXPORT, metavar="NAME[=VALUE]")] = None
    max_restarts: Annotated[int, typer.Option(help="Restarts of the ranks after a failure; on one machine.", min=0)] = 0
    shutdown_timeout: Annotated[
        float,
        typer.Option(help="Seconds to wait for ranks to exit after a failure or Ctrl-C.", min=0, metavar="S"),
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


def make_jobs(options: RunOptions, environment: Mapping[str, str], count_gpus: Callable[[], int]) -> list[RunJob]:
    """Return the job of each machine: one with `ssh` for every machine, or a single one without, which runs here.

    `count_gpus` is called only if the slots of this machine matter. Raises UsageError if the options cannot be met.
    """
    hosts = _hosts(options, count_gpus)
    job = _job(options, environment)
    if not hosts:
        return [job]
    hosts = limit(hosts, num_hosts=options.nnodes, ranks_per_host=options.nproc)
    if len(hosts) == 1 and _is_here(*hosts):
        return [replace(job, slots=slots) for slots in hosts.values()]
    return _over_ssh(options, environment, hosts, job)


def _is_here(name: str) -> bool:
    return name in _HERE or name == socket.gethostname()


def _hosts(options: RunOptions, count_gpus: Callable[[], int]) -> Hosts:
    """The machines that files and filters name; empty if there is neither."""
    path = options.hostfile
    if path is None and options.as_deepspeed and _JOB_HOSTFILE.is_file():
        path = _JOB_HOSTFILE
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--hostfile {path}: {getattr(error, 'strerror', None) or error}") from error
        pool = parse_hostfile(text, name=str(path))
    elif options.include or options.exclude:
        pool = _this_machine(options, count_gpus)
    elif (options.nnodes or 1) > 1:
        raise UsageError(
            f"--nnodes {options.nnodes}: which machines? Give a --hostfile, or start each machine's ranks by torchrun"
        )
    else:
        return {}
    return select(pool, include=options.include, exclude=options.exclude)


def _this_machine(options: RunOptions, count_gpus: Callable[[], int]) -> Hosts:
    """Without GPUs a slot is just a rank, so that there are as many as are named."""
    option = "--include" if options.include else "--exclude"
    named = parse_filter(options.include or options.exclude, option=option)
    if other := next((name for name in named if not _is_here(name)), None):
        raise UsageError(f"{option}: unknown host {other!r}; without a --hostfile there is only localhost")
    name, slots = next(iter(named.items()))
    count = count_gpus() or (max(slots) + 1 if slots and options.include else options.nproc or 1)
    return {name: tuple(range(count))}


def _job(options: RunOptions, environment: Mapping[str, str]) -> RunJob:
    command = [options.script, *(options.args or ())]
    if not options.no_python:
        command = ["-m"] * options.module + command
        if options.as_deepspeed:
            rank = ["--no_local_rank"] if options.no_local_rank else []
            command = ["-m", "zstore.as_deepspeed", *rank, *command]
        command = [sys.executable, "-u", *command]
    own = _exported(options.export or (), environment)
    return RunJob(
        command=tuple(command),
        num_ranks=options.nproc,
        master_port=options.master_port or 0,
        environment=own | ({"ZSTORE_AS_DEEPSPEED": "1"} if options.as_deepspeed else {}),
        max_restarts=options.max_restarts,
        shutdown_timeout_s=options.shutdown_timeout,
    )


def _over_ssh(options: RunOptions, environment: Mapping[str, str], hosts: Hosts, job: RunJob) -> list[RunJob]:
    if job.max_restarts:
        raise UsageError("--max-restarts: ranks restart on one machine only; start a run of several again as a whole")
    first = next(iter(hosts))
    # Not localhost: that is another machine on each of them.
    address = options.master_addr or (socket.gethostname() if first in _HERE and len(hosts) > 1 else first)
    path = environment.get("PYTHONPATH")
    words = [*(["env", f"PYTHONPATH={path}"] if path else []), sys.executable, "-u", "-c", _FAR_END]
    shell = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"
    # ssh takes the first value that it gets of an option, so the user's come first.
    ssh = ["ssh", *shlex.split(options.launcher_args), "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15"]
    theirs = {name: value for name, value in environment.items() if _PASSED.fullmatch(name)}
    job = replace(
        job,
        environment={**theirs, **job.environment},
        master_addr=address,
        master_port=options.master_port or _PORT,
        world_size=sum(map(len, hosts.values())),
    )
    first_ranks = itertools.accumulate(map(len, hosts.values()), initial=0)
    return [
        replace(job, slots=slots, machine=host, first_rank=rank, ssh=(*ssh, host, shell))
        for (host, slots), rank in zip(hosts.items(), first_ranks, strict=False)
    ]


_PASSED = re.compile(
    r"(NCCL|GLOO|UCX|MLFLOW|WANDB|HF|HUGGINGFACE|TOKENIZERS|TRANSFORMERS|TORCH|PYTORCH|PYTHON|OMP|MKL|ZSTORE|DEEPSPEED|AWS)_?.*"
    r"|CUDA_(HOME|LAUNCH_BLOCKING|DEVICE_ORDER|DEVICE_MAX_CONNECTIONS)|LD_LIBRARY_PATH|PATH|VIRTUAL_ENV|TMPDIR"
)
"""Names of variables that other machines get unasked: those that training libraries read, and search paths."""


def _exported(given: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of `--export NAME` and `--export NAME=VALUE`."""
    found = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--export: expected NAME or NAME=VALUE, got {name!r}")
        if not equals and name not in environment:
            raise UsageError(f"--export {name}: the variable is not set here; write --export {name}=VALUE")
        found[name] = value if equals else environment[name]
    return found
