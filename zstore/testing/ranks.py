"""Real ranks for tests: processes on this machine that talk over gloo."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from zstore.errors import RankError

PRELOADED = ["torch.distributed", "zstore.engine", "zstore.testing.ranks", "torch._dynamo"]
"""Modules loaded before ranks are forked. torch's optimizers load the last one as they are made, which takes longest of
all; a test suite adds its ranks' imports."""

_Ranks = list[tuple[BaseProcess, Connection]]
"""Each rank's process, and the end of the pipe on which it sends its result."""


_Function = tuple[str, str | None, str]
"""Module, file and name of a child's function: tests are not importable by name."""


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 180, may_die: Iterable[int] = ()
) -> list[Any]:
    """Run `fn(rank, *args)` in `world_size` new processes of one gloo group; return their results in rank order.

    `fn` must be a function at the top of its module; arguments and results are plain data. Each process computes with
    one thread. Raises RankError with every failed rank's traceback. If a rank fails, or `timeout_s` passes, all are
    stopped; after a timeout the error shows the stack of each rank that hung. No process is left running. Of a rank in
    `may_die` that ends without a result, or gives none until all others have, the result is None.
    """
    with _started(fn, world_size, args) as (ranks, folder):
        return _collect(ranks, folder, time.monotonic() + timeout_s, frozenset(may_die))


def kill_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, after_s: Sequence[float] = (), timeout_s: float = 60
) -> list[bool]:
    """Run `fn(rank, *args)` as `run_ranks` does, and end the processes by SIGKILL; return which of them ended before.

    Rank r is killed `after_s[r]` seconds after the start. Once one has been killed, by this or otherwise, all others are
    killed too, at their time if one is given. Raises RankError with the traceback of a rank that failed before that, and with
    the stacks of ranks that did not end within `timeout_s`.
    """
    with _started(fn, world_size, args) as (ranks, folder):
        started = time.monotonic()
        due = {rank: started + seconds for rank, seconds in enumerate(after_s)}
        running = {process.sentinel: rank for rank, (process, _) in enumerate(ranks)}
        ended: set[int] = set()
        failures: dict[int, str] = {}
        while running:
            limit = min([started + timeout_s, *(due[rank] for rank in running.values() if rank in due)])
            for sentinel in wait(list(running), timeout=max(0.0, limit - time.monotonic())):
                rank = running.pop(cast(int, sentinel))
                process, connection = ranks[rank]
                process.join()
                if process.exitcode == 0:
                    ended.add(rank)
                    good, value = connection.recv()
                    failures |= {} if good else {rank: str(value)}
                else:
                    due = {r: due.get(r, 0.0) for r in range(world_size)}
            if time.monotonic() > started + timeout_s:
                failures |= _where_they_hang(ranks, list(running.values()), folder)
                raise RankError(f"rank {', '.join(map(str, failures))} of {world_size} hung or failed", failures)
            for rank in running.values():
                if rank in due and time.monotonic() >= due[rank]:
                    ranks[rank][0].kill()
        if failures and len(ended) == world_size:
            raise RankError(f"rank {', '.join(map(str, sorted(failures)))} of {world_size} failed", failures)
        return [rank in ended for rank in range(world_size)]


def loaded_context() -> ForkServerContext:
    """Return a context that forks processes from one with torch and the engine loaded, and, unless it has started
    already, `PRELOADED`: a start takes a tenth of a second, not three."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@contextmanager
def _started(fn: Callable[..., Any], world_size: int, args: tuple[Any, ...]) -> Iterator[tuple[_Ranks, Path]]:
    """Start the processes for the length of a `with` block."""
    context = loaded_context()
    module = sys.modules[fn.__module__]
    function = fn.__module__, getattr(module, "__file__", None), fn.__qualname__
    with tempfile.TemporaryDirectory(prefix="zstore-ranks-") as folder:
        ranks: _Ranks = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(
                    target=_child, args=(function, rank, world_size, folder, theirs, args), daemon=True
                )
                process.start()
                theirs.close()
                ranks.append((process, ours))
            yield ranks, Path(folder)
        finally:
            for process, connection in ranks:
                process.kill()
                process.join()
                connection.close()


def _collect(ranks: _Ranks, folder: Path, deadline: float, may_die: frozenset[int]) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {rank: connection for rank, (_, connection) in enumerate(ranks)}
    while not waiting.keys() <= may_die:
        # Once a rank has failed, the others get a moment to report it.
        limit = min(deadline, time.monotonic() + 2) if failures else deadline
        ready = wait(list(waiting.values()), timeout=max(0, limit - time.monotonic()))
        if not ready:
            if not failures:
                failures = _where_they_hang(ranks, waiting, folder)
            break
        for rank in [rank for rank, connection in waiting.items() if connection in ready]:
            try:
                good, value = waiting.pop(rank).recv()
            except EOFError:
                if rank in may_die:
                    continue
                ranks[rank][0].join()
                good, value = False, f"the process ended with exit code {ranks[rank][0].exitcode}"
            if good:
                results[rank] = value
            else:
                failures[rank] = str(value)
    if failures:
        raise RankError(f"rank {', '.join(map(str, sorted(failures)))} of {len(ranks)} failed", failures)
    return [results.get(rank) for rank in range(len(ranks))]


def _where_they_hang(ranks: _Ranks, hung: Iterable[int], folder: Path) -> dict[int, str]:
    places: dict[int, str] = {}
    for rank in hung:
        process, _ = ranks[rank]
        trace = folder / f"trace-{rank}"
        if process.pid is not None and process.is_alive() and trace.exists():
            os.kill(process.pid, signal.SIGUSR1)
            end = time.monotonic() + 5
            while not trace.stat().st_size and time.monotonic() < end:
                time.sleep(0.01)
        text = trace.read_text() if trace.exists() else ""
        places[rank] = f"timed out\n{text}"
    return places


def _child(
    function: _Function, rank: int, world_size: int, folder: str, results: Connection, args: tuple[Any, ...]
) -> None:
    gc.freeze()  # a collection over forked objects would copy their memory
    with open(Path(folder) / f"trace-{rank}", "w") as trace:
        faulthandler.register(signal.SIGUSR1, file=trace, all_threads=True)
        try:
            value = _run(function, rank, world_size, folder, args)
        except BaseException:
            results.send((False, traceback.format_exc()))
        else:
            results.send((True, value))
        results.close()
        # Threads of a broken group would keep the process alive.
        faulthandler.unregister(signal.SIGUSR1)
        os._exit(0)


def _run(function: _Function, rank: int, world_size: int, folder: str, args: tuple[Any, ...]) -> Any:
    import torch
    import torch.distributed as torch_dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GLOO_SOCKET_IFNAME="lo",
    )
    warnings.simplefilter("error")
    fn = _load(function)
    torch_dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    # A rank that ended at once would break connections that others are still making.
    torch_dist.barrier()
    value = fn(rank, *args)
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()
    return value


def _load(function: _Function) -> Callable[..., Any]:
    name, path, qualified_name = function
    try:
        module = importlib.import_module(name)
    except ImportError:
        spec = importlib.util.spec_from_file_location(name, path or "")
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in qualified_name.split("."):
        found = getattr(found, part)
    fn: Callable[..., Any] = found
    return fn
