"""The job that starts the ranks of one machine, and what a launcher tells the agents on others, as lines on their stdin.

The first line is the job, as JSON. Then come `signal N`, `failed` (ranks of another machine failed), `kill`, and `alive` now
and then. The end of the lines, or a long silence, means that the launcher or the connection is gone.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from zstore.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """The ranks of a machine, and how they meet the others."""

    command: tuple[str, ...]
    """Program and arguments, given to each rank as they are."""
    script: str = ""
    """Path of the script that must exist before ranks start; "": no check."""
    is_program: bool = False
    """Whether `script` is a program to be found on PATH."""
    slots: tuple[int, ...] | None = None
    """Indices of the GPUs that ranks get, one each; None: not chosen."""
    num_nodes: int = 1
    node_rank: int = 0
    machine: str = ""
    """Its name, for messages; "": this one."""
    num_ranks: int | None = None
    """Ranks on this machine without slots; None: its GPUs, or one."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """0: any free port, if there is only one machine."""
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
        return TypeAdapter(cls).validate_json(line)

    def require_script(self) -> None:
        """Raise UsageError if the script, or the program, is not on this machine."""
        if not self.script:
            return
        if self.is_program:
            if shutil.which(self.script) is None:
                raise UsageError(f"--no-python: no program {self.script!r} on PATH; give its path")
        elif not Path(self.script).is_file() and not (Path(self.script) / "__main__.py").is_file():
            raise UsageError(f"no script {self.script!r} in {os.getcwd()}; for a module give --module")


ALIVE_EVERY_S = 10.0
"""Time between a launcher's heartbeats."""
_SILENCE_S = 120.0


class Control:
    """The agent's end, of a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self._ended = False
        self._heard = time.monotonic()
        self.said_lost = False
        """For the reader to note that it acted on the loss."""

    def fileno(self) -> int:
        """Return the descriptor, to wait for."""
        return self._descriptor

    def job(self) -> RunJob:
        """Return the job of the first line; wait for it. Raises EOFError if there is none."""
        while b"\n" not in self._rest:
            self._take()
            if self._ended:
                raise EOFError("no job came")
        line, _, self._rest = self._rest.partition(b"\n")
        return RunJob.from_json(line.decode())

    def words(self) -> list[tuple[str, int]]:
        """Return the words that came, each with the number of a signal or 0; call it when the descriptor can be read."""
        self._take()
        *lines, self._rest = self._rest.split(b"\n")
        found = []
        for line in lines:
            word, _, number = line.decode().partition(" ")
            found.append((word, int(number or 0)))
        return found

    def is_lost(self) -> bool:
        """Return whether the other side is gone."""
        return self._ended or time.monotonic() - self._heard > _SILENCE_S

    def _take(self) -> None:
        got = b"" if self._ended else os.read(self._descriptor, 65536)
        self._ended = not got
        self._heard = time.monotonic()
        self._rest += got
