"""`deepspeed.launcher`: hostfiles and filters of slots, and the command lines of MPI's launchers, as `zstore run` has them."""

from __future__ import annotations

import argparse
import base64
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zstore.errors import ConfigError, UsageError

from .hosts import Host, parse_hostfile, select
from .mpi import MPI, mpi_command

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")


def _parse_hostfile(hostfile_lines: Sequence[str]) -> dict[str, int]:
    """Return the slots of each host. Raises ConfigError for a line that is not valid."""
    try:
        hosts = parse_hostfile("\n".join(line.strip() for line in hostfile_lines), name="hostfile")
    except UsageError as error:
        raise ConfigError(str(error)) from None
    return {host.name: len(host.slots or ()) for host in hosts}


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Return the slots of each host of a file; None if there is no such file."""
    path = Path(hostfile_path)
    return _parse_hostfile(path.read_text().splitlines()) if path.is_file() else None


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Return the slots that are left of each host, in the order of `host_info`; `HOST[:SLOT,...]@...` names those to take or
    to leave out, a host without slots all of its.

    Raises ConfigError for both at once, and for hosts and slots that do not exist.
    """
    pool = [Host(name=host, slots=tuple(slots)) for host, slots in host_info.items()]
    try:
        return {host.name: list(host.slots or ()) for host in select(pool, include=include_str, exclude=exclude_str)}
    except UsageError as error:
        raise ConfigError(str(error)) from None


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> dict[str, list[int]]:
    """Do as `parse_resource_filter` for hosts of which the number of slots is known."""
    return parse_resource_filter({name: range(slots) for name, slots in resource_pool.items()}, inclusion, exclusion)


def encode_world_info(world_info: Mapping[str, Any]) -> str:
    """Return slots by host as base64 of their JSON, which DeepSpeed's launcher passes on."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


_VALUES: Mapping[str, str | int | None] = {
    "-H --hostfile": "/job/hostfile", "-i --include": "", "-e --exclude": "", "--num_nodes": -1, "--num_gpus": -1,
    "--master_port": 29500, "--master_addr": "", "--node_rank": -1, "--launcher": "pdsh", "--launcher_args": "",
    "--enable_each_rank_log": "None", "--autotuning": "", "--bind_core_list": None, "--ssh_port": None, "--venv_script": None,
    "--log_level": "info",
}  # fmt: skip
_FLAGS = (
    "--module", "--no_python", "--no_local_rank", "--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid",
    "--bind_cores_to_rank",
)  # fmt: skip


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the words of the command `deepspeed`, by default those of this process."""
    parser = argparse.ArgumentParser(prog="deepspeed")
    for names, default in _VALUES.items():
        parser.add_argument(*names.split(), default=default, type=int if isinstance(default, int) else str)
    for name in _FLAGS:
        parser.add_argument(name, action="store_true")
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser.parse_args(args)


class MultiNodeRunner:
    """The command line by which one of MPI's launchers starts a script on zstore, as `zstore run --launcher NAME` does.

    `args` are those of `parse_args`, `resource_pool` the slots of each host.
    """

    name = ""

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, int]) -> None:
        self.args, self.world_info_base64, self.resource_pool = args, world_info_base64, resource_pool
        self.user_script, self.user_arguments = args.user_script, list(args.user_args)
        self.exports: dict[str, str] = dict(MPI[self.name].exports)
        if args.include or args.exclude or args.num_nodes != -1 or args.num_gpus != -1:
            raise ConfigError(
                f"{self.name}: mpirun takes all slots of the hostfile; leave include, exclude and num_... out"
            )

    def add_export(self, key: str, var: str) -> None:
        """Let ranks have a variable."""
        self.exports[key.strip()] = var.strip()

    def backend_exists(self) -> bool:
        """Return whether the launcher is on PATH."""
        return shutil.which(MPI[self.name].probe) is not None

    def get_cmd(self, environment: Mapping[str, str], active_resources: Mapping[str, Any]) -> list[str]:
        """Return the words of the command."""
        args, command = self.args, [self.user_script, *self.user_arguments]
        if not args.no_python:
            options = [*(["--no_local_rank"] * args.no_local_rank), *(["-m"] * args.module)]
            command = [sys.executable, "-u", "-m", "zstore.as_deepspeed", *options, *command]
        address = args.master_addr or next(iter(self.resource_pool))
        exports = {**self.exports, "MASTER_ADDR": address, "MASTER_PORT": str(args.master_port)}
        return mpi_command(self.name, self.resource_pool, command, exports, shlex.split(args.launcher_args))


class OpenMPIRunner(MultiNodeRunner):
    """Open MPI."""

    name = "openmpi"


class MPICHRunner(MultiNodeRunner):
    """MPICH."""

    name = "mpich"


class IMPIRunner(MultiNodeRunner):
    """Intel MPI."""

    name = "impi"


class MVAPICHRunner(MultiNodeRunner):
    """MVAPICH2."""

    name = "mvapich"
