"""Starts ranks and waits for them: on this machine, for `zstore run`, `zstore train` or ssh, and on several machines over
ssh.

[Note: how a run ends]
On a signal, ranks save and exit with 75, at slightly different times; when one fails, the others detect and report which.
So signals are forwarded and no rank is killed immediately: after a failure, SIGINT or the loss of the launcher, ranks that
are still running get a grace period. Torch's elastic agent kills all ranks of a machine as soon as one exits, so it is not
used. Ranks get the variables that torchrun sets, and rendezvous through a TCPStore in the first machine's launcher.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zstore.errors import UsageError, ZstoreError

from .guard import LauncherGuard

STOPPED_EXIT_CODE = 75
"""Exit code of ranks that saved and stopped on a signal (same as the engine's)."""
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT") if hasattr(signal, name)]
_POLL_INTERVAL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """The ranks of one machine and their rendezvous settings."""

    command: tuple[str, ...]
    """Program and arguments of each rank."""
    slots: tuple[int, ...] | None = None
    """GPU indices, one per rank; None if not chosen."""
    num_ranks: int | None = None
    """Number of ranks if `slots` is None; None: one per GPU, or one."""
    machine: str = ""
    """Name of the machine in messages; "": this one."""
    ssh: tuple[str, ...] = ()
    """The command that reaches the machine."""
    first_rank: int = 0
    world_size: int | None = None
    """None: only this machine's ranks."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """0: any free port (single machine only)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    shutdown_timeout_s: float = 30.0
    """Time for ranks to exit after a failure, Ctrl-C or the loss of the launcher."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a group of processes ended."""

    exit_codes: Mapping[str, int]
    """Exit codes by name; the negative signal number if a signal ended the process."""
    first_failed: str | None = None
    """Name of the first process to fail."""
    forwarded_signals: Sequence[int] = ()
    """Signals that were forwarded to the processes, in order."""

    @property
    def exit_code(self) -> int:
        """0; 75 if they stopped; 128 plus the number of the signal that killed them; or the code of the first failure."""
        if self.first_failed is None:
            # Without exit codes, no process was started.
            return max(self.exit_codes.values()) if self.exit_codes else 128 + self.forwarded_signals[-1]
        if self.forwarded_signals:
            return 128 + self.forwarded_signals[-1]
        code = self.exit_codes[self.first_failed]
        return 128 - code if code < 0 else code

    def print_failure(self, machine: str = "") -> None:
        """Print the reason for a failure, if any, to stderr."""
        if self.exit_code in (0, STOPPED_EXIT_CODE):
            return
        if self.forwarded_signals:
            text = f"{machine and f'{machine}: '}stopped by {signal.Signals(self.forwarded_signals[-1]).name}"
        else:
            code = self.exit_codes[self.first_failed or ""]
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
            order, hint = " (the first to fail)" if len(self.exit_codes) > 1 else "", "see its output above"
            if code == -signal.SIGKILL:
                hint = (
                    "if the kernel killed it for lack of memory (see dmesg), move optimizer state to a drive "
                    "(offload_optimizer) or reduce the micro-batch size; `zstore plan` shows what fits"
                )
            text = f"{self.first_failed}{machine and f' on {machine}'} {how}{order}; {hint}"
        print(f"zstore: {text}", file=sys.stderr, flush=True)


class Control:
    """Control channel from a remote launcher: one line with the job, then one per forwarded signal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._partial_line = b""
        self.lost = False
        """Whether the connection to the launcher was lost."""

    def take(self) -> list[str]:
        """Block until data or EOF, and return the complete lines received."""
        received = os.read(self._descriptor, 65536)
        self.lost = not received
        *lines, self._partial_line = (self._partial_line + received).split(b"\n")
        return [line.decode() for line in lines]

    def wait(self, timeout_s: float) -> list[int]:
        """Return the forwarded signals: SIGKILL to end immediately, SIGTERM when the launcher is lost."""
        if not select.select([self._descriptor], [], [], timeout_s)[0]:
            return []
        numbers = [int(line) for line in self.take()]
        return [*numbers, signal.SIGTERM] if self.lost else numbers


@contextlib.contextmanager
def catching_signals() -> Iterator[list[int]]:
    """Yield a list that collects incoming signals instead of handling them; call it only in the main thread.

    A signal that is ignored, as under nohup, stays ignored.
    """
    received: list[int] = []
    previous = {number: signal.getsignal(number) for number in _SIGNALS}
    caught = [number for number, handler in previous.items() if handler != signal.SIG_IGN]
    try:
        for number in caught:
            signal.signal(number, lambda number, _: received.append(number))
        yield received
    finally:
        for number in caught:
            signal.signal(number, previous[number] or signal.SIG_DFL)


def supervise(
    members: Mapping[str, subprocess.Popen[bytes]],
    received: list[int],
    grace_period_s: float,
    control: Control | None = None,
) -> RunResult:
    """Forward signals until all members have ended, and return the result. See [Note: how a run ends].

    `received` is the list from `catching_signals`. After a failure, SIGINT or the loss of `control`, members that are still
    running after `grace_period_s` are killed; after a second SIGINT or SIGKILL, immediately.
    """
    forwarded: list[int] = []
    first_failed, deadline_s = None, float("inf")
    while True:
        codes = {name: member.poll() for name, member in members.items()}
        failed = [name for name, code in codes.items() if code not in (None, 0, STOPPED_EXIT_CODE)]
        if failed and first_failed is None:
            first_failed, deadline_s = failed[0], min(deadline_s, time.monotonic() + grace_period_s)
        if None not in codes.values():
            exit_codes = {name: code or 0 for name, code in codes.items()}
            return RunResult(exit_codes=exit_codes, first_failed=first_failed, forwarded_signals=forwarded)
        if time.monotonic() > deadline_s:
            for member in members.values():
                member.kill()
        while received:
            number = received.pop(0)
            if number == signal.SIGKILL or (number == signal.SIGINT and number in forwarded):
                deadline_s = 0.0
                continue
            if number == signal.SIGINT or (control is not None and control.lost):
                deadline_s = min(deadline_s, time.monotonic() + grace_period_s)
            forwarded.append(number)
            for member in members.values():
                member.send_signal(number)
        if control is None or control.lost:
            time.sleep(_POLL_INTERVAL_S)
        else:
            received += control.wait(_POLL_INTERVAL_S)


class _Rank(subprocess.Popen[bytes]):
    """The process of a rank, which leads a process group."""

    def kill(self) -> None:
        """Kill its process group."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def run_ranks(job: RunJob, control: Control | None = None) -> RunResult:
    """Run the ranks of this machine and return the result; call it only in the main thread.

    SIGTERM, SIGUSR1, SIGHUP and SIGINT, received here or from `control`, are forwarded to every rank; see `supervise`. No
    rank outlives this process. Raises ZstoreError if the port is in use.
    """
    num_ranks = len(job.slots) if job.slots is not None else job.num_ranks or max(1, count_gpus())
    result = None
    with LauncherGuard(job.shutdown_timeout_s) as guard, catching_signals() as received:
        for attempt in range(job.max_restarts + 1):
            store = _open_store(job)
            port = job.master_port or store.port
            ranks: dict[str, _Rank] = {}
            try:
                for local_rank in range(0 if received else num_ranks):
                    variables = _rank_variables(job, local_rank, num_ranks, port, attempt)
                    ranks[f"rank {variables['RANK']}"] = rank = _Rank(
                        job.command,
                        env=os.environ | variables,
                        stdin=None if control is None else subprocess.DEVNULL,
                        start_new_session=True,
                    )
                    guard.add(rank.pid)
                result = supervise(ranks, received, job.shutdown_timeout_s, control) if ranks else None
            finally:
                for rank in ranks.values():
                    rank.kill()
                    rank.wait()
                guard.clear()
            if result is None or result.first_failed is None or result.forwarded_signals:
                break
        return result or RunResult(exit_codes={}, forwarded_signals=received)


def _rank_variables(job: RunJob, local_rank: int, num_ranks: int, port: int, attempt: int) -> dict[str, str]:
    """Return the environment variables of a rank, as torchrun sets them."""
    from zstore.io import num_cores

    variables = {
        "RANK": job.first_rank + local_rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": job.world_size or num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": job.master_addr,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": job.max_restarts,
        "TORCHELASTIC_RUN_ID": "zstore",
        "TORCHELASTIC_USE_AGENT_STORE": True,
        # Not 1 as with torchrun, since the update of offloaded state runs on these threads.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", num_cores() // num_ranks or 1),
    }
    slots = {} if job.slots is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, job.slots))}
    return {name: str(value) for name, value in variables.items()} | slots | dict(job.environment)


def _open_store(job: RunJob) -> Any:
    """Open the ranks' rendezvous store on the first machine, in this process so that it outlives rank 0."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if job.first_rank:
        return None
    try:
        return TCPStore("localhost", job.master_port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise ZstoreError(f"port {job.master_port} is in use; choose another --master-port: {error}") from error


def count_gpus() -> int:
    """Return the number of GPUs that a child process would see."""
    import torch

    return torch.cuda.device_count()


# ssh runs `main` on each machine. The first line on its stdin is the job, as JSON; further lines are signal numbers, SIGKILL to
# end the ranks immediately. EOF means that the launcher or the connection is lost.

_SSH_SLACK_S = 10.0
"""Time for messages to and from a machine, in addition to the grace period of its ranks."""


class _Machine(subprocess.Popen[bytes]):
    """The ssh process that runs the ranks of a machine."""

    def __init__(self, job: RunJob) -> None:
        # It has its own session, so that Ctrl-C in a terminal reaches only this process, which forwards it.
        super().__init__(job.ssh, stdin=subprocess.PIPE, start_new_session=True)
        self._requests: Any = self.stdin
        self._killed_s: float | None = None
        self._send(json.dumps(dataclasses.asdict(job)))

    def send_signal(self, number: int) -> None:
        """Forward a signal to its ranks."""
        self._send(str(number))

    def kill(self) -> None:
        """Kill its ranks, and after `_SSH_SLACK_S` end the connection, in case the message was lost."""
        if self._killed_s is None:
            self._killed_s = time.monotonic()
            self._send(str(int(signal.SIGKILL)))
        elif time.monotonic() > self._killed_s + _SSH_SLACK_S:
            super().send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self._requests.close()
        super().send_signal(signal.SIGTERM)
        self.wait()

    def _send(self, line: str) -> None:
        if self.poll() is None:
            with contextlib.suppress(OSError):  # the connection is closing
                self._requests.write(f"{line}\n".encode())
                self._requests.flush()


def run_machines(jobs: Sequence[RunJob]) -> RunResult:
    """Run `jobs` over ssh and return the result, by machine; call it only in the main thread.

    When this process dies or loses a machine, the ranks there end, since their launcher's stdin is closed. Raises UsageError
    if ssh is not installed.
    """
    machines: dict[str, _Machine] = {}
    with catching_signals() as received:
        try:
            for job in jobs:
                machines[job.machine] = _Machine(job)
            return supervise(machines, received, jobs[0].shutdown_timeout_s + _SSH_SLACK_S)
        except FileNotFoundError as error:
            raise UsageError(
                f"{jobs[0].ssh[0]!r} was not found on PATH; it is needed to reach the other machines"
            ) from error
        finally:
            for machine in machines.values():
                machine.close()


def main() -> int:
    """Run the ranks of this machine as requested by the launcher on stdin; return the exit code."""
    from pydantic import TypeAdapter

    # A duplicate of stdin with the launcher's messages, which the ranks must not read.
    control = Control(os.dup(0))
    lines: list[str] = []
    while not lines:
        lines = control.take()
        if control.lost:
            return 1
    job = TypeAdapter(RunJob).validate_json(lines[0])
    try:
        result = run_ranks(job, control)
    except (ZstoreError, OSError) as error:
        print(f"zstore: {job.machine}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    result.print_failure(job.machine)
    return result.exit_code
