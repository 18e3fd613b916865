"""Gradients on their way from the device to host memory, beside the backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from .parameters import ParameterRecord
from .transfers import Copy, Transfers

_MOST_BYTES = 256 * 1024 * 1024
"""Of gradients on their way: so much of the device's memory they keep at most."""


class Landing:
    """A queue of copies, which land in the order in which they were begun. `landed` is told each record that did.

    Used from one thread at a time.
    """

    def __init__(self, transfers: Transfers, landed: Callable[[ParameterRecord], None]) -> None:
        self._transfers = transfers
        self._landed = landed
        self._under_way: deque[tuple[ParameterRecord, Copy, torch.Tensor | None]] = deque()
        self._nbytes = 0

    def put(self, record: ParameterRecord, rows: torch.Tensor, part: torch.Tensor, *, add: bool) -> None:
        """Bring `part`, on the device, into `rows`, or `add` it to them: at once, or where they are the host's behind it."""
        if self._transfers.link(part, rows) is None:
            if add:
                rows.add_(part)
            else:
                rows.copy_(part)
            self._landed(record)
            return
        target = self._transfers.lane.empty_host(part.numel(), part.dtype) if add else rows
        self._under_way.append((record, self._transfers.begin(target, part), rows if add else None))
        self._nbytes += part.nbytes
        while self._under_way and (self._nbytes > _MOST_BYTES or self._under_way[0][1].done()):
            self._land()

    def _land(self) -> None:
        record, copy, rows = self._under_way.popleft()
        values = self._transfers.finish(copy)
        self._nbytes -= values.nbytes
        if rows is not None:
            rows.add_(values)
        self._landed(record)

    def settle(self) -> None:
        """Return when everything has landed."""
        while self._under_way:
            self._land()

    def drop(self) -> None:
        """Forget what is under way, once nothing is written any more."""
        while self._under_way:
            self._under_way.popleft()[1].wait()
        self._nbytes = 0
