"""Collectives under way: counted, timed, or with nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

from ..io.links import LinkCounters

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "transfer", "control"]
"""The purpose of the bytes sent; "control" is agreement between ranks (counts, flags, errors), not tensors."""


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Block until it is done; raise its error."""

    def is_completed(self) -> bool:
        """Return whether it is done."""


class CountedWork:
    """A collective under way that counts how long it took and how long somebody waited for it.

    On CUDA a wait holds up the stream and not this thread, so the time counted there is the host's alone.
    """

    def __init__(
        self,
        work: Work,
        links: LinkCounters,
        kind: Kind,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._work = work
        self._within = within
        self._links = links
        self._kind = kind
        self._started: float | None = time.perf_counter()

    def wait(self) -> None:
        with self._links.waiting(self._kind, "begun earlier"), self._within():
            self._work.wait()
        started, self._started = self._started, None
        if started is not None:
            self._links.busy(self._kind, time.perf_counter() - started)

    def is_completed(self) -> bool:
        return self._work.is_completed()


class Done:
    """A collective that had nothing to do."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Return True."""
        return True
