"""Calls that all ranks make together, and the error of a rank that is alone in one.

[Note: meeting]
Collectives of two different calls that meet fail with the backend's own error, and with gloo by an abort. Scripts
written for replicated models save on the main process alone, so ranks meet in the store of the process group before the
first collective of a save or a load. A waiting rank looks at the next rank: one that closed its engine, or that has
entered a collective which this rank has not, will never come. Of ranks that are alone in a call, however many, one has a
next rank that is elsewhere, and its error ends all.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import NoReturn

import torch.distributed as torch_dist

from ..errors import UsageError
from .connections import Connections
from .watch import Watch

_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.001, 0.05
_LOOK_S = 0.5


class Meetings:
    """The calls of one run that all ranks make together. See [Note: meeting]. Made on all ranks in the same order."""

    def __init__(self, watch: Watch, rank: int, world_size: int, connections: Connections) -> None:
        self._watch, self._rank, self._world_size, self._connections = watch, rank, world_size, connections
        # Not the watch's connection, on which its thread may be waiting.
        self._store = watch.shared_store()
        self._count = 0

    def meet(self, call: str) -> None:
        """Return once all ranks are in `call` (all ranks). Raises UsageError if another rank is somewhere else for good."""
        self._count += 1
        key = f"meeting/{self._count}"
        # If the store fails, its process is gone: the call's own collectives tell more.
        with suppress(torch_dist.DistError):
            if self._store.add(f"{key}/ranks", 1) == self._world_size:
                self._store.set(f"{key}/call", call)
            elif not self._came(f"{key}/call", call):
                return
            found = self._store.get(f"{key}/call").decode()
            if found != call:
                self._refuse(call, f"another rank is in {found}")

    def _came(self, key: str, call: str) -> bool:
        """Wait until the last rank has set `key`; return False if a connection to another rank ended, or it took as long
        as a collective may: then the call's own collectives report it."""
        started = time.monotonic()
        pause_s, next_look = _LEAST_PAUSE_S, started + _LOOK_S
        connections = self._connections.there()
        while not self._store.check([key]):
            if time.monotonic() > next_look:
                self._watch.require_sound()
                where = self._elsewhere()
                if where is not None and not self._store.check([key]):
                    self._refuse(call, where)
                lasted_s = time.monotonic() - started
                if connections - self._connections.there() or lasted_s > torch_dist.default_pg_timeout.total_seconds():
                    return False
                next_look = time.monotonic() + _LOOK_S
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)
        return True

    def _elsewhere(self) -> str | None:
        """Return the place of the next rank, if it will not come any more."""
        other = (self._rank + 1) % self._world_size
        if self._store.check([f"left/{other}"]):
            return f"rank {other} closed its engine"
        if not self._store.check([f"at/{other}"]):
            return None
        at, in_foreign, *theirs = json.loads(self._store.get(f"at/{other}"))
        mine = self._watch.entered()
        # Others' count is no proof by itself: it includes transfers between two ranks.
        ahead = theirs[0] > mine[0] or (in_foreign and theirs[1] > mine[1])
        return f"rank {other} is in {at}" if ahead else None

    def _refuse(self, call: str, where: str) -> NoReturn:
        error = UsageError(
            f"{call} was called on rank {self._rank} while {where}: all ranks call it together, so take it out of "
            "conditions such as `if accelerator.is_main_process` or `if rank == 0`"
        )
        self._watch.escaped(error, final=True)  # the other ranks cannot fail alike
        raise error
