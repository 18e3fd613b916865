"""Commands that several processes carry out together: under torchrun, `zstore run` or srun, each does a part.

[Note: a command of several ranks]
The ranks meet by the variables that the launcher sets and talk over gloo. Each runs the command with its `Team`, which
divides the work; rank 0 alone prints. All end with the same code, and none before rank 0 has printed: a launcher stops the
others as soon as one fails. A rank that fails or dies ends all (see `zstore.ranks.watch`); SIGTERM, by which a launcher
stops them, ends a rank by an exception, so that rank 0 removes its unfinished output.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from functools import wraps
from typing import Any, NoReturn

from zstore.ranks.team import Team

from .train.rank_errors import said_once

_MEET = timedelta(minutes=30)
_LONGEST = timedelta(days=30)
"""How long a rank waits for others that have more to do. Ranks that are gone are noticed by the watch."""
_SILENT_S = 30.0
"""How long a rank may send no heartbeat before its machine counts as lost or stopped."""


def by_all_ranks(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Return `command`, carried out by all ranks of a launcher if there are several: then `team` is among its options."""

    @wraps(command)
    def run(**given: Any) -> int | None:
        if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return command(**given)
        if sys.__stderr__ is not None:
            sys.stderr = sys.__stderr__  # the arguments were fine
        with said_once(), _joined(command.__name__) as team:
            with _printing(team):
                code = command(**given, team=team) or 0
            codes: list[int] = team.all_gather_object(code)
            # Every rank ends by itself from here on.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            return max(codes)

    return run


@contextmanager
def _joined(phase: str) -> Iterator[Team]:
    """Meet the other ranks for the length of the block. See [Note: a command of several ranks]."""
    import torch.distributed as torch_dist

    from zstore.ranks.world import World

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    with _ending_with_the_launcher():
        torch_dist.init_process_group("gloo", timeout=_MEET)
    world = World(
        rank=torch_dist.get_rank(),
        world_size=torch_dist.get_world_size(),
        backend="gloo",
        group=torch_dist.new_group(timeout=_LONGEST),
    )
    world.begin_watch(_SILENT_S)
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        with world.calling(phase.removesuffix("_command")):
            yield Team(world)
    finally:
        signal.signal(signal.SIGTERM, before)
        world.end_watch()
        if world.watch is not None and not world.watch.broken:
            torch_dist.destroy_process_group()


@contextmanager
def _ending_with_the_launcher() -> Iterator[None]:
    """End this process if its parent dies within the block: a launcher that is killed cannot end ranks that wait for each
    other. Once they have met, the watch does."""
    launcher, met = os.getppid(), threading.Event()

    def watch() -> None:
        while not met.wait(1.0):
            if os.getppid() != launcher:
                os._exit(1)

    threading.Thread(target=watch, daemon=True, name="zstore-launcher").start()
    try:
        yield
    finally:
        met.set()


def _leave(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


@contextmanager
def _printing(team: Team) -> Iterator[None]:
    """Let rank 0 alone print the output; errors are printed by `said_once`, outside."""
    with ExitStack() as opened:
        if team.rank:
            nothing = opened.enter_context(open(os.devnull, "w"))
            opened.enter_context(redirect_stdout(nothing))
            opened.enter_context(redirect_stderr(nothing))
        yield
        sys.stdout.flush()
