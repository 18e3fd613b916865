"""Gradients on their way from the device to host memory, beside the backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..device.copies import Copy, Transfers
from ..params.gradient_types import add_in
from ..params.record import ParameterRecord

_MOST_BYTES = 256 * 1024 * 1024
"""Of gradients on their way: so much of the device's memory they keep at most."""


@dataclass(frozen=True)
class _Target:
    """Where a part of a gradient goes."""

    record: ParameterRecord
    rows: torch.Tensor
    total: torch.dtype | None
    """Type of the sum with what is there; None: that is replaced."""

    def take(self, part: torch.Tensor) -> None:
        """Copy or add `part`, in the same memory."""
        if self.total is None:
            self.rows.copy_(part)
        else:
            add_in(self.rows, part, self.total)


class Landing:
    """A queue of copies, which land in the order in which they were begun. `landed` is told each record that did.

    Used from one thread at a time.
    """

    def __init__(self, transfers: Transfers, landed: Callable[[ParameterRecord], None]) -> None:
        self._transfers = transfers
        self._landed = landed
        self._under_way: deque[tuple[Copy, _Target]] = deque()
        self._nbytes = 0

    def put(
        self, record: ParameterRecord, rows: torch.Tensor, part: torch.Tensor, *, total: torch.dtype | None
    ) -> None:
        """Bring `part`, on the device, into `rows` of any type, or add it to them with the sum rounded to `total`: at once,
        or where they are the host's behind it."""
        target = _Target(record, rows, total)
        if self._transfers.link(part, rows) is None:
            target.take(part)
            self._landed(record)
            return
        straight = total is None and rows.dtype == part.dtype
        values = rows if straight else self._transfers.lane.empty_host(part.numel(), part.dtype)
        self._under_way.append((self._transfers.begin(values, part), target))
        self._nbytes += part.nbytes
        while self._under_way and (self._nbytes > _MOST_BYTES or self._under_way[0][0].done()):
            self._land()

    def _land(self) -> None:
        copy, target = self._under_way.popleft()
        values = self._transfers.finish(copy)
        self._nbytes -= values.nbytes
        if values is not target.rows:
            target.take(values)
        self._landed(target.record)

    def settle(self) -> None:
        """Return when everything has landed."""
        while self._under_way:
            self._land()

    def drop(self) -> None:
        """Forget what is under way, once nothing is written any more."""
        while self._under_way:
            self._under_way.popleft()[0].wait()
        self._nbytes = 0
