"""Runs the ranks of this machine to their end, whoever started them: `zstore run`, `zstore train`, or ssh."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from zstore.engine.plan.rungs import ADVICE_VARIABLE
from zstore.errors import ZstoreError
from zstore.io import count_memory_kills, num_cores, read_host_memory
from zstore.sizes import format_bytes

from .agent import INTERVAL_S, Agent, NeverStarted, agent
from .ending import RunEnd
from .job import Control, RunJob
from .signals import Wakeups

_LOOK_S = 0.1
_MEET_S = 900
"""How long the machines wait for each other."""


def run_ranks(job: RunJob, control: Control | None = None) -> RunEnd:
    """Run the ranks of this machine and return how they ended; call it in the main thread.

    SIGTERM, SIGUSR1, SIGHUP and SIGINT go to every rank, here or as words of `control`; if its other side is gone, SIGTERM.
    Ranks that do not end within the job's patience after a failure, SIGINT or that loss are killed; none outlives this
    process. Raises UsageError if the script does not exist, ZstoreError if the machines did not meet.
    """
    job.require_script()
    slots = job.slots
    num_ranks = len(slots) if slots is not None else job.num_ranks or max(1, count_gpus())
    own = dict(job.environment)
    if slots is not None:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
    # Not torch's 1: the update of offloaded state runs on these threads.
    own.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", str(num_cores() // num_ranks or 1)))
    with (
        MemoryWatch() as memory,
        _environment(own | memory.environment),
        _spec(job, num_ranks) as spec,
        agent(spec, job.shutdown_timeout_s) as one,
        Wakeups() as wakeups,
    ):
        work = _AgentThread(one, wakeups)
        work.start()
        while work.is_alive() and not one.may_leave():
            came, ready = wakeups.wait(_LOOK_S, [] if control is None or control.said_lost else [control.fileno()])
            for number in came:
                _pass_on(one, number, job.shutdown_timeout_s)
            if control is not None:
                _obey(one, control, bool(ready), job.shutdown_timeout_s)
        if work.error is not None:
            where = f"{spec.master_addr}:{spec.master_port}"
            raise ZstoreError(f"the machines of the run did not meet at {where}: {work.error}") from work.error
        ended = one.ended()
        return replace(ended, about_kill=memory.text()) if ended.was_killed else ended


def count_gpus() -> int:
    """Return how many GPUs a process started here would see."""
    import torch

    return torch.cuda.device_count()


class _AgentThread(threading.Thread):
    """Torch's agent at work. A daemon: it may wait for machines that never come."""

    def __init__(self, one: Agent, wakeups: Wakeups) -> None:
        super().__init__(name="ranks", daemon=True)
        self._agent = one
        self._wakeups = wakeups
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._agent.run()
        except NeverStarted:
            pass
        except Exception as error:
            self.error = error
        finally:
            self._wakeups.wake()


def _pass_on(one: Agent, number: int, patience_s: float) -> None:
    if number == signal.SIGINT:
        one.end_within(0 if signal.SIGINT in one.came else patience_s)
    one.pass_on(number)


def _obey(one: Agent, control: Control, ready: bool, patience_s: float) -> None:
    for word, number in control.words() if ready else ():
        if word == "signal":
            _pass_on(one, number, patience_s)
        elif word == "failed":
            one.others_failed()
        elif word == "kill":
            one.end_within(0)
    if control.is_lost() and not control.said_lost:
        control.said_lost = True
        one.pass_on(signal.SIGTERM)
        one.end_within(patience_s)


@contextmanager
def _environment(own: dict[str, str]) -> Iterator[None]:
    """Have these variables within the block: ranks get this process's."""
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _spec(job: RunJob, num_ranks: int) -> Iterator[Any]:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    port, taken = job.master_port, None
    if not port:
        # Here and not in rank 0: the port is free, and torch's agent shares the store.
        taken = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        port = taken.port
    address = f"[{job.master_addr}]" if ":" in job.master_addr else job.master_addr
    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend="static",
            endpoint=f"{address}:{port}",
            run_id="zstore",
            min_nodes=job.num_nodes,
            max_nodes=job.num_nodes,
            timeout=_MEET_S,
            rank=job.node_rank,
        )
    )
    program, *arguments = job.command
    yield WorkerSpec(
        role="default",
        local_world_size=num_ranks,
        entrypoint=program,
        # Torch replaces variables in them, and two dollar signs by one.
        args=tuple(word.replace("$", "$$") for word in arguments),
        rdzv_handler=handler,
        max_restarts=job.max_restarts,
        monitor_interval=INTERVAL_S,
        master_addr=job.master_addr,
        master_port=port,
    )
    handler.shutdown()
    del taken


_GENERAL = "rest optimizer state on a drive (offload_optimizer), or lower the micro-batch"


class MemoryWatch(AbstractContextManager["MemoryWatch"]):
    """Collects the kernel's kills during a run, and the advice of ranks. `root`: see `read_host_memory`."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = count_memory_kills(root)
        self._folder = tempfile.TemporaryDirectory(prefix="zstore-run-", ignore_cleanup_errors=True)
        self._advice = Path(self._folder.name) / "advice"
        self.environment = {ADVICE_VARIABLE: str(self._advice)}
        """For the ranks."""

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def text(self) -> str:
        """Return the explanation to print once SIGKILL ended a rank."""
        now, before = count_memory_kills(self._root), self._before
        kills = None if now is None or before is None else now - before
        if kills == 0:
            return "the kernel has killed nothing for lack of memory meanwhile, so somebody else did"
        memory = read_host_memory(self._root)
        told = [] if kills is None else [f"kernel's kills for lack of memory meanwhile: {kills}"]
        if memory.usable_bytes is not None:
            limited = " by control group" if memory.usable_bytes == memory.limit_bytes else ""
            told.append(f"memory: {format_bytes(memory.usable_bytes)}{limited}")
        what = "as the kernel does when memory runs out" if kills is None else "memory ran out"
        advice = self._advice.read_text(encoding="utf-8") if self._advice.is_file() else _GENERAL
        return f"{what}{' (' + '; '.join(told) + ')' if told else ''}. Next, {advice}; `zstore plan` shows what fits"
