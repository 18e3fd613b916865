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

from .hosts import Host, limit, parse_filter, parse_hostfile, parse_nodelist, select
from .job import RunJob
from .mpi import MPI, mpi_command
from .options import RunOptions

_JOB_HOSTFILE = Path("/job/hostfile")
"""Where DeepSpeed's launcher looks for one."""
_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Start:
    """A program that starts the ranks of a machine, or of several: ssh or srun."""

    name: str
    """Of the machine, or of the program."""
    command: tuple[str, ...]
    job: RunJob


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What `zstore run` does: the ranks of this machine, or programs that start those of several."""

    job: RunJob
    starts: tuple[Start, ...] = ()
    """Empty: `job` runs here."""
    instead: tuple[str, ...] = ()
    """The program that this process becomes, with `job.environment`: mpirun."""
    note: str = ""
    """Said on stderr first."""


def make_plan(options: RunOptions, environment: Mapping[str, str], count_gpus: Callable[[], int]) -> LaunchPlan:
    """Return the plan for `options` in `environment`. `count_gpus` is called only if it matters.

    Raises UsageError if they cannot be met.
    """
    if options.launcher in MPI:
        return _over_mpi(options, environment, count_gpus)
    if _started_by_hand(options, environment):
        return LaunchPlan(job=_one_of_several(options, environment))
    if _under_slurm(options, environment):
        return _over_srun(options, environment)
    hosts = _hosts(options, count_gpus)
    if not hosts:
        return LaunchPlan(job=_alone(options, environment), note=_unused_nodes(options, environment))
    hosts = limit(hosts, num_hosts=options.nnodes, ranks_per_host=options.nproc)
    if len(hosts) == 1 and is_here(hosts[0].name):
        job = dataclasses.replace(_alone(options, environment), hosts=tuple(hosts))
        return LaunchPlan(job=job, note=_replaced(environment))
    return _over_ssh(options, environment, hosts)


# -- which way ------------------------------------------------------------------------------------------------------------


def _started_by_hand(options: RunOptions, environment: Mapping[str, str]) -> bool:
    if options.standalone or options.launcher in ("ssh", "slurm"):
        return False
    asked = options.launcher == "none" or options.node_rank is not None or bool(options.rdzv_endpoint)
    return asked or (_is_step(environment) and (options.nnodes or 1) > 1 and options.hostfile is None)


def _is_step(environment: Mapping[str, str]) -> bool:
    """Whether srun started this program on several nodes."""
    return int(environment.get("SLURM_STEP_NUM_NODES", "1")) > 1


def _under_slurm(options: RunOptions, environment: Mapping[str, str]) -> bool:
    several = (options.nnodes or 1) > 1 and "SLURM_JOB_NODELIST" in environment and options.hostfile is None
    return options.launcher == "slurm" or (options.launcher == "auto" and several)


def is_here(name: str) -> bool:
    """Return whether a host's name is this machine's."""
    return name in ("localhost", "127.0.0.1", "::1", socket.gethostname())


def _hosts(options: RunOptions, count_gpus: Callable[[], int]) -> list[Host]:
    """The machines that files and filters name; empty if there is neither."""
    path = options.hostfile
    if path is None and options.as_deepspeed and _JOB_HOSTFILE.is_file() and not options.standalone:
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
            f"--nnodes {options.nnodes}: which machines? Give a --hostfile, or start each with --node-rank and --master-addr, "
            "or with --rdzv-endpoint"
        )
    elif options.launcher == "ssh":
        raise UsageError("--launcher ssh: which machines? Give a --hostfile with a line HOST slots=N for each")
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
        run_id=options.rdzv_id,
        environment=own | ({"ZSTORE_AS_DEEPSPEED": "1"} if options.as_deepspeed else {}),
        max_restarts=options.max_restarts,
        shutdown_timeout_s=options.shutdown_timeout,
    )


def _one_of_several(options: RunOptions, environment: Mapping[str, str]) -> RunJob:
    """The job of this machine, if the others are started by somebody else."""
    job = _alone(options, environment)
    if options.rdzv_endpoint:
        if options.hostfile or options.include or options.exclude:
            raise UsageError(
                "--rdzv-endpoint: --hostfile, --include and --exclude do not go with it; set CUDA_VISIBLE_DEVICES"
            )
        return dataclasses.replace(job, rdzv_endpoint=options.rdzv_endpoint, num_nodes=options.nnodes or 1, node_rank=0)
    num_nodes, rank, address = options.nnodes, options.node_rank, options.master_addr
    hosts: list[Host] = []
    if options.hostfile is not None:
        hosts = limit(_hosts(options, lambda: 0), num_hosts=num_nodes, ranks_per_host=options.nproc)
        num_nodes, address = len(hosts), address or hosts[0].name
    elif options.include or options.exclude:
        raise UsageError("--include and --exclude need a --hostfile here; or set CUDA_VISIBLE_DEVICES on each machine")
    elif _is_step(environment):
        _require_one_task(environment)
        num_nodes = num_nodes or int(environment["SLURM_STEP_NUM_NODES"])
        rank = int(environment["SLURM_NODEID"]) if rank is None else rank
        nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
        address = address or parse_nodelist(nodes)[0]
    num_nodes = num_nodes or 1
    if num_nodes == 1 and rank is None:
        return dataclasses.replace(job, hosts=tuple(hosts) or job.hosts)
    if rank is None or rank >= num_nodes:
        got = "none" if rank is None else str(rank)
        raise UsageError(f"--node-rank: expected 0 to {num_nodes - 1} for --nnodes {num_nodes}, got {got}")
    if not address and num_nodes > 1:
        raise UsageError("--master-addr: expected the address of the machine with --node-rank 0, got none")
    return dataclasses.replace(
        job,
        hosts=(hosts[rank],) if hosts else job.hosts,
        num_nodes=num_nodes,
        node_rank=rank,
        master_addr=address or "127.0.0.1",
        master_port=options.master_port or (_slurm_port(environment) if num_nodes > 1 else 0),
    )


def _require_one_task(environment: Mapping[str, str]) -> None:
    if environment.get("SLURM_STEP_NUM_TASKS", "") not in ("", environment["SLURM_STEP_NUM_NODES"]):
        raise UsageError(
            f"srun started {environment['SLURM_STEP_NUM_TASKS']} tasks on {environment['SLURM_STEP_NUM_NODES']} nodes; "
            "give it --ntasks-per-node 1: each `zstore run` starts the ranks of its node"
        )


def _slurm_port(environment: Mapping[str, str]) -> int:
    """Jobs may share a node, so each has a port of its own, below those that systems give out."""
    job = environment.get("SLURM_JOB_ID", "")
    return 10000 + int(job) % 20000 if job.isdigit() else _PORT


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
            hosts=(host,),
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


def _over_srun(options: RunOptions, environment: Mapping[str, str]) -> LaunchPlan:
    nodelist = environment.get("SLURM_JOB_NODELIST")
    if nodelist is None:
        raise UsageError("--launcher slurm: there is no job of Slurm here; run this within sbatch or salloc")
    if options.hostfile is not None:
        raise UsageError("--launcher slurm: the nodes are the job's; leave --hostfile out, or give --launcher ssh")
    pool = [Host(name=name, slots=None) for name in parse_nodelist(nodelist)]
    hosts = limit(
        select(pool, include=options.include, exclude=options.exclude),
        num_hosts=options.nnodes,
        ranks_per_host=options.nproc,
    )
    count = len(hosts)
    job = dataclasses.replace(
        _travelling(options, environment),
        hosts=tuple(hosts),
        num_nodes=count,
        node_rank=None,
        master_addr=options.master_addr or hosts[0].name,
        master_port=options.master_port or _slurm_port(environment),
    )
    srun = [
        "srun",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(host.name for host in hosts)}",
        # One task starts all ranks of a node: it may use every core that the job has there.
        "--cpu-bind=none",
        "--kill-on-bad-exit=1",
        *shlex.split(options.launcher_args),
    ]
    return LaunchPlan(job=job, starts=(Start(name="srun", command=(*srun, *_far_end({})), job=job),))


def _over_mpi(options: RunOptions, environment: Mapping[str, str], count_gpus: Callable[[], int]) -> LaunchPlan:
    """mpirun places ranks by their number, so that slots are the first ones of each host."""
    here = Host(name="localhost", slots=tuple(range(options.nproc or count_gpus() or 1)))
    hosts = limit(_hosts(options, count_gpus) or [here], num_hosts=options.nnodes, ranks_per_host=options.nproc)
    slots = {host.name: host.slots or () for host in hosts}
    chosen = next((name for name, numbers in slots.items() if numbers != tuple(range(len(numbers)))), None)
    if chosen is not None:
        raise UsageError(
            f"--launcher {options.launcher}: mpirun starts ranks on the first slots of {chosen}; choose whole hosts"
        )
    job = _travelling(options, environment)
    exports: dict[str, str | None] = {**MPI[options.launcher].exports, **dict.fromkeys(job.environment)}
    exports |= {"MASTER_ADDR": options.master_addr or hosts[0].name, "MASTER_PORT": str(options.master_port or _PORT)}
    counts = {name: len(numbers) for name, numbers in slots.items()}
    words = mpi_command(options.launcher, counts, job.command, exports, shlex.split(options.launcher_args))
    return LaunchPlan(job=job, instead=tuple(words))


# -- notes ----------------------------------------------------------------------------------------------------------------


def _unused_nodes(options: RunOptions, environment: Mapping[str, str]) -> str:
    nodes = environment.get("SLURM_JOB_NUM_NODES", "1")
    if nodes == "1" or options.nnodes is not None or options.standalone or _is_step(environment):
        return ""
    return f"zstore: this job of Slurm has {nodes} nodes, and the run is on this one alone; --nnodes {nodes} takes all"


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
