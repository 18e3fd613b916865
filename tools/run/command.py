"""`zstore run`: starts a script's ranks on this machine, or on several over ssh. Turns options and hostfiles into jobs:
what to start, on which machine, with which variables.

Options may also be written with underscores, as for torchrun and DeepSpeed.
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
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from zstore.errors import UsageError

from .ranks import RunJob, count_gpus, run_machines, run_ranks

CONTEXT_SETTINGS = {
    # Arguments after the script belong to the script.
    "allow_interspersed_args": False,
    "token_normalize_func": lambda name: name.replace("_", "-"),
}

EPILOG = """
\b
Examples:
  zstore run train.py --lr 1e-4                      # one rank per GPU of this machine (one if none)
  zstore run --nproc 2 train.py                      # two ranks
  zstore run --include localhost:0,2 train.py        # on two GPUs
  zstore run --hostfile hosts train.py               # all machines of a hostfile, over ssh
  zstore run --hostfile hosts --exclude b:3 train.py
  zstore run --as-deepspeed train.py --deepspeed_config ds.json      # a script that imports deepspeed

\b
Exit codes: 0 all ranks succeeded, 75 they saved and stopped because of a signal, 128 + N signal N
ended them, 2 invalid usage, otherwise the exit code of the rank or machine that failed first.
"""

_JOB_HOSTFILE = Path("/job/hostfile")
"""The default hostfile of DeepSpeed's launcher."""
_PORT = 29500
_REMOTE_PROGRAM = "import sys; from zstore.tools.run.ranks import main; sys.exit(main())"
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_NPROC_HELP = "Ranks per machine. Default: its slots, else its GPUs, else 1."
_EXPORT_HELP = "Environment variable to pass to ranks on other machines, NAME or NAME=VALUE; may be repeated."
_AS_DEEPSPEED_HELP = "Make `import deepspeed` in the script import zstore, for this run only."


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Command-line options. None or "" means not given."""

    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Script, or a module with --module.")]
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments passed to the script.")] = None
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc", "--nproc-per-node", "--num-gpus", "--num-accelerators", help=_NPROC_HELP, min=1, metavar="N"
        ),
    ] = None
    nnodes: Annotated[
        int | None,
        typer.Option("--nnodes", "--num-nodes", help="Use the first N machines.", min=1, metavar="N"),
    ] = None
    hostfile: Annotated[
        Path | None,
        typer.Option("--hostfile", "-H", help="File with a line `HOST slots=N` per machine.", metavar="FILE"),
    ] = None
    include: Annotated[
        str, typer.Option("--include", "-i", help="Use only these slots: HOST[:SLOT,...][@HOST...]", metavar="HOSTS")
    ] = ""
    exclude: Annotated[
        str, typer.Option("--exclude", "-e", help="Use all but these slots: HOST[:SLOT,...][@HOST...]", metavar="HOSTS")
    ] = ""
    as_deepspeed: Annotated[bool, typer.Option("--as-deepspeed", help=_AS_DEEPSPEED_HELP)] = False
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as for `python -m`.")] = False
    no_python: Annotated[
        bool, typer.Option("--no-python", help="SCRIPT is a program; do not start it with Python.")
    ] = False
    no_local_rank: Annotated[
        bool, typer.Option("--no-local-rank", help="With --as-deepspeed: do not pass --local_rank=N to the script.")
    ] = False
    launcher_args: Annotated[str, typer.Option(help="Arguments for ssh, such as '-p 2222'.", metavar="ARGS")] = ""
    master_addr: Annotated[
        str, typer.Option(help="Address of the first machine. Default: its name.", metavar="HOST")
    ] = ""
    master_port: Annotated[
        int | None,
        typer.Option(
            help="Rendezvous port. Default: 29500; any free one on a single machine.", min=1, max=65535, metavar="PORT"
        ),
    ] = None
    export: Annotated[list[str] | None, typer.Option(help=_EXPORT_HELP, metavar="NAME[=VALUE]")] = None
    max_restarts: Annotated[int, typer.Option(help="Max restarts after a failure (one machine only).", min=0)] = 0
    shutdown_timeout: Annotated[
        float,
        typer.Option(help="Seconds to wait for ranks to exit after a failure or Ctrl-C.", min=0, metavar="S"),
    ] = 30.0

    def __post_init__(self) -> None:
        exclusive = [
            ("--module", self.module, "--no-python", self.no_python),
            ("--as-deepspeed", self.as_deepspeed, "--no-python", self.no_python),
            ("--include", bool(self.include), "--exclude", bool(self.exclude)),
        ]
        for option, is_set, other, other_is_set in exclusive:
            if is_set and other_is_set:
                raise UsageError(f"{option} and {other} cannot be combined; leave one out")


def run_command(options: RunOptions) -> int:
    """Run the script with `options`; return its exit code."""
    jobs = make_jobs(options, os.environ, _count_gpus)
    result = run_machines(jobs) if jobs[0].ssh else run_ranks(jobs[0])
    result.print_failure()
    return result.exit_code


def _count_gpus() -> int:
    """Return this machine's number of GPUs, ignoring CUDA_VISIBLE_DEVICES, which slots override."""
    visible = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        return count_gpus()
    finally:
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


def make_jobs(options: RunOptions, environment: Mapping[str, str], count_gpus: Callable[[], int]) -> list[RunJob]:
    """Return one job per machine, each with `ssh`, or a single local job without it.

    `count_gpus` is called only if this machine's slots are needed. Raises UsageError if the options cannot be satisfied.
    """
    hosts = _hosts(options, count_gpus)
    job = _job(options, environment)
    if not hosts:
        return [job]
    hosts = limit(hosts, num_hosts=options.nnodes, ranks_per_host=options.nproc)
    if len(hosts) == 1 and _is_local(*hosts):
        return [replace(job, slots=slots) for slots in hosts.values()]
    return _ssh_jobs(options, environment, hosts, job)


def _is_local(name: str) -> bool:
    return name in _LOCAL_NAMES or name == socket.gethostname()


def _hosts(options: RunOptions, count_gpus: Callable[[], int]) -> Hosts:
    """Return the machines named by the hostfile and filters; empty if there are none."""
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
        pool = _local_hosts(options, count_gpus)
    elif (options.nnodes or 1) > 1:
        raise UsageError(
            f"--nnodes {options.nnodes}: no machines are named; pass --hostfile, or start each machine's ranks with torchrun"
        )
    else:
        return {}
    return select(pool, include=options.include, exclude=options.exclude)


def _local_hosts(options: RunOptions, count_gpus: Callable[[], int]) -> Hosts:
    """Return this machine with its GPUs as slots. Without GPUs, slots are ranks, as many as the filter names."""
    option = "--include" if options.include else "--exclude"
    named = parse_filter(options.include or options.exclude, option=option)
    if unknown := next((name for name in named if not _is_local(name)), None):
        raise UsageError(f"{option}: unknown host {unknown!r}; without a --hostfile there is only localhost")
    name, slots = next(iter(named.items()))
    count = count_gpus() or (max(slots) + 1 if slots and options.include else options.nproc or 1)
    return {name: tuple(range(count))}


def _job(options: RunOptions, environment: Mapping[str, str]) -> RunJob:
    command = [options.script, *(options.args or ())]
    if not options.no_python:
        command = ["-m"] * options.module + command
        if options.as_deepspeed:
            flags = ["--no_local_rank"] if options.no_local_rank else []
            command = ["-m", "zstore.as_deepspeed", *flags, *command]
        command = [sys.executable, "-u", *command]
    return RunJob(
        command=tuple(command),
        num_ranks=options.nproc,
        master_port=options.master_port or 0,
        environment=_exported_variables(options.export or (), environment)
        | ({"ZSTORE_AS_DEEPSPEED": "1"} if options.as_deepspeed else {}),
        max_restarts=options.max_restarts,
        shutdown_timeout_s=options.shutdown_timeout,
    )


def _ssh_jobs(options: RunOptions, environment: Mapping[str, str], hosts: Hosts, job: RunJob) -> list[RunJob]:
    if job.max_restarts:
        raise UsageError("--max-restarts: supported on one machine only; restart a multi-machine run as a whole")
    first = next(iter(hosts))
    # localhost would be a different machine on each of them.
    address = options.master_addr or (socket.gethostname() if first in _LOCAL_NAMES and len(hosts) > 1 else first)
    path = environment.get("PYTHONPATH")
    command = [*(["env", f"PYTHONPATH={path}"] if path else []), sys.executable, "-u", "-c", _REMOTE_PROGRAM]
    shell = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
    # ssh uses the first value of a repeated option, so the user's options come first.
    ssh = ["ssh", *shlex.split(options.launcher_args), "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15"]
    forwarded = {name: value for name, value in environment.items() if _FORWARDED.fullmatch(name)}
    job = replace(
        job,
        environment={**forwarded, **job.environment},
        master_addr=address,
        master_port=options.master_port or _PORT,
        world_size=sum(map(len, hosts.values())),
    )
    first_ranks = itertools.accumulate(map(len, hosts.values()), initial=0)
    return [
        replace(job, slots=slots, machine=host, first_rank=rank, ssh=(*ssh, host, shell))
        for (host, slots), rank in zip(hosts.items(), first_ranks, strict=False)
    ]


_FORWARDED = re.compile(
    r"(NCCL|GLOO|UCX|MLFLOW|WANDB|HF|HUGGINGFACE|TOKENIZERS|TRANSFORMERS|TORCH|PYTORCH|PYTHON|OMP|MKL|ZSTORE|DEEPSPEED|AWS)_?.*"
    r"|CUDA_(HOME|LAUNCH_BLOCKING|DEVICE_ORDER|DEVICE_MAX_CONNECTIONS)|LD_LIBRARY_PATH|PATH|VIRTUAL_ENV|TMPDIR"
)
"""Names of variables that are always forwarded to other machines: those of training libraries, and search paths."""


def _exported_variables(exports: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `--export NAME` and `--export NAME=VALUE`."""
    variables = {}
    for export in exports:
        name, equals, value = export.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--export: expected NAME or NAME=VALUE, got {name!r}")
        if not equals and name not in environment:
            raise UsageError(f"--export {name}: the variable is not set; write --export {name}=VALUE")
        variables[name] = value if equals else environment[name]
    return variables


_HOSTFILE_LINE = re.compile(r"([^\s-]\S*)\s+slots=(\d+)(\s.*)?")


Hosts = dict[str, tuple[int, ...]]
"""The machines of a run, in order, each with its GPU indices in ascending order."""


def parse_hostfile(text: str, *, name: str) -> Hosts:
    """Return the machines of a hostfile in order, one per line `HOST slots=N`; empty lines and `#` comments are skipped.

    Raises UsageError naming the file `name` and the line.
    """
    hosts: Hosts = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _HOSTFILE_LINE.fullmatch(content)
        location = f"{name}, line {number}"
        if match is None:
            raise UsageError(f"{location}: expected HOST slots=N, got {content!r}")
        host, slots = match.group(1), int(match.group(2))
        if host in hosts:
            raise UsageError(f"{location}: host {host!r} is listed twice; give each machine one line")
        if slots < 1:
            raise UsageError(f"{location}: expected at least one slot, got slots=0; remove the line to omit {host}")
        hosts[host] = tuple(range(slots))
    if not hosts:
        raise UsageError(f"{name}: no host in the file; expected a line HOST slots=N per machine")
    return hosts


def parse_filter(text: str, *, option: str) -> dict[str, tuple[int, ...] | None]:
    """Return the slots that `--include` or `--exclude` names, by host; None means all slots of the host.

    Raises UsageError naming `option`.
    """
    slots_by_host: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        host, colon, slots = part.strip().partition(":")
        if not host or (colon and not re.fullmatch(r"\d+(,\d+)*", slots)):
            raise UsageError(f"{option}: expected HOST[:SLOT,...], joined by @ as in a@b:0,2, got {part!r}")
        if host in slots_by_host:
            raise UsageError(f"{option}: host {host!r} is named twice; name it once, with all its slots")
        slots_by_host[host] = tuple(sorted({int(slot) for slot in slots.split(",")})) if colon else None
    return slots_by_host


def select(pool: Hosts, *, include: str = "", exclude: str = "") -> Hosts:
    """Return the machines of `pool` that the filter selects, in order, each with its selected slots.

    Raises UsageError for a host or slot that is not in `pool`, and for an empty result.
    """
    if not include and not exclude:
        return pool
    option = "--include" if include else "--exclude"
    named = parse_filter(include or exclude, option=option)
    for host, requested in named.items():
        if host not in pool:
            raise UsageError(f"{option}: unknown host {host!r}; expected one of {', '.join(pool)}")
        for slot in requested or ():
            if slot not in pool[host]:
                raise UsageError(
                    f"{option}: host {host!r} has no slot {slot}; it has {', '.join(map(str, pool[host]))}"
                )
    selected: Hosts = {}
    for host, available in pool.items():
        requested = named.get(host, ())
        matched = available if requested is None else requested
        if slots := matched if include else tuple(slot for slot in available if slot not in matched):
            selected[host] = slots
    if not selected:
        raise UsageError(f"--exclude {exclude}: no slot remains on any host; exclude fewer")
    return selected


def limit(hosts: Hosts, *, num_hosts: int | None, ranks_per_host: int | None) -> Hosts:
    """Return the first `num_hosts` of `hosts`, each with its first `ranks_per_host` slots (None: all).

    Raises UsageError if there are fewer.
    """
    if num_hosts is not None and num_hosts > len(hosts):
        names = ", ".join(hosts)
        raise UsageError(f"--nnodes {num_hosts}: only {len(hosts)} hosts ({names}); add hosts or request fewer")
    first = dict(islice(hosts.items(), num_hosts))
    for host, slots in first.items():
        if ranks_per_host is not None and ranks_per_host > len(slots):
            raise UsageError(
                f"--nproc {ranks_per_host}: host {host!r} has {len(slots)} slots; request fewer ranks, or give the host "
                "more slots"
            )
    return {host: slots[:ranks_per_host] for host, slots in first.items()}
