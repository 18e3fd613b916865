"""The job that starts the ranks of one machine; it is sent to other machines as one line of JSON."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zstore.errors import UsageError

from .hosts import Host


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """The ranks of a machine, and how they meet the others."""

    command: tuple[str, ...]
    """Program and arguments, given to each rank as they are."""
    script: str = ""
    """Path of the script that must exist before ranks start; "": no check."""
    is_program: bool = False
    """Whether `script` is a program to be found on PATH."""
    hosts: tuple[Host, ...] = (Host(name="localhost", slots=None),)
    """Machines that this job may be for: one, or under srun all of them."""
    num_nodes: int = 1
    node_rank: int | None = 0
    """None: Slurm tells it."""
    num_ranks: int | None = None
    """Ranks on this machine if its slots are not known; None: its GPUs, or one."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """0: any free port, if there is only one machine."""
    rdzv_endpoint: str = ""
    """HOST:PORT of a c10d rendezvous, which gives the machines their ranks; "": by `node_rank`."""
    run_id: str = "zstore"
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    shutdown_timeout_s: float = 30.0
    """How long ranks may take to end once one failed, Ctrl-C came or the launcher is gone."""

    def to_json(self) -> str:
        """Return this job as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> RunJob:
        """Return the job of such a line."""
        found: dict[str, Any] = json.loads(line)
        hosts = tuple(
            Host(name=host["name"], slots=None if host["slots"] is None else tuple(host["slots"]))
            for host in found.pop("hosts")
        )
        return cls(hosts=hosts, command=tuple(found.pop("command")), **found)

    def host(self, environment: Mapping[str, str]) -> Host:
        """Return this machine; of several, the one that Slurm's variables name."""
        named = {host.name: host for host in self.hosts}
        return named.get(environment.get("SLURMD_NODENAME", ""), self.hosts[self.rank(environment) % len(self.hosts)])

    def rank(self, environment: Mapping[str, str]) -> int:
        """Return the rank of this machine among the machines."""
        return int(environment["SLURM_NODEID"]) if self.node_rank is None else self.node_rank

    def require_script(self) -> None:
        """Raise UsageError if the script, or the program, is not on this machine."""
        if not self.script:
            return
        if self.is_program:
            if shutil.which(self.script) is None:
                raise UsageError(f"--no-python: no program {self.script!r} on PATH; give its path")
        elif not Path(self.script).is_file() and not (Path(self.script) / "__main__.py").is_file():
            raise UsageError(f"no script {self.script!r} in {os.getcwd()}; for a module give --module")
