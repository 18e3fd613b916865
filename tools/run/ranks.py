"""Starts ranks and waits for them: those of this machine, for `zstore run`, `zstore train` or ssh, and those of several
machines over ssh.

[Note: how a run ends]
On a signal, ranks save and exit with 75, at slightly different times; when one fails, the others find out which and say
so. So signals are passed on and no rank is killed at once: only after a failure, SIGINT, or the loss of the launcher do those
that still run get a grace period. Torch's elastic agent kills all ranks of a machine as soon as one has ended, so ranks are
processes of our own here, with the variables that torchrun sets, and meet at a store in the first machine's launcher.
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
_LOOK_S = 0.05


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """The ranks of one machine and their rendezvous settings."""

    command: tuple[str, ...]
    """Program and arguments, given to each rank as they are."""
    slots: tuple[int, ...] | None = None
    """Indices of the GPUs that ranks get, one each; None: not chosen."""
    num_ranks: int | None = None
    """Number of ranks if `slots` is None; None: its GPUs, or one."""
    machine: str = ""
    """Its name, for messages; "": this one."""
    ssh: tuple[str, ...] = ()
    """The command that reaches the machine."""
    first_rank: int = 0
    world_size: int | None = None
    """None: that of this machine."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """0: any free port, if there is only one machine."""
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    shutdown_timeout_s: float = 30.0
    """How long ranks may take to end once one failed, Ctrl-C came or the launcher is gone."""


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """How a group of processes ended."""

    codes: Mapping[str, int]
    """Exit code of each by its name, negative for the signal that ended it."""
    first: str | None = None
    """Name of the first to fail."""
    came: Sequence[int] = ()
    """Signals that were passed on to them, in order."""

    @property
    def exit_code(self) -> int:
        """0; 75 if they stopped; 128 plus the number of the signal that killed them; or the code of the first to fail."""
        if self.first is None:
            # No code at all: they were never started.
            return max(self.codes.values()) if self.codes else 128 + self.came[-1]
        if self.came:
            return 128 + self.came[-1]
        code = self.codes[self.first]
        return 128 - code if code < 0 else code

    def say(self, where: str = "") -> None:
        """Print the reason of a failure, if any, on stderr; `where` names the machine."""
        if self.exit_code in (0, STOPPED_EXIT_CODE):
            return
        if self.came:
            text = f"{where and f'{where}: '}stopped by {signal.Signals(self.came[-1]).name}"
        else:
            code = self.codes[self.first or ""]
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
            order, hint = " first" if len(self.codes) > 1 else "", "see its output above"
            if code == -signal.SIGKILL:
                hint = (
                    "if the kernel killed it for lack of memory (see dmesg), move optimizer state to a drive "
                    "(offload_optimizer) or lower the micro-batch; `zstore plan` shows what fits"
                )
            text = f"{self.first}{where and f' on {where}'} {how}{order}; {hint}"
        print(f"zstore: {text}", file=sys.stderr, flush=True)


class Control:
    """Control channel from a remote launcher: one line with the job, then one per forwarded signal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self.lost = False
        """Whether the launcher is gone."""

    def take(self) -> list[str]:
        """Block until data or EOF, and return the complete lines received."""
        got = os.read(self._descriptor, 65536)
        self.lost = not got
        *lines, self._rest = (self._rest + got).split(b"\n")
        return [line.decode() for line in lines]

    def wait(self, timeout_s: float) -> list[int]:
        """Return the signals that it passed on: SIGKILL to end at once, SIGTERM when the launcher is gone."""
        if not select.select([self._descriptor], [], [], timeout_s)[0]:
            return []
        numbers = [int(line) for line in self.take()]
        return [*numbers, signal.SIGTERM] if self.lost else numbers


@contextlib.contextmanager
def catching_signals() -> Iterator[list[int]]:
    """Yield a list that collects incoming signals instead of handling them; call it in the main thread.

    A signal that was ignored before, as under nohup, stays ignored.
    """
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    caught = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    try:
        for number in caught:
            signal.signal(number, lambda number, _: came.append(number))
        yield came
    finally:
        for number in caught:
            signal.signal(number, before[number] or signal.SIG_DFL)


def supervise(
    members: Mapping[str, subprocess.Popen[bytes]],
    arrived: list[int],
    patience_s: float,
    control: Control | None = None,
) -> RunEnd:
    """Wait until all members ended, pass signals on, and return how they ended. See [Note: how a run ends].

    `arrived`: of `catching_signals`. After a failure, SIGINT or the loss of `control`, members that still run after
    `patience_s` are killed; after a second SIGINT or SIGKILL at once.
    """
    came: list[int] = []
    first, end_s = None, float("inf")
    while True:
        codes = {name: member.poll() for name, member in members.items()}
        failed = [name for name, code in codes.items() if code not in (None, 0, STOPPED_EXIT_CODE)]
        if failed and first is None:
            first, end_s = failed[0], min(end_s, time.monotonic() + patience_s)
        if None not in codes.values():
            return RunEnd(codes={name: member.poll() or 0 for name, member in members.items()}, first=first, came=came)
        if time.monotonic() > end_s:
            for member in members.values():
                member.kill()
        while arrived:
            number = arrived.pop(0)
            if number == signal.SIGKILL or (number == signal.SIGINT and number in came):
                end_s = 0.0
                continue
            if number == signal.SIGINT or (control is not None and control.lost):
                end_s = min(end_s, time.monotonic() + patience_s)
            came.append(number)
            for member in members.values():
                member.send_signal(number)
        if control is None or control.lost:
            time.sleep(_LOOK_S)
        else:
            arrived += control.wait(_LOOK_S)


class _Rank(subprocess.Popen[bytes]):
    """A rank, the leader of a process group."""

    def kill(self) -> None:
        """End its process group."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def run_ranks(job: RunJob, control: Control | None = None) -> RunEnd:
    """Run the ranks of this machine and return how they ended; call it in the main thread.

    SIGTERM, SIGUSR1, SIGHUP and SIGINT go to every rank, here or from `control`; see `supervise`. None outlives this process.
    Raises ZstoreError if the port is taken.
    """
    num_ranks = len(job.slots) if job.slots is not None else job.num_ranks or max(1, count_gpus())
    ended = None
    with LauncherGuard(job.shutdown_timeout_s) as guard, catching_signals() as arrived:
        for attempt in range(job.max_restarts + 1):
            store = _store(job)
            port = job.master_port or store.port
            ranks: dict[str, _Rank] = {}
            try:
                for local_rank in range(0 if arrived else num_ranks):
                    variables = _variables(job, local_rank, num_ranks, port, attempt)
                    ranks[f"rank {variables['RANK']}"] = rank = _Rank(
                        job.command,
                        env=os.environ | variables,
                        stdin=None if control is None else subprocess.DEVNULL,
                        start_new_session=True,
                    )
                    guard.add(rank.pid)
                ended = supervise(ranks, arrived, job.shutdown_timeout_s, control) if ranks else None
            finally:
                for rank in ranks.values():
                    rank.kill()
                    rank.wait()
                guard.forget()
            if ended is None or ended.first is None or ended.came:
                break
        return ended or RunEnd(codes={}, came=arrived)


def _variables(job: RunJob, local_rank: int, num_ranks: int, port: int, attempt: int) -> dict[str, str]:
    """The variables of a rank, as torchrun sets them."""
    from zstore.io import num_cores

    given = {
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
        # Not torch's 1: the update of offloaded state runs on these threads.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", num_cores() // num_ranks or 1),
    }
    slots = {} if job.slots is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, job.slots))}
    return {name: str(value) for name, value in given.items()} | slots | dict(job.environment)


def _store(job: RunJob) -> Any:
    """The rendezvous store of the ranks, on the first machine; it is in this process, so that it outlives rank 0."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if job.first_rank:
        return None
    try:
        return TCPStore("localhost", job.master_port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise ZstoreError(f"port {job.master_port} is in use; choose another --master-port: {error}") from error


def count_gpus() -> int:
    """Return how many GPUs a process started here would see."""
    import torch

    return torch.cuda.device_count()


# -- on several machines -------------------------------------------------------------------------------------------------
# ssh runs `main` on each. The first line on its stdin is the job, as JSON; each that follows is the number of a signal, SIGKILL
# to end the ranks at once. Its end means that the launcher or the connection is lost.

_SLACK_S = 10.0
"""Time for the way to a machine and back, beyond the time that its ranks have."""


class _Machine(subprocess.Popen[bytes]):
    """The ssh that runs the ranks of a machine."""

    def __init__(self, job: RunJob) -> None:
        # A session of its own: Ctrl-C in a terminal is for this process, which passes it on.
        super().__init__(job.ssh, stdin=subprocess.PIPE, start_new_session=True)
        self._killed_s: float | None = None
        self._tell(json.dumps(dataclasses.asdict(job)))

    def send_signal(self, number: int) -> None:
        """Pass a signal on to its ranks."""
        self._tell(str(number))

    def kill(self) -> None:
        """End its ranks, and after a while the connection: the other end sees that if it did not get the word."""
        if self._killed_s is None:
            self._killed_s = time.monotonic()
            self._tell(str(int(signal.SIGKILL)))
        elif time.monotonic() > self._killed_s + _SLACK_S:
            super().send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End the connection."""
        if self.stdin is not None:
            with contextlib.suppress(OSError):
                self.stdin.close()
        super().send_signal(signal.SIGTERM)
        self.wait()

    def _tell(self, line: str) -> None:
        if self.stdin is not None and self.poll() is None:
            with contextlib.suppress(OSError):  # it is ending
                self.stdin.write(f"{line}\n".encode())
                self.stdin.flush()


def run_machines(jobs: Sequence[RunJob]) -> RunEnd:
    """Run `jobs` over ssh and return how they ended, by machine; call it in the main thread.

    When this process dies or loses a machine, the ranks there end: their side's stdin ends. Raises UsageError if ssh is not
    installed.
    """
    machines: dict[str, _Machine] = {}
    with catching_signals() as arrived:
        try:
            for job in jobs:
                machines[job.machine] = _Machine(job)
            return supervise(machines, arrived, jobs[0].shutdown_timeout_s + _SLACK_S)
        except FileNotFoundError as error:
            raise UsageError(f"no program {jobs[0].ssh[0]!r} on PATH, which reaches the other machines") from error
        finally:
            for machine in machines.values():
                machine.close()


def main() -> int:
    """Run the ranks of this machine as the launcher says on stdin; return the exit code."""
    from pydantic import TypeAdapter

    # The ranks' stdin is empty: this process's input is not for them.
    control = Control(os.dup(0))
    first: list[str] = []
    while not first:
        first = control.take()
        if control.lost:
            return 1
    job = TypeAdapter(RunJob).validate_json(first[0])
    try:
        ended = run_ranks(job, control)
    except (ZstoreError, OSError) as error:
        print(f"zstore: {job.machine}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    ended.say(job.machine)
    return ended.exit_code
