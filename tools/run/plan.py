"""From options to the programs to start, where, and with which variables. Reads files and variables, starts nothing."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from zstore.errors import UsageError

from .hosts import Host, limit, parse_filter, parse_hostfile, select
from .job import RunJob
from .options import RunOptions

_JOB_HOSTFILE = Path("/job/hostfile")
"""Where DeepSpeed's launcher looks for one."""
_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Start:
    """The ssh that starts the ranks of a machine."""

    name: str
    command: tuple[str, ...]
    job: RunJob


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The ranks of this machine, or the programs that start those of several."""

    job: RunJob
    starts: tuple[Start, ...] = ()
    """Empty: `job` runs here."""
    note: str = ""
    """Said on stderr first."""


def make_plan(options: RunOptions, environment: Mapping[str, str], count_gpus: Callable[[], int]) -> LaunchPlan:
    """Return the plan for `options` in `environment`. `count_gpus` is called only if it matters.

    Raises UsageError if they cannot be met.
    """
    hosts = _hosts(options, count_gpus)
    if not hosts:
        return LaunchPlan(job=_alone(options, environment))
    hosts = limit(hosts, num_hosts=options.nnodes, ranks_per_host=options.nproc)
    if len(hosts) == 1 and is_here(hosts[0].name):
        job = dataclasses.replace(_alone(options, environment), slots=hosts[0].slots)
        return LaunchPlan(job=job, note=_replaced(environment))
    return _over_ssh(options, environment, hosts)


def is_here(name: str) -> bool:
    """Return whether a host's name is this machine's."""
    return name in ("localhost", "127.0.0.1", "::1", socket.gethostname())


def _hosts(options: RunOptions, count_gpus: Callable[[], int]) -> list[Host]:
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
        pool = [_this_machine(options, count_gpus)]
    elif (options.nnodes or 1) > 1:
        raise UsageError(
            f"--nnodes {options.nnodes}: which machines? Give a --hostfile, or start each machine's ranks by torchrun"
        )
    else:
        return []
    return select(pool, include=options.include, exclude=options.exclude)


def _this_machine(options: RunOptions, count_gpus: Callable[[], int]) -> Host:
    """Without GPUs a slot is just a rank, so that there are as many as are named."""
    option = "--include" if options.include else "--exclude"
    named = parse_filter(options.include or options.exclude, option=option)
    other = next((name for name in named if not is_here(name)), None)
    if other is not None:
        raise UsageError(f"{option}: unknown host {other!r}; without a --hostfile there is only localhost")
    name, slots = next(iter(named.items()))
    count = count_gpus() or (max(slots) + 1 if slots and options.include else options.nproc or 1)
    return Host(name=name, slots=tuple(range(count)))


# -- the jobs -------------------------------------------------------------------------------------------------------------


def _alone(options: RunOptions, environment: Mapping[str, str]) -> RunJob:
    words = [options.script, *(options.args or ())]
    if options.no_python:
        command = words
    elif options.as_deepspeed:
        rank = ["--no_local_rank"] if options.no_local_rank else []
        command = [sys.executable, "-u", "-m", "zstore.as_deepspeed", *rank, *(["-m"] * options.module), *words]
    else:
        command = [sys.executable, "-u", *(["-m"] * options.module), *words]
    own = exported(options.export or (), environment)
    return RunJob(
        command=tuple(command),
        script="" if options.module else options.script,
        is_program=options.no_python,
        num_ranks=options.nproc,
        master_port=options.master_port or 0,
        environment=own | ({"ZSTORE_AS_DEEPSPEED": "1"} if options.as_deepspeed else {}),
        max_restarts=options.max_restarts,
        shutdown_timeout_s=options.shutdown_timeout,
    )


# -- other machines -------------------------------------------------------------------------------------------------------


def _travelling(options: RunOptions, environment: Mapping[str, str]) -> RunJob:
    """The job for other machines, with the variables that it needs there."""
    if options.max_restarts:
        raise UsageError(
            "--max-restarts: ranks start anew on one machine only; start a run of several again as a whole"
        )
    job = _alone(options, environment)
    theirs = passed_on(environment) | (deepspeed_file(environment) if options.as_deepspeed else {})
    return dataclasses.replace(job, environment={**theirs, **job.environment})


def _far_end(environment: Mapping[str, str]) -> list[str]:
    path = environment.get("PYTHONPATH")
    words = ["env", f"PYTHONPATH={path}"] if path else []
    return [*words, sys.executable, "-u", "-m", "zstore.tools.run.remote"]


def _over_ssh(options: RunOptions, environment: Mapping[str, str], hosts: list[Host]) -> LaunchPlan:
    first = hosts[0].name
    # Not localhost: that is another machine on each of them.
    address = options.master_addr or (
        socket.gethostname() if first in ("localhost", "127.0.0.1") and hosts[1:] else first
    )
    job = _travelling(options, environment)
    shell = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(_far_end(environment))}"
    # ssh takes the first value that it gets of an option, so the user's come first.
    ssh = ["ssh", *shlex.split(options.launcher_args), "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15"]
    ssh += ["-p", str(options.ssh_port)] if options.ssh_port else []
    jobs = [
        dataclasses.replace(
            job,
            slots=host.slots,
            machine=host.name,
            num_nodes=len(hosts),
            node_rank=rank,
            master_addr=address,
            master_port=options.master_port or _PORT,
        )
        for rank, host in enumerate(hosts)
    ]
    starts = [
        Start(name=host.name, command=(*ssh, host.name, shell), job=one) for host, one in zip(hosts, jobs, strict=True)
    ]
    return LaunchPlan(job=jobs[0], starts=tuple(starts))


# -- notes ----------------------------------------------------------------------------------------------------------------


def _replaced(environment: Mapping[str, str]) -> str:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return f"zstore: the slots replace CUDA_VISIBLE_DEVICES={visible}" if visible else ""


_PASSED = re.compile(
    r"(NCCL|GLOO|UCX|MLFLOW|WANDB|HF|HUGGINGFACE|TOKENIZERS|TRANSFORMERS|TORCH|PYTORCH|PYTHON|OMP|MKL|ZSTORE|DEEPSPEED|AWS)_?.*"
    r"|CUDA_(HOME|LAUNCH_BLOCKING|DEVICE_ORDER|DEVICE_MAX_CONNECTIONS)|LD_LIBRARY_PATH|PATH|VIRTUAL_ENV|TMPDIR"
)
"""Names of variables that are passed on unasked: those that training libraries read, and search paths."""


def exported(given: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `--export NAME` and `--export NAME=VALUE`.

    Raises UsageError for other texts and for a name that `environment` does not have.
    """
    found = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--export: expected NAME or NAME=VALUE, got {name!r}")
        if not equals and name not in environment:
            raise UsageError(f"--export {name}: the variable is not set here; write --export {name}=VALUE")
        found[name] = value if equals else environment[name]
    return found


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that other machines get unasked."""
    return {name: value for name, value in environment.items() if _PASSED.fullmatch(name)}


def deepspeed_file(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in DeepSpeed's files for them, NAME=VALUE a line: `.deepspeed_env`, or as DS_ENV_FILE names it, in
    the home folder and then in this one. Raises UsageError for another line."""
    name = environment.get("DS_ENV_FILE", ".deepspeed_env")
    found = {}
    for path in (Path.home() / name, Path(name)):
        if not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            key, equals, value = line.partition("=")
            if not equals:
                raise UsageError(f"{path}, line {number}: expected NAME=VALUE, got {line!r}")
            found[key.strip()] = value
    return found
